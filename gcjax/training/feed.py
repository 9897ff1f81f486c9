"""What a chunk of steps reads: all data, on the device from the start, or, of a corpus too large for it, just its windows."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np
from ml_collections import FrozenConfigDict

from gcjax.errors import GcjaxError
from gcjax.training import language

CORPUS = "train"


def place(config: Any, arrays: Mapping[str, np.ndarray], where: Any) -> dict[str, Any]:
    """The arrays on the device or sharding `where`, but for a corpus beyond `data.device_bytes`, which stays as it is."""
    return {name: value if _stays(config, name, value) else jax.device_put(value, where) for name, value in arrays.items()}


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
    config: FrozenConfigDict, data: Mapping[str, Any], key: jax.Array, intervals: Sequence[tuple[int, int]], where: Any
) -> Iterator[Mapping[str, Any]]:
    """`problem.batch`'s data for each interval (first, last) of steps, that of step `last` included.

    `data` comes from `place`. Of a corpus on the host, a thread gathers the windows of the next interval while this one's
    are trained on, so that the device does not wait.
    """
    if not any(_stays(config, name, value) for name, value in data.items()):
        yield from (data for _ in intervals)
        return
    if not intervals:
        return
    corpus, rest = data[CORPUS], {name: value for name, value in data.items() if name != CORPUS}

    # All at once and before the first chunk: later the device would only come to them when it is idle.
    begin, end, longest = intervals[0][0], intervals[-1][1], max(last - first for first, last in intervals) + 1
    starts_SB = np.asarray(_starts(config, len(corpus), key, np.arange(begin, end + 1, dtype=np.int32)))

    def gather(first: int, last: int) -> np.ndarray:
        # As many as the longest interval has, so that all share a program.
        steps_S = np.minimum(np.arange(first, first + longest), last)
        return language.gather(corpus, starts_SB[steps_S - begin], config.train.window)

    with ThreadPoolExecutor(1) as thread:
        ahead = [thread.submit(gather, *interval) for interval in intervals[:1]]
        for (first, _), following in zip(intervals, [*intervals[1:], None]):
            windows = ahead.pop().result()
            ahead += [thread.submit(gather, *following)] if following else []
            yield rest | {"windows": jax.device_put(windows, where), "first": np.int32(first)}


@partial(jax.jit, static_argnums=(0, 1))
def _starts(config: FrozenConfigDict, tokens: int, key: jax.Array, steps_S: jax.Array) -> jax.Array:
    return jax.vmap(lambda step: language.starts(config, key, step, tokens))(steps_S)
