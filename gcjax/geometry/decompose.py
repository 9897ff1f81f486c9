"""One matrix -> its leading singular triplets, by the cheapest method that is exact enough for its size.

| method | when | what |
|---|---|---|
| gram64 | min(O, I) <= exact_below | float64 eigenproblem of the smaller Gram matrix, on the host: every triplet |
| krylov | larger | block Krylov in float32 (`gcjax.geometry.krylov`), leading triplets |
| krylov+gram64 | larger, and Krylov did not converge | as gram64 |
"""

from typing import NamedTuple

import jax
import numpy as np

from gcjax.geometry import krylov
from gcjax.geometry.krylov import Frame


class Decomposition(NamedTuple):
    """Leading triplets of one matrix `W[out, in]`, K of them or, where `whole`, all min(O, I)."""

    u_OK: np.ndarray
    s_K: np.ndarray  # float64
    v_IK: np.ndarray
    residual: float  # of the leading triplet, as in krylov.Leading
    whole: bool
    method: str
    passes: int  # over the matrix, of the Krylov iteration


def decompose(w_OI: jax.Array, frame: Frame | None, rank: int, seed: int, tolerance: float, exact_below: int) -> Decomposition:
    """Triplets, at least `rank` of them, of a finite, nonzero matrix in its frame."""
    method, passes = "gram64", 0
    if min(w_OI.shape) > exact_below and krylov.fits(w_OI.shape, rank):
        found = krylov.leading_triplets(w_OI, rank, jax.random.key(seed), tolerance, frame)
        method, passes = "krylov", found.passes
        if found.converged:
            s_K = found.s_K.astype(np.float64)
            return Decomposition(found.u_OK, s_K, found.v_IK, float(found.residual_K[0]), False, method, passes)
        method = "krylov+gram64"
    u, s, v, residual = gram64(framed(w_OI, frame))
    return Decomposition(u, s, v, residual, True, method, passes)


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


def null_leading(w_OI: jax.Array, frame: Frame, seed: int, tolerance: float) -> np.ndarray:
    """The leading vector, on the frame's side, of the matrix in a random frame: what its spectrum and the gains give alone."""
    if krylov.fits(w_OI.shape, 1):
        found = krylov.leading_triplets(w_OI, 1, jax.random.key(seed), tolerance, frame)
        return (found.u_OK if frame.output else found.v_IK)[:, 0]
    u_OM, _, v_IM, _ = gram64(framed(w_OI, frame))
    return (u_OM if frame.output else v_IM)[:, 0]
