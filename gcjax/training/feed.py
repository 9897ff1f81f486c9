"""What a chunk of steps reads: all data, on the device from the start, or, of a corpus too large for it, just its windows."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from ml_collections import FrozenConfigDict

from gcjax import processes
from gcjax.errors import GcjaxError
from gcjax.training import language
from gcjax.training.train import DATA, keys

CORPUS = "train"


def place(config: Any, arrays: Mapping[str, np.ndarray], where: Any) -> dict[str, Any]:
    """The arrays on the device or sharding `where`, but for a corpus beyond `data.device_bytes`, which stays as it is."""
    return {name: value if _stays(config, name, value) else processes.place(value, where) for name, value in arrays.items()}


def check(config: Any, arrays: Mapping[str, np.ndarray], width: int) -> None:
    """Raises `GcjaxError` where the host would have to gather windows for `width` runs at once, each with its own."""
    if width > 1 and any(_stays(config, name, value) for name, value in arrays.items()):
        raise GcjaxError(
            f"the corpus of {arrays[CORPUS].nbytes} bytes is beyond data.device_bytes={config.data.device_bytes} and stays on "
            "the host, which serves one run at a time: set executor.vmap_width=1, or device_bytes higher"
        )


def _stays(config: Any, name: str, value: Any) -> bool:
    return name == CORPUS and value.nbytes > config.data.device_bytes


def feed(
    config: FrozenConfigDict, data: Mapping[str, Any], seed: int, intervals: Sequence[tuple[int, int]], where: Any
) -> Iterator[Mapping[str, Any]]:
    """`problem.batch`'s data for each interval (first, last) of steps, that of step `last` included.

    `data` comes from `place`. Of a corpus on the host, a thread gathers the windows of the next interval while this one's
    are trained on, so that the device does not wait; on a mesh, those that this process's devices take of each batch.
    """
    if not any(_stays(config, name, value) for name, value in data.items()):
        yield from (data for _ in intervals)
        return
    if not intervals:
        return
    corpus, rest = data[CORPUS], {name: value for name, value in data.items() if name != CORPUS}

    # All at once and before the first chunk: later the device would only come to them when it is idle.
    begin, end, longest = intervals[0][0], intervals[-1][1], max(last - first for first, last in intervals) + 1
    starts_SB = np.asarray(_starts(config, len(corpus), seed, np.arange(begin, end + 1, dtype=np.int32)))
    batch, window = config.train.batch_size, config.train.window
    mesh = getattr(where, "mesh", None)
    split = SingleDeviceSharding(where) if mesh is None else NamedSharding(mesh, PartitionSpec(None, DATA))
    shape = (longest, batch, window + 1)

    def rows(part: Any) -> tuple[int, int]:
        first, last, _ = part[1].indices(batch)
        return first, last

    own = {rows(part) for part in split.addressable_devices_indices_map(shape).values()}

    def gather(first: int, last: int) -> dict[tuple[int, int], np.ndarray]:
        # As many as the longest interval has, so that all share a program.
        steps_S = np.minimum(np.arange(first, first + longest), last)
        return {part: language.gather(corpus, starts_SB[steps_S - begin, slice(*part)], window) for part in own}

    with ThreadPoolExecutor(1) as thread:
        ahead = [thread.submit(gather, *interval) for interval in intervals[:1]]
        for (first, _), following in zip(intervals, [*intervals[1:], None]):
            parts = ahead.pop().result()
            ahead += [thread.submit(gather, *following)] if following else []
            windows = jax.make_array_from_callback(shape, split, lambda part, parts=parts: parts[rows(part)])
            yield rest | {"windows": windows, "first": np.int32(first)}


@partial(jax.jit, static_argnums=(0, 1))
def _starts(config: FrozenConfigDict, tokens: int, seed: Any, steps_S: jax.Array) -> jax.Array:
    return jax.vmap(lambda step: language.starts(config, keys(seed)[1], step, tokens))(steps_S)
