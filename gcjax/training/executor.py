"""Trains packs on the devices of this process: from checkpoint to checkpoint, and to the history that a pack leaves behind."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from gcjax import processes
from gcjax.errors import GcjaxError, Stopped
from gcjax.training import checkpoint, feed
from gcjax.training.checkpoint import History
from gcjax.training.sweep import Pack
from gcjax.training.train import DATA, RUN, Programs, programs

LAST_ONLY = ("spectrum",)  # measures of which the history keeps the last snapshot alone
Report = Callable[[Pack, int], None]  # pack, steps done


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


def groups(config: ConfigDict) -> list[np.ndarray]:
    """Devices that train one pack at a time, each group [executor.run_devices, executor.data_devices]: groups of this process,
    or one of all processes.

    Raises `GcjaxError` where there are not as many devices, and for a group that would span some processes only.
    """
    local, shape = jax.local_devices(), (config.executor.run_devices, config.executor.data_devices)
    size, every = math.prod(shape), jax.device_count()
    if size > len(local) and size != every:
        there = f"there are {len(local)} {local[0].platform} devices here"
        there += f" and {every} in all processes: give a divisor of the former, or all" if every > len(local) else ""
        raise GcjaxError(f"executor.run_devices={shape[0]} x executor.data_devices={shape[1]}, but {there}")
    if size > len(local):
        return [np.asarray(jax.devices()).reshape(shape)]
    starts = range(0, len(local) - size + 1, size)
    return [np.asarray(local[i : i + size]).reshape(shape) for i in starts][: config.executor.workers or None]


def span_processes(config: ConfigDict) -> bool:
    """Whether a pack is trained by all processes together; else each trains packs of its own."""
    return config.executor.run_devices * config.executor.data_devices > jax.local_device_count()


def placement(devices: np.ndarray) -> Any:
    """Where a group of devices holds what is not sharded: the one device, or the replicating sharding of their mesh."""
    return devices.item() if devices.size == 1 else NamedSharding(Mesh(devices, (RUN, DATA)), PartitionSpec())


def padded(runs: int, devices: np.ndarray) -> int:
    """The width of the program for so many runs: a multiple of the devices that share them."""
    return math.ceil(runs / len(devices)) * len(devices)


def train_on_devices(
    packs: Sequence[Pack], config: ConfigDict, arrays: Any, directory: Path, report: Report, stop: threading.Event
) -> None:
    """Train every pack, one at a time on each group of local devices, a thread a group.

    Set `stop` to make every device finish its chunk, save and raise `Stopped`. The first error of any pack stops the others
    in the same way and is raised.
    """
    waiting, errors = deque(packs), list[BaseException]()

    def work(devices: np.ndarray) -> None:
        try:
            train_queue(_drain(waiting), config, arrays, devices, directory, report, stop)
        except BaseException as error:  # whatever it is, it is raised again in the caller's thread
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=work, args=(group,), name=str(group.flat[0])) for group in groups(config)]
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
    waiting: Iterable[Pack], config: ConfigDict, arrays: Any, devices: np.ndarray, directory: Path, report: Report,
    stop: threading.Event,
) -> None:  # fmt: skip
    """Train packs on one group of devices until none is left; neighbours of one program share it."""
    key, compiled = None, None
    where = placement(devices)
    data = feed.place(config, arrays, where)
    with jax.default_device(devices.flat[0] if devices.flat[0] in jax.local_devices() else None):
        for pack in waiting:
            width = padded(len(pack.runs), devices)
            if compiled is None or key != (pack.static, width):
                key = (pack.static, width)
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
    become NaN ends early. Where the program is wider than the pack, its last run fills the rest and is dropped from what is
    fetched.
    """
    together = span_processes(config)
    ended = checkpoint.finished(directory)
    if processes.of_first(ended) if together else ended:
        report(config.train.steps)
        return
    ends, snapshots, full = boundaries(config), snapshot_steps(config), full_steps(config)

    def by_run(values: Sequence[Any], dtype: Any) -> jax.Array:
        padding = [values[-1]] * (compiled.width - len(values))
        return processes.place(np.asarray([*values, *padding], dtype), compiled.runs)

    traced = {path: by_run(values, np.float32) for path, values in pack.traced().items()}
    state, initial = compiled.init(by_run([run.seed for run in pack.runs], np.uint32), traced)
    history, done, seen = {}, -1, time.monotonic()
    resumed = checkpoint.restore(directory, state)
    if resumed is not None:
        done, state, history = resumed
        report(done)

    def collect(pending: tuple[int, Any, Any]) -> bool:
        """Move one chunk's numbers to the host; whether any run is still alive."""
        nonlocal seen
        end, losses, metrics = jax.tree.map(lambda x: x[: len(pack.runs)] if np.ndim(x) else x, jax.device_get(pending))
        seen, before = time.monotonic(), seen
        losses["seconds"] = np.full(len(pack.runs), seen - before, np.float32)  # until here since the last chunk was
        _write(history, "chunk", ends.index(end), len(ends), losses)
        if metrics is not None:
            _write(history, "", snapshots.index(end), len(snapshots), metrics)
        report(end)
        return not np.isnan(losses["loss"]).all()

    def due() -> tuple[bool, bool]:
        """Whether to save, and to stop; processes that train together do what the first one says."""
        save, asked = time.monotonic() - saved > config.checkpoint.seconds, stop.is_set()
        if together:
            if asked:
                processes.ask_to_stop()
            agreed = processes.of_first(save + 2 * processes.asked_to_stop() if processes.leads() else 0)
            save, asked = bool(agreed & 1), bool(agreed & 2)
        return save or asked, asked

    pending, saved = None, time.monotonic()
    intervals = [(start, end) for start, end in zip([0, *ends], ends) if end > done]
    for (start, end), own in zip(intervals, feed.feed(pack.static, data, pack.runs[0].seed, intervals, compiled.where)):
        if end == 0:
            losses = {name: np.full(len(pack.runs), -np.inf, np.float32) for name in ("loss", "loss_max")}  # no step yet
        else:
            state, losses = compiled.chunk(state, traced, own, np.int32(end - start))
        metrics = compiled.snapshot(state, initial, traced, own, np.bool_(end in full)) if end in snapshots else None
        alive = collect(pending) if pending is not None else True
        pending = (end, losses, metrics)
        if config.checkpoint.keep_snapshots and end in full:
            checkpoint.keep(directory, end, jax.tree.map(lambda x: x[: len(pack.runs)], state.params), together)
        save, asked = due()
        if save:
            alive = collect(pending)
            pending = None
            checkpoint.save(directory, end, state, history)
            saved = time.monotonic()
        if asked:
            raise Stopped
        if not alive:
            break
    if pending is not None:
        collect(pending)
    params = jax.tree.map(lambda x: x[: len(pack.runs)], state.params) if config.checkpoint.keep_params else None
    checkpoint.finish(directory, history, params, together)
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
