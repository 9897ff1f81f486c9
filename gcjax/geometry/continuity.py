"""Triplets of adjacent layers -> the measures of geometric continuity.

Spaces: "input" compares right singular vectors `v`, "output" left ones `u` (matrices are `W[out, in]`). The chance level of
every measure is in `gcjax.geometry.nulls`.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gcjax.geometry.spectra import Triplets, check_rank, finite_nonzero, triplets

FLAG_ANGLE = 0.1  # radians
FLAG_GAP = 1.01  # s_1 / s_2


class Continuity(NamedTuple):
    """What is measured on one stack; first axis A = (input, output), P = L - 1 adjacent pairs, K singular ranks."""

    cosine_APK: Float[Array, "A P K"]
    overlap_APK: Float[Array, "A P K"]
    gram_alignment_AP: Float[Array, "A P"]
    sigma2_alignment_AP: Float[Array, "A P"]
    layer_cosine_ALL: Float[Array, "A L L"]
    containment_ALLK: Float[Array, "A L L K"]  # of the first layer's leading vector, in the second's leading subspaces
    layer_overlap_ALLK: Float[Array, "A L L K"]
    sigma_LK: Float[Array, "L K"]
    spectrum_LM: Float[Array, "L M"]  # M = min(O, I)
    gap_L: Float[Array, "L"]
    angle_bound_L: Float[Array, "L"]
    flagged_P: Bool[Array, "P"]
    leading_v_LI: Float[Array, "L I"]
    leading_u_LO: Float[Array, "L O"]


def cosines(x_LDK: Float[Array, "L D K"]) -> Float[Array, "P K"]:
    """`|<x_k, x'_k>|` of adjacent layers, rank by rank (arXiv 2605.04971, section 3: k = 1 is its continuity)."""
    return jnp.abs(jnp.einsum("pdk,pdk->pk", x_LDK[:-1], x_LDK[1:]))


def overlaps(x_LDK: Float[Array, "L D K"]) -> Float[Array, "P K"]:
    """`||X_k^T X'_k||_F^2 / k` for the leading k-dimensional subspaces, every k at once; chance level k / D."""
    square_PKJ = jnp.einsum("pdk,pdj->pkj", x_LDK[:-1], x_LDK[1:]) ** 2
    total_PK = jnp.diagonal(jnp.cumsum(jnp.cumsum(square_PKJ, axis=-2), axis=-1), axis1=-2, axis2=-1)
    return total_PK / jnp.arange(1, x_LDK.shape[-1] + 1, dtype=x_LDK.dtype)


def subspaces(x_LDK: Float[Array, "L D K"]) -> tuple[Float[Array, "L L K"], Float[Array, "L L K"]]:
    """Of any two layers l, m and every k: `||X_m[:k]^T x_l||^2` of l's leading vector, and `||X_l[:k]^T X_m[:k]||_F^2 / k`.

    The first says how much of the leading vector is in the other's leading k-dimensional subspace: what of it is not along the
    other's leading vector has been mixed inside the subspace, the rest has left it. The second is the mean squared cosine of
    the principal angles of both subspaces. Chance level of both: k / D.
    """
    square_LMKJ = jnp.einsum("ldk,mdj->lmkj", x_LDK, x_LDK) ** 2
    total_LMKJ = jnp.cumsum(jnp.cumsum(square_LMKJ, axis=-2), axis=-1)
    ranks_K = jnp.arange(1, x_LDK.shape[-1] + 1, dtype=x_LDK.dtype)
    return jnp.cumsum(square_LMKJ[:, :, 0], axis=-1), jnp.diagonal(total_LMKJ, axis1=-2, axis2=-1) / ranks_K


def gram_alignment(w_LOI: Float[Array, "L O I"]) -> Float[Array, "P"]:
    """Cosine between the traceless parts of `W^T W` of adjacent layers; 0 in expectation for unrelated frames.

    Give the transposed stack for the output space. With the trace left in, two random square matrices would score 0.5.
    """
    largest_L11 = jnp.abs(w_LOI).max(axis=(-2, -1), keepdims=True)
    w_LOI = w_LOI / jnp.where(largest_L11 > 0, largest_L11, 1.0)
    g_LII = jnp.einsum("loi,loj->lij", w_LOI, w_LOI)
    # The trace goes before the products: taken from them, it would cancel all digits of a nearly orthogonal matrix.
    mean_L, eye_II = jnp.trace(g_LII, axis1=-2, axis2=-1) / g_LII.shape[-1], jnp.eye(g_LII.shape[-1], dtype=g_LII.dtype)
    g_LII = g_LII - mean_L[:, None, None] * eye_II
    square_L = jnp.einsum("lij,lij->l", g_LII, g_LII)
    product_P = jnp.einsum("pij,pij->p", g_LII[:-1], g_LII[1:])
    return product_P / jnp.sqrt(square_L[:-1] * square_L[1:])


def sigma2_alignment(x_LDK: Float[Array, "L D K"], s_LK: Float[Array, "L K"]) -> Float[Array, "P"]:
    """`sum_i w_i |<x_i, x'_i>|` with `w_i` the mean of both layers' shares `s_i^2 / sum s^2`; needs the whole spectrum."""
    relative_LK = s_LK / s_LK[:, :1]
    share_LK = relative_LK**2 / jnp.sum(relative_LK**2, axis=-1, keepdims=True)
    return jnp.einsum("pk,pk->p", (share_LK[:-1] + share_LK[1:]) / 2, cosines(x_LDK))


def angle_bound(t: Triplets) -> Float[Array, "L"]:
    """Wedin's bound on the numerical error of u_1 and v_1, radians: residual over the distance s_1 - s_2 (pi/2 where void)."""
    residual_L = t.residual_L + jnp.finfo(t.s_LK.dtype).eps * t.s_LK[:, 0]  # its own rounding
    distance_L = t.s_LK[:, 0] - t.s_LK[:, 1] - residual_L
    sine_L = jnp.where(distance_L > 0, residual_L / jnp.where(distance_L > 0, distance_L, 1.0), 1.0)
    return jnp.where(jnp.isnan(t.s_LK[:, 0]), jnp.nan, jnp.arcsin(jnp.clip(sine_L, 0.0, 1.0)))


def measure(w_LOI: Float[Array, "L O I"], rank: int, solver: str, whole: bool | Bool[Array, ""] = True) -> Continuity:
    """Every measure of one stack `W[layer, out, in]`, for the singular ranks 1..`rank`; traceable, pure.

    Without `whole` (it may be traced), the two alignments over the whole spectrum, a quarter of the work, are left out: NaN.
    Matrices with NaN or Inf, and zero ones, give NaN in every pair they take part in; so does a singular rank beyond a
    matrix's numerical rank (`s_k <= eps max(O, I) s_1`). Raises `GcjaxError` for an unknown solver or a rank outside
    1..min(O, I).
    """
    check_rank(w_LOI.shape, rank)
    with jax.default_matmul_precision("highest"):
        t = triplets(w_LOI, solver)
        eps = jnp.finfo(w_LOI.dtype).eps * max(w_LOI.shape[-2:])
        void_LK = ~(t.s_LK > eps * t.s_LK[:, :1])
        lost_L = void_LK[:, 0]
        lost_PK = jnp.where(void_LK[:-1] | void_LK[1:], jnp.nan, 0.0)
        finite_L, nonzero_L = finite_nonzero(w_LOI)
        gap_L = jnp.where(nonzero_L, t.s_LK[:, 0] / t.s_LK[:, 1], jnp.nan)
        bound_L = angle_bound(t)
        doubt_L = ~(finite_L & nonzero_L) | (bound_L > FLAG_ANGLE) | (gap_L < FLAG_GAP)
        spaces = (t.v_LIK, t.u_LOK)
        pairs = (len(spaces), len(w_LOI) - 1)
        gram_AP, sigma2_AP = jax.lax.cond(
            whole,
            lambda: (
                jnp.stack([gram_alignment(w_LOI), gram_alignment(w_LOI.swapaxes(-1, -2))]) + lost_PK[:, 0],
                jnp.stack([sigma2_alignment(x, t.s_LK) for x in spaces]),
            ),
            lambda: (jnp.full(pairs, jnp.nan, w_LOI.dtype),) * 2,
        )
        leading = [jnp.where(lost_L[:, None], jnp.nan, x[..., 0]) for x in spaces]
        contained, overlapping = zip(*(subspaces(x[..., :rank]) for x in spaces))
        lost_LLK = jnp.where(void_LK[:, None, :rank] | void_LK[None, :, :rank], jnp.nan, 0.0)
        return Continuity(
            cosine_APK=jnp.stack([cosines(x[..., :rank]) + lost_PK[:, :rank] for x in spaces]),
            overlap_APK=jnp.stack([overlaps(x[..., :rank]) + lost_PK[:, :rank] for x in spaces]),
            gram_alignment_AP=gram_AP,
            sigma2_alignment_AP=sigma2_AP,
            layer_cosine_ALL=jnp.stack([jnp.abs(x @ x.T) for x in leading]),
            containment_ALLK=jnp.stack(contained) + lost_LLK,
            layer_overlap_ALLK=jnp.stack(overlapping) + lost_LLK,
            sigma_LK=t.s_LK[:, :rank],
            spectrum_LM=t.s_LK,
            gap_L=gap_L,
            angle_bound_L=bound_L,
            flagged_P=doubt_L[:-1] | doubt_L[1:],
            leading_v_LI=leading[0],
            leading_u_LO=leading[1],
        )


measure_jit = partial(jax.jit, static_argnames=("rank", "solver"))(measure)
