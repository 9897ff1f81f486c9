"""Stacks of matrices -> leading singular triplets.

Two exact solvers for the sizes that training meets, both batched over the layer axis: `svd` (LAPACK's or the accelerator's
SVD) and `gram` (symmetric eigenproblem of the smaller Gram matrix, about twice as fast for 256 x 256). Squaring costs the
Gram solver the small end of the spectrum (below `sqrt(eps) s_1`), never the leading triplets; the residual says what each
one reached. Layers that hold NaN or Inf come out as NaN and leave the others alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gcjax.errors import GcjaxError, nearest


class Triplets(NamedTuple):
    """`W v_k = s_k u_k` for k = 1..K in falling order of s_k, columns of unit norm; one entry a layer."""

    u_LOK: Float[Array, "L O K"]
    s_LK: Float[Array, "L K"]
    v_LIK: Float[Array, "L I K"]
    residual_L: Float[Array, "L"]  # of the leading one: sqrt(||W v - s u||^2 + ||W^T u - s v||^2), in the matrix's units


def _svd(w_LOI: Array) -> tuple[Array, Array, Array]:
    u_LOK, s_LK, vt_LKI = jnp.linalg.svd(w_LOI, full_matrices=False)
    return u_LOK, s_LK, vt_LKI.swapaxes(-1, -2)


def _gram(w_LOI: Array) -> tuple[Array, Array, Array]:
    if w_LOI.shape[-2] < w_LOI.shape[-1]:
        v, s, u = _gram(w_LOI.swapaxes(-1, -2))
        return u, s, v
    _, v_LIK = jnp.linalg.eigh(jnp.einsum("loi,loj->lij", w_LOI, w_LOI))
    v_LIK = v_LIK[..., ::-1]
    wv_LOK = w_LOI @ v_LIK
    s_LK = jnp.linalg.norm(wv_LOK, axis=-2)
    return wv_LOK / jnp.where(s_LK > 0, s_LK, 1.0)[:, None, :], s_LK, v_LIK


SOLVERS = {"svd": _svd, "gram": _gram}


def finite_nonzero(w_LOI: Float[Array, "L O I"]) -> tuple[Bool[Array, "L"], Bool[Array, "L"]]:
    """Which matrices are free of NaN and Inf, and which are not zero."""
    return jnp.isfinite(w_LOI).all(axis=(-2, -1)), (w_LOI != 0).any(axis=(-2, -1))


def check_rank(shape: Sequence[int], rank: int) -> int:
    """Return `rank`; raises `GcjaxError` where it is not one of a matrix's `[..., out, in]`, 1..min(out, in)."""
    *_, o, i = shape
    if not 1 <= rank <= min(o, i):
        raise GcjaxError(f"rank {rank} is outside 1..{min(o, i)}, the ranks of a {o} x {i} matrix")
    return rank


def triplets(w_LOI: Float[Array, "L O I"], solver: str, rank: int | None = None) -> Triplets:
    """The leading `rank` singular triplets of every matrix of a stack (all of them when `rank` is None).

    A matrix that is not finite has NaN throughout; a zero matrix has s = 0. Matrices are scaled to unit maximum before they
    are squared, so that gradients of 1e-25 survive float32. Raises `GcjaxError` for an unknown solver or a rank outside
    1..min(O, I).
    """
    if solver not in SOLVERS:
        raise GcjaxError(f"there is no solver {solver!r}; {nearest(solver, SOLVERS)}")
    rank = check_rank(w_LOI.shape, min(w_LOI.shape[-2:]) if rank is None else rank)
    with jax.default_matmul_precision("highest"):
        finite_L, _ = finite_nonzero(w_LOI)
        safe_LOI = jnp.where(finite_L[:, None, None], w_LOI, 0.0)
        largest_L = jnp.abs(safe_LOI).max(axis=(-2, -1))
        scale_L = jnp.where(largest_L > 0, largest_L, 1.0)
        unit_LOI = safe_LOI / scale_L[:, None, None]
        u, s, v = SOLVERS[solver](unit_LOI)
        u, s, v = u[..., :rank], s[..., :rank], v[..., :rank]
        u1, s1, v1 = u[..., 0], s[..., :1], v[..., 0]
        right_L = jnp.linalg.norm(jnp.einsum("loi,li->lo", unit_LOI, v1) - s1 * u1, axis=-1)
        left_L = jnp.linalg.norm(jnp.einsum("loi,lo->li", unit_LOI, u1) - s1 * v1, axis=-1)
        scale_L = jnp.where(finite_L, scale_L, jnp.nan)
        blank_L11 = jnp.where(finite_L, 0.0, jnp.nan)[:, None, None]
        return Triplets(u + blank_L11, s * scale_L[:, None], v + blank_L11, jnp.hypot(right_L, left_L) * scale_L)
