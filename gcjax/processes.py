"""The processes that work on one command together, on JAX's distributed runtime: which is this one, and what all agree on.

A process that never joined others is the only one; nothing here communicates then. What all agree on goes through the
coordination service, not through collectives: those wait for the device, and give up after a while (on CPU, seconds). `wait`,
`in_turn` and `of_first` are called by all processes, in the same order.
"""

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed  # the coordination service's barrier and store have no public name
from jax.experimental import multihost_utils

from gcjax.errors import GcjaxError

T = TypeVar("T")
PATIENCE_MS = 7 * 24 * 3600 * 1000
STOP = "gcjax/stop"
_calls = itertools.count()


def join(coordinator: str | None = None, count: int | None = None, index: int | None = None) -> None:
    """Join the other processes, before anything touches a device.

    Without arguments JAX asks the scheduler that started this process: Slurm's srun, a TPU slice, Open MPI, Kubernetes.
    Raises `GcjaxError` where none did, where only some of the three are given, and where the others cannot be reached.
    """
    given = (coordinator, count, index)
    if None in given and given != (None, None, None):
        raise GcjaxError("--coordinator, --num-processes and --process-id belong together; give all three, or --distributed")
    if count is not None and index is not None and not 0 <= index < count:
        raise GcjaxError(f"--process-id {index} does not exist; {count} processes are numbered 0 to {count - 1}")
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, which is ours to handle
    try:
        jax.distributed.initialize(coordinator, count, index)
    except (RuntimeError, ValueError) as error:
        said = f"cannot join the other processes ({str(error).splitlines()[0]})"
        hint = "start it by srun, or on every worker of a TPU slice, or give --coordinator, --num-processes and --process-id"
        raise GcjaxError(f"{said}; {hint if coordinator is None else 'check that the coordinator can be reached'}") from error


def index() -> int:
    """This process's number, from 0."""
    return jax.process_index()


def count() -> int:
    """How many processes there are."""
    return jax.process_count()


def leads() -> bool:
    """Whether this is the process that speaks, draws and writes results."""
    return index() == 0


def wait() -> None:
    """Wait until every process is here, however long that takes. If one dies, the coordinator notices and ends the others."""
    if count() > 1:
        _client().wait_at_barrier(_next_key(), timeout_in_ms=PATIENCE_MS)


def connect() -> None:
    """Connect the devices of all processes, which on CPU must reach for each other within seconds: later, one may compile."""
    wait()
    multihost_utils.sync_global_devices("gcjax")


def in_turn(work: Callable[[], T]) -> T:
    """What `work` returns in each process: in the first before the others, who then find in caches what it has left there."""
    if leads():
        done = work()
        wait()
        return done
    wait()
    return work()


def of_first(value: int) -> int:
    """The first process's `value`, in every process."""
    if count() == 1:
        return value
    key = _next_key()
    if leads():
        _client().key_value_set(key, str(int(value)))
        return value
    return int(_client().blocking_key_value_get(key, PATIENCE_MS))


def ask_to_stop() -> None:
    """Let every process see, in `asked_to_stop`, that this one was asked to stop."""
    _client().key_value_set(f"{STOP}/{index()}", "", allow_overwrite=True)


def asked_to_stop() -> bool:
    """Whether any process has been."""
    return bool(_client().key_value_dir_get(STOP))


def place(value: np.ndarray, where: Any) -> jax.Array:
    """A host array that every process holds, on a device or a sharding; each puts down its own part."""
    if not isinstance(where, jax.sharding.Sharding) or where.is_fully_addressable:
        return jax.device_put(value, where)
    return jax.make_array_from_callback(value.shape, where, lambda part: value[part])


def _client() -> Any:
    return distributed.global_state.client


def _next_key() -> str:
    """A name that no call has used before; the same in all processes, as they call in the same order."""
    return f"gcjax/{next(_calls)}"
