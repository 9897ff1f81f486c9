"""Matrices with a prescribed spectrum, for tests of the measuring half."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def frame(rng: np.random.Generator, d: int, k: int | None = None) -> Array:
    """`k` orthonormal columns in d dimensions (d when None), Haar-distributed, float64."""
    q, r = np.linalg.qr(rng.standard_normal((d, d)))
    return (q * np.sign(np.diag(r)))[:, :k]


def matrix(rng: np.random.Generator, out: int, into: int, spectrum: Sequence[float] | Array) -> Array:
    """`W[out, in]`, float64, with these singular values (zero beyond them) in random frames."""
    k = len(spectrum)
    return frame(rng, out, k) * np.asarray(spectrum) @ frame(rng, into, k).T


def stack(rng: np.random.Generator, layers: int, out: int, into: int, spectrum: Sequence[float] | Array) -> Array:
    """`W[layer, out, in]`, float32, every layer with this spectrum in frames of its own."""
    return np.stack([matrix(rng, out, into, spectrum) for _ in range(layers)]).astype(np.float32)


def sine(x_DK: Array, y_DK: Array) -> Array:
    """Sine of the angle between columns of unit norm; exact for small angles, where `1 - |cos|` has no digits left."""
    x_DK, y_DK = (np.asarray(a, np.float64) / np.linalg.norm(np.asarray(a, np.float64), axis=0) for a in (x_DK, y_DK))
    return np.linalg.norm(x_DK - y_DK * np.sum(x_DK * y_DK, axis=0), axis=0)
