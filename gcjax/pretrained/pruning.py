"""Which layers to leave out of a model: orders by what is thought to tell the needless ones, and sets of each size."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int8
from scipy.sparse.linalg import svds

from gcjax.errors import GcjaxError
from gcjax.results import ORDERS, PREDICTED, SPACES


def continuity(
    layers: Sequence[int], matrices: Sequence[str], read: Callable[[str, int], Float[np.ndarray, "O I"]]
) -> Float[np.ndarray, "L"]:
    """Of each layer the mean `|cos|` of leading singular vectors, in the space that the paper predicts of a projection, with
    the layers beside it, over the projections; NaN where there are none. One matrix in memory at a time."""
    cosines = []
    for matrix in matrices:
        if PREDICTED.get(matrix) not in SPACES:
            continue
        vectors = np.stack([_leading(read(matrix, layer), PREDICTED[matrix] == "output") for layer in layers])
        cosines.append(np.abs(np.sum(vectors[1:] * vectors[:-1], axis=1)))
    if not cosines or len(layers) < 2:
        return np.full(len(layers), np.nan)
    pair = np.mean(cosines, axis=0)
    beside = np.stack([np.append(pair, np.nan), np.append(np.nan, pair)])
    return np.nanmean(beside, axis=0)


def _leading(w_OI: np.ndarray, output: bool) -> np.ndarray:
    u_O1, _, v_1I = svds(w_OI.astype(np.float64), k=1, v0=np.ones(min(w_OI.shape)))
    vector = u_O1 if output else v_1I
    assert vector is not None  # as it is asked for
    return np.ravel(vector)


def scores(
    continuity_L: Float[np.ndarray, "L"], influence_L: Float[np.ndarray, "L"], rise_L: Float[np.ndarray, "L"]
) -> Float[np.ndarray, "4 L"]:
    """By `results.ORDERS`, the highest to be left out first; `rise_L` is each layer's own rise of the loss."""
    depth_L = np.arange(len(rise_L), dtype=np.float64)
    depth_L[-1] = -1  # the last but one first, the last one last
    found = {"continuity": continuity_L, "depth": depth_L, "influence": -influence_L, "measured": -rise_L}
    return np.stack([found[order] for order in ORDERS])


def leading(score_L: Float[np.ndarray, "L"], count: int) -> Int8[np.ndarray, "L"]:
    """1 at the layers that an order leaves out first."""
    chosen = np.zeros(len(score_L), np.int8)
    chosen[np.argsort(-np.nan_to_num(score_L, nan=-np.inf), kind="stable")[:count]] = 1
    return chosen


def at_random(depth: int, count: int, seed: Sequence[int]) -> Int8[np.ndarray, "L"]:
    """1 at layers drawn without replacement."""
    chosen = np.zeros(depth, np.int8)
    chosen[np.random.default_rng(seed).choice(depth, count, replace=False)] = 1
    return chosen


def sets(score_AL: Float[np.ndarray, "4 L"], pruned: Sequence[int], draws: int, seed: int) -> Mapping[str, np.ndarray]:
    """`removed` and `removed_random` of the results. Raises `GcjaxError` for a number that leaves no layer."""
    depth = score_AL.shape[1]
    if max(pruned) >= depth:
        raise GcjaxError(f"--pruned {max(pruned)} leaves no layer of {depth}")
    return {
        "removed": np.stack([[leading(score_L, count) for count in pruned] for score_L in score_AL]),
        "removed_random": np.stack([[at_random(depth, n, (seed, draw, n)) for n in pruned] for draw in range(draws)]),
    }
