"""One matrix -> its leading singular triplets, by the cheapest method that is exact enough for its size.

| method | when | what |
|---|---|---|
| gram64 | min(O, I) <= exact_below | float64 eigenproblem of the smaller Gram matrix, on the host: every triplet |
| krylov | larger | block Krylov in float32 (`gcjax.geometry.krylov`), leading triplets |
| krylov+gram64 | larger, and Krylov did not converge | as gram64 |
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from gcjax.geometry import krylov
from gcjax.geometry.krylov import Frame, Leading, Wanted

NULL_TOLERANCE, NULL_BLOCK = 1e-2, 4  # radians; columns a frame, so that a few frames share one pass


class Decomposition(NamedTuple):
    """Leading triplets of one matrix `W[out, in]`, K of them or, where `whole`, all min(O, I)."""

    u_OK: np.ndarray
    s_K: np.ndarray  # float64
    v_IK: np.ndarray
    residual: float  # of the leading triplet, as in krylov.Leading
    whole: bool
    method: str
    passes: int  # over the matrix, of the Krylov iteration


def decompose(
    w_OI: jax.Array, frames: Sequence[Frame | None], rank: int, seed: int, tolerance: float, exact_below: int
) -> list[Decomposition]:
    """Triplets, at least `rank` of them, of a finite, nonzero matrix in each of the frames."""
    leading: list[Leading | None] = [None] * len(frames)
    if min(w_OI.shape) > exact_below and krylov.fits(w_OI.shape, rank):
        leading[:] = krylov.leading_triplets(w_OI, [Wanted(frame, rank, tolerance, seed) for frame in frames])
    return [_decomposition(w_OI, frame, found) for frame, found in zip(frames, leading)]


def _decomposition(w_OI: jax.Array, frame: Frame | None, found: Leading | None) -> Decomposition:
    if found is not None and found.converged:
        u_OK, s_K, v_IK, residual_K, _, passes = found
        return Decomposition(u_OK, s_K, v_IK, float(residual_K[0]), False, "krylov", passes)
    u_OM, s_M, v_IM, residual = gram64(framed(w_OI, frame))
    method, passes = ("gram64", 0) if found is None else ("krylov+gram64", found.passes)
    return Decomposition(u_OM, s_M, v_IM, residual, True, method, passes)


def framed(w_OI: jax.Array, frame: Frame | None) -> np.ndarray:
    """The matrix in its frame, written out."""
    if frame is None:
        return np.asarray(w_OI)
    return np.asarray(frame.back(w_OI) if frame.output else frame.back(w_OI.T).T)


def gram64(w_OI: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Every triplet, vectors as float32, singular values as float64; and the leading one's residual.

    NumPy's LAPACK, since float64 is not every accelerator's, and a matrix this small is quicker here than on its way there.
    """
    if w_OI.shape[0] < w_OI.shape[1]:
        v, s, u, residual = gram64(w_OI.T)
        return u, s, v, residual
    w_OI = w_OI.astype(np.float64)
    _, v_II = np.linalg.eigh(w_OI.T @ w_OI)
    v_II = v_II[:, ::-1]
    u_OI = w_OI @ v_II
    s_I = np.linalg.norm(u_OI, axis=0)
    u_OI /= np.where(s_I > 0, s_I, 1.0)
    residual = float(np.linalg.norm(w_OI.T @ u_OI[:, 0] - s_I[0] * v_II[:, 0]))
    return u_OI.astype(np.float32), s_I, v_II.astype(np.float32), residual


def alignments(a: Decomposition, b: Decomposition) -> tuple[np.ndarray, np.ndarray]:
    """Gram and sigma^2-weighted alignment (`gcjax.geometry.continuity`), each over (input, output), of two matrices of one
    shape from all their triplets: `<W W^T, W' W'^T> = sum_ij s_i^2 s'_j^2 <u_i, u'_j>^2`, so no Gram matrix is formed."""
    square_aM, square_bM = a.s_K**2, b.s_K**2
    share_M = (square_aM / square_aM.sum() + square_bM / square_bM.sum()) / 2
    gram, sigma2 = [], []
    for x_DM, y_DM in ((a.v_IK, b.v_IK), (a.u_OK, b.u_OK)):
        cosine_MM = x_DM.T @ y_DM
        sigma2.append(share_M @ np.abs(np.diagonal(cosine_MM)))
        gram.append(_traceless_cosine(square_aM, square_bM, (cosine_MM**2).astype(np.float64), len(x_DM)))
    return np.asarray(gram, np.float32), np.asarray(sigma2, np.float32)


def _traceless_cosine(a_M: np.ndarray, b_M: np.ndarray, square_MM: np.ndarray, d: int) -> float:
    """Cosine of the traceless parts of two matrices of dimension d with eigenvalues `a`, `b` and d - M zeros."""
    if d == len(a_M):  # the trace first: of nearly equal eigenvalues it would cancel all digits
        a_M, b_M = a_M - a_M.mean(), b_M - b_M.mean()
    product = a_M @ square_MM @ b_M - a_M.sum() * b_M.sum() / d
    norms = [x_M @ x_M - x_M.sum() ** 2 / d for x_M in (a_M, b_M)]
    return float(product / np.sqrt(norms[0] * norms[1]))


def null_leading(w_OI: jax.Array, frames: Sequence[Frame], seed: int) -> np.ndarray:
    """The leading vector `[N, D]`, on the frames' side, of the matrix in N random frames: what its spectrum and the gains give
    alone. To an angle that a mean over draws does not feel."""
    if krylov.fits(w_OI.shape, 1):
        found = krylov.leading_triplets(w_OI, [Wanted(frame, 1, NULL_TOLERANCE, seed, NULL_BLOCK) for frame in frames])
        pairs = [(one.u_OK, one.v_IK) for one in found]
    else:
        pairs = [(u, v) for u, _, v, _ in (gram64(framed(w_OI, frame)) for frame in frames)]
    return np.stack([(u if frame.output else v)[:, 0] for frame, (u, v) in zip(frames, pairs)])
