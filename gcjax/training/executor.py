"""Trains packs on the devices of this process: from checkpoint to checkpoint, and to the history that a pack leaves behind."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from gcjax.errors import GcjaxError
from gcjax.training import checkpoint, feed
from gcjax.training.checkpoint import History
from gcjax.training.sweep import Pack
from gcjax.training.train import DATA, Programs, programs

LAST_ONLY = ("spectrum",)  # measures of which the history keeps the last snapshot alone
Report = Callable[[Pack, int], None]  # pack, steps done


class Stopped(Exception):
    """Training was asked to stop; everything so far is in the checkpoints."""


def vmap_width(config: ConfigDict) -> int:
    """Runs side by side in one program: the config's, or by backend where that is 0.

    On CPU a wide vmap is two to three times slower a run than runs one after the other; on accelerators it is the point.
    """
    if config.executor.vmap_width:
        return config.executor.vmap_width
    return 1 if jax.default_backend() == "cpu" else 32


def snapshot_steps(config: ConfigDict) -> list[int]:
    """The steps at which a run is measured: the early ones, the regular ones, and the last."""
    last, every = config.train.steps, config.measure.every
    return sorted({step for step in (*config.measure.early, *range(0, last, every)) if step < last} | {last})


def full_steps(config: ConfigDict) -> list[int]:
    """The snapshots, evenly among all, that keep the measures over the whole spectrum and the layer x layer maps."""
    steps = snapshot_steps(config)
    chosen = np.linspace(0, len(steps) - 1, min(config.measure.full, len(steps))).round().astype(int)
    return [steps[i] for i in np.unique(chosen)]


def boundaries(config: ConfigDict) -> list[int]:
    """Where chunks end. They follow from the config alone, so a resumed run has the same chunks as an uninterrupted one."""
    return sorted({*snapshot_steps(config), *range(0, config.train.steps, config.train.chunk)})


def groups(config: ConfigDict) -> list[list[Any]]:
    """This process's devices, `executor.data_devices` a group: each trains one pack at a time.

    Raises `GcjaxError` where there are not as many.
    """
    devices, size = jax.local_devices(), config.executor.data_devices
    if len(devices) < size:
        raise GcjaxError(f"executor.data_devices={size}, but there are {len(devices)} {devices[0].platform} devices here")
    return [devices[i : i + size] for i in range(0, len(devices) - size + 1, size)][: config.executor.workers or None]


def train_on_devices(
    packs: Sequence[Pack], config: ConfigDict, arrays: Any, directory: Path, report: Report, stop: threading.Event
) -> None:
    """Train every pack, one at a time on each group of local devices, a thread a group.

    Set `stop` to make every device finish its chunk, save and raise `Stopped`. The first error of any pack stops the others
    in the same way and is raised.
    """
    waiting, errors = deque(packs), list[BaseException]()

    def work(devices: list[Any]) -> None:
        try:
            train_queue(_drain(waiting), config, arrays, devices, directory, report, stop)
        except BaseException as error:  # whatever it is, it is raised again in the caller's thread
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=work, args=(group,), name=str(group)) for group in groups(config)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        stop.set()
        for thread in threads:
            thread.join()
        raise
    for error in errors:
        raise error


def _drain(waiting: deque[Pack]) -> Iterator[Pack]:
    while waiting:
        yield waiting.popleft()


def train_queue(
    waiting: Iterable[Pack], config: ConfigDict, arrays: Any, devices: Sequence[Any], directory: Path, report: Report,
    stop: threading.Event,
) -> None:  # fmt: skip
    """Train packs on one group of devices until none is left; neighbours of one program share it."""
    key, compiled = None, None
    where = devices[0] if len(devices) == 1 else NamedSharding(Mesh(np.asarray(devices), (DATA,)), PartitionSpec())
    data = feed.place(config, arrays, where)
    with jax.default_device(devices[0]):
        for pack in waiting:
            if compiled is None or key != (pack.static, len(pack.runs)):
                key = (pack.static, len(pack.runs))
                compiled = programs(*key, where, config.executor.fsdp)
            train_pack(pack, compiled, config, data, directory / pack.name, partial(report, pack), stop)


def train_pack(
    pack: Pack,
    compiled: Programs,
    config: ConfigDict,
    data: Any,
    directory: Path,
    report: Callable[[int], None],
    stop: threading.Event,
) -> None:
    """Train one pack on the default device, from its newest checkpoint; nothing to do for a pack that has ended.

    Metrics are fetched one chunk late, so that the device always has the next chunk at hand. A pack whose runs have all
    become NaN ends early.
    """
    if checkpoint.finished(directory):
        report(config.train.steps)
        return
    ends, snapshots, full = boundaries(config), snapshot_steps(config), full_steps(config)
    traced = {path: jnp.asarray(values, jnp.float32) for path, values in pack.traced().items()}
    state, initial = compiled.init(jnp.asarray([run.seed for run in pack.runs], jnp.uint32), traced)
    history, done, seen = {}, -1, time.monotonic()
    resumed = checkpoint.restore(directory, state)
    if resumed is not None:
        done, state, history = resumed
        report(done)

    def collect(pending: tuple[int, Any, Any]) -> bool:
        """Move one chunk's numbers to the host; whether any run is still alive."""
        nonlocal seen
        end, losses, metrics = jax.device_get(pending)
        seen, before = time.monotonic(), seen
        losses["seconds"] = np.full(len(pack.runs), seen - before, np.float32)  # until here since the last chunk was
        _write(history, "chunk", ends.index(end), len(ends), losses)
        if metrics is not None:
            _write(history, "", snapshots.index(end), len(snapshots), metrics)
        report(end)
        return not np.isnan(losses["loss"]).all()

    pending, saved = None, time.monotonic()
    intervals = [(start, end) for start, end in zip([0, *ends], ends) if end > done]
    for (start, end), own in zip(intervals, feed.feed(pack.static, data, state.key[0], intervals, compiled.where)):
        if end == 0:
            losses = {name: jnp.full((len(pack.runs),), -jnp.inf) for name in ("loss", "loss_max")}  # no step yet
        else:
            state, losses = compiled.chunk(state, traced, own, np.int32(end - start))
        metrics = compiled.snapshot(state, initial, traced, own, np.bool_(end in full)) if end in snapshots else None
        alive = collect(pending) if pending is not None else True
        pending = (end, losses, metrics)
        if stop.is_set() or time.monotonic() - saved > config.checkpoint.seconds:
            alive = collect(pending)
            pending = None
            checkpoint.save(directory, end, state, history)
            saved = time.monotonic()
            if stop.is_set():
                raise Stopped
        if not alive:
            break
    if pending is not None:
        collect(pending)
    checkpoint.finish(directory, history, state.params if config.checkpoint.keep_params else None)
    report(config.train.steps)


def _write(history: History, prefix: str, row: int, rows: int, values: dict[str, np.ndarray]) -> None:
    """Put `values` into row `row` of the history's arrays, which begin as NaN (flags as 1)."""
    for name, value in values.items():
        name = f"{prefix}/{name}" if prefix else name
        if name.rpartition("/")[2] in LAST_ONLY:
            history[name] = np.asarray(value)
            continue
        if value.dtype == bool:
            value = value.astype(np.int8)
        if name not in history:
            history[name] = np.full((rows, *value.shape), 1 if value.dtype == np.int8 else np.nan, value.dtype)
        history[name][row] = value
