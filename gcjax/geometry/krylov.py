"""The leading singular triplets of one large matrix, by randomized block Krylov iteration.

Block Golub-Kahan bidiagonalization with full re-orthogonalization (Golub, Luk and Overton 1981; Musco and Musco, arXiv
1504.05477): an orthonormal basis grows on both sides, a small SVD between them gives Ritz triplets, and the part of
`A^T U` that leaves the right basis gives every triplet's residual for nothing. It stops on that residual over the gap, so
on the angle of the vectors: a fixed small number of power iterations gives right sigmas and meaningless vectors.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

BLOCK = 16  # columns of one pass over the matrix
STEPS = 10  # blocks of a basis before it restarts from its best BLOCK Ritz vectors
SHARP = 4  # leading ranks that must reach the tolerance
LOOSE = 0.02  # of s_k, the residual that the others must reach: they may lie in a continuum, where no single vector is meant
GAP_FLOOR = 0.01  # of s_k: nearer neighbours mix, and the pair is flagged; no pass is spent on telling them apart


class Leading(NamedTuple):
    """The leading K triplets of one matrix, on the host: `A v_k = s_k u_k` in falling order of s_k."""

    u_OK: np.ndarray
    s_K: np.ndarray
    v_IK: np.ndarray
    residual_K: np.ndarray  # sqrt(||A v - s u||^2 + ||A^T u - s v||^2), measured at the end, in the matrix's units
    converged: bool
    passes: int  # over the matrix


class Frame(NamedTuple):
    """Gains behind a rotation Q of one side of a matrix: `W Q diag(gain)`, or `diag(gain) Q^T W` where `output`.

    Q is N rounds of random signs and a cosine transform. N = 0 is no rotation: the gains alone. N = 2 keeps the spectrum of
    `W` and throws its frame on that side away; it is as good as Haar for a few vectors, and applied in O(D log D).
    """

    signs_ND: Float[Array, "N D"]
    gain_D: Float[Array, "D"]
    output: bool

    def into(self, x_DB: Array) -> Array:
        """`Q diag(gain) x`."""
        x_DB = self.gain_D[:, None] * x_DB
        for signs_D in self.signs_ND:
            x_DB = jax.scipy.fft.dct(signs_D[:, None] * x_DB, axis=0, norm="ortho")
        return x_DB

    def back(self, x_DB: Array) -> Array:
        """`diag(gain) Q^T x`."""
        for signs_D in self.signs_ND[::-1]:
            x_DB = signs_D[:, None] * jax.scipy.fft.idct(x_DB, axis=0, norm="ortho")
        return self.gain_D[:, None] * x_DB


def gains(gain_D: Float[Array, "D"], output: bool) -> Frame:
    """The gains alone."""
    return Frame(jnp.zeros((0, len(gain_D)), gain_D.dtype), gain_D, output)


def random_frame(key: PRNGKeyArray, gain_D: Float[Array, "D"], output: bool) -> Frame:
    """The gains behind a random rotation."""
    return Frame(jax.random.rademacher(key, (2, len(gain_D)), gain_D.dtype), gain_D, output)


jax.tree_util.register_pytree_node(
    Frame, lambda frame: (frame[:2], frame.output), lambda output, children: Frame(*children, output)
)


@jax.jit
def forward(w_OI: Array, frame: Frame | None, x_IB: Array) -> Array:
    """`A x` of the matrix in its frame."""
    with jax.default_matmul_precision("highest"):
        if frame is None:
            return w_OI @ x_IB
        return frame.back(w_OI @ x_IB) if frame.output else w_OI @ frame.into(x_IB)


def backward(w_OI: Array, frame: Frame | None, y_OB: Array) -> Array:
    """`A^T y` of the matrix in its frame."""
    if frame is None:
        return _transposed(w_OI, y_OB)
    return _transposed(w_OI, _into(frame, y_OB)) if frame.output else _back(frame, _transposed(w_OI, y_OB))


_into, _back = jax.jit(Frame.into), jax.jit(Frame.back)


def _transposed(w_OI: Array, y_OB: Array) -> Array:
    """`W^T y`. On CPU by NumPy's BLAS on the same memory, which is twice as fast as XLA where the rows are contracted."""
    if all(device.platform == "cpu" for device in w_OI.devices()):
        return jnp.asarray((np.asarray(y_OB).T @ np.asarray(w_OI)).T)
    return _contracted(w_OI, y_OB)


@jax.jit
def _contracted(w_OI: Array, y_OB: Array) -> Array:
    return jax.lax.dot_general(y_OB, w_OI, (((0,), (0,)), ((), ())), precision="highest").T


@jax.jit
def _add_left(y_Ob: Array, u_OB: Array, step: Array) -> tuple[Array, Array]:
    """The left basis with what `y = A v` adds to it as its block number `step`; and that block."""
    with jax.default_matmul_precision("highest"):
        u_Ob, _ = _orthonormal(y_Ob, u_OB)
        return jax.lax.dynamic_update_slice_in_dim(u_OB, u_Ob, step * BLOCK, axis=1), u_Ob


@jax.jit
def _add_right(z_Ib: Array, v_IB: Array, step: Array) -> tuple[Array, Array, Array]:
    """The right basis with what `z = A^T u` adds to it behind block number `step`; `V^T z`; and the triangular factor of
    what was added."""
    with jax.default_matmul_precision("highest"):
        next_Ib, r_bb = _orthonormal(z_Ib, v_IB)
        return jax.lax.dynamic_update_slice_in_dim(v_IB, next_Ib, (step + 1) * BLOCK, axis=1), v_IB.T @ z_Ib, r_bb


def _orthonormal(x: Array, basis: Array) -> tuple[Array, Array]:
    """An orthonormal block that spans what `x` adds to `basis`, and its triangular factor; projected twice, as once is not
    enough in floating point, and a block that adds nothing is then still orthogonal to the basis. Columns of the basis
    that are not filled yet are zero, so that every step has one shape."""
    q, r = jnp.linalg.qr(x - basis @ (basis.T @ x))
    q, again = jnp.linalg.qr(q - basis @ (basis.T @ q))
    return q, again @ r


@jax.jit
def _ritz(u_OB: Array, v_IB: Array, left_Bb: Array, right_Bb: Array) -> tuple[Array, Array]:
    with jax.default_matmul_precision("highest"):
        return u_OB @ right_Bb, v_IB @ left_Bb


@jax.jit
def _residuals(u_OK: Array, v_IK: Array, wv_OK: Array, wu_IK: Array) -> tuple[Array, Array]:
    """Singular values as Rayleigh quotients, and the true residuals."""
    s_K = jnp.sum(u_OK * wv_OK, axis=0)
    return s_K, jnp.hypot(jnp.linalg.norm(wv_OK - s_K * u_OK, axis=0), jnp.linalg.norm(wu_IK - s_K * v_IK, axis=0))


def fits(shape: tuple[int, ...], rank: int) -> bool:
    """Whether a matrix is large enough for the bases, and `rank` small enough for a block."""
    return min(shape) >= BLOCK * (STEPS + 1) and rank <= BLOCK


def leading_triplets(
    w_OI: Float[Array, "O I"],
    rank: int,
    key: PRNGKeyArray,
    tolerance: float,
    frame: Frame | None = None,
    restarts: int = 4,
) -> Leading:
    """The leading `rank` triplets of a finite matrix (`fits`), or of it in a `frame`.

    The first SHARP vectors reach an angle of `tolerance` radians where neighbouring singular values are GAP_FLOOR apart,
    the others a residual of LOOSE; `converged` says whether they did within `restarts` restarts.
    """
    o, i = w_OI.shape
    sharp_K = np.arange(rank) < SHARP
    rounding = 4 * float(jnp.finfo(w_OI.dtype).eps)  # of s_1; nothing improves below it
    v_Ib = jnp.linalg.qr(jax.random.normal(key, (i, BLOCK), w_OI.dtype))[0]
    passes = 0
    for _ in range(restarts + 1):
        u_OB = jnp.zeros((o, BLOCK * STEPS), w_OI.dtype)
        v_IB = jnp.zeros((i, BLOCK * (STEPS + 1)), w_OI.dtype).at[:, :BLOCK].set(v_Ib)
        h_BB = np.zeros((v_IB.shape[1], u_OB.shape[1]))  # V^T A^T U
        left_Bb, right_Bb = np.zeros((v_IB.shape[1], BLOCK), np.float32), np.zeros((u_OB.shape[1], BLOCK), np.float32)
        for step in range(STEPS):
            old, new = slice(step * BLOCK, (step + 1) * BLOCK), slice((step + 1) * BLOCK, (step + 2) * BLOCK)
            v_Ib = jax.lax.dynamic_slice_in_dim(v_IB, np.int32(old.start), BLOCK, axis=1)
            u_OB, u_Ob = _add_left(forward(w_OI, frame, v_Ib), u_OB, np.int32(step))
            v_IB, h_Bb, r_bb = _add_right(backward(w_OI, frame, u_Ob), v_IB, np.int32(step))
            passes += 2
            h_BB[:, old], h_BB[new, old] = np.asarray(h_Bb), np.asarray(r_bb)
            left, s, right = np.linalg.svd(h_BB[: old.stop, : old.stop])
            residual_K = np.linalg.norm(h_BB[new, old] @ right[:rank, old].T, axis=0)
            if step == 0:  # too few Ritz values to see their gaps
                continue
            below_K = s[:rank] - s[1 : rank + 1]
            nearest_K = np.minimum(below_K, np.append(np.inf, below_K[:-1]))
            reach_K = np.where(sharp_K, tolerance * np.maximum(nearest_K, GAP_FLOOR * s[:rank]), LOOSE * s[:rank])
            reach_K = np.maximum(reach_K, rounding * s[0])
            if converged := bool((residual_K <= reach_K).all()):
                break
        left_Bb[: old.stop], right_Bb[: old.stop] = left[:, :BLOCK], right[:BLOCK].T
        if converged:
            break
        v_Ib = jnp.linalg.qr(_ritz(u_OB, v_IB, left_Bb, right_Bb)[1])[0]
    u_OK, v_IK = _ritz(u_OB, v_IB, left_Bb[:, :rank], right_Bb[:, :rank])
    s_K, residual_K = _residuals(u_OK, v_IK, forward(w_OI, frame, v_IK), backward(w_OI, frame, u_OK))
    u_OK, s_K, v_IK, residual_K = jax.device_get((u_OK, s_K, v_IK, residual_K))
    return Leading(u_OK, s_K, v_IK, residual_K, converged, passes + 2)
