"""The leading singular triplets of one large matrix, by randomized block Krylov iteration.

Block Golub-Kahan bidiagonalization with full re-orthogonalization (Golub, Luk and Overton 1981; Musco and Musco, arXiv
1504.05477): an orthonormal basis grows on both sides, a small SVD between them gives Ritz triplets, and the part of
`A^T U` that leaves the right basis gives every triplet's residual for nothing. It stops on that residual over the gap, so
on the angle of the vectors: a fixed small number of power iterations gives right sigmas and meaningless vectors.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from scipy import linalg

BLOCK = 16  # columns of one pass over the matrix, where many triplets are wanted
STEPS = 10  # blocks of a basis before it restarts from its best Ritz vectors
SHARP = 4  # leading ranks that must reach the tolerance
LOOSE = 0.02  # of s_k, the residual that the others must reach: they may lie in a continuum, where no single vector is meant
GAP_FLOOR = 0.01  # of s_k: nearer neighbours mix, and the pair is flagged; no pass is spent on telling them apart


class Leading(NamedTuple):
    """The leading K triplets of one matrix, on the host: `A v_k = s_k u_k` in falling order of s_k."""

    u_OK: np.ndarray
    s_K: np.ndarray
    v_IK: np.ndarray
    residual_K: np.ndarray  # sqrt(||A v - s u||^2 + ||A^T u - s v||^2) or, where that is more, what rounding makes of it
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


class Wanted(NamedTuple):
    """What is asked of a matrix: leading triplets of it in one frame."""

    frame: Frame | None
    rank: int  # at most `block`
    tolerance: float  # radians, of the first SHARP vectors
    seed: int  # of the starting block
    block: int = BLOCK  # columns of one pass


def gains(gain_D: Float[Array, "D"], output: bool) -> Frame:
    """The gains alone."""
    return Frame(jnp.zeros((0, len(gain_D)), gain_D.dtype), gain_D, output)


def random_frame(key: PRNGKeyArray, gain_D: Float[Array, "D"], output: bool) -> Frame:
    """The gains behind a random rotation."""
    return Frame(jax.random.rademacher(key, (2, len(gain_D)), gain_D.dtype), gain_D, output)


jax.tree_util.register_pytree_node(
    Frame, lambda frame: (frame[:2], frame.output), lambda output, children: Frame(*children, output)
)


def forward(w_OI: Array, frames: Sequence[Frame | None], x_IB: Sequence[Array]) -> list[Array]:
    """`A x` of the matrix in each frame, for a block of columns each, in one pass."""
    inside = [x if frame is None or frame.output else _into(frame, x) for frame, x in zip(frames, x_IB)]
    y_OB = _split(_product(w_OI, _joined(inside)), inside)
    return [_back(frame, y) if frame is not None and frame.output else y for frame, y in zip(frames, y_OB)]


def backward(w_OI: Array, frames: Sequence[Frame | None], y_OB: Sequence[Array]) -> list[Array]:
    """`A^T y` of the matrix in each frame, for a block of columns each, in one pass."""
    inside = [_into(frame, y) if frame is not None and frame.output else y for frame, y in zip(frames, y_OB)]
    x_IB = _split(_transposed(w_OI, _joined(inside)), inside)
    return [x if frame is None or frame.output else _back(frame, x) for frame, x in zip(frames, x_IB)]


_into, _back = jax.jit(Frame.into), jax.jit(Frame.back)


def _joined(blocks: Sequence[Array]) -> Array:
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)


def _split(x: Array, like: Sequence[Array]) -> list[Array]:
    return jnp.split(x, np.cumsum([block.shape[1] for block in like])[:-1], axis=1) if len(like) > 1 else [x]


@jax.jit
def _product(w_OI: Array, x_IB: Array) -> Array:
    return jnp.matmul(w_OI, x_IB, precision="highest")


@jax.jit
def _transposed(w_OI: Array, y_OB: Array) -> Array:
    # The barrier keeps XLA from computing `W^T y` with the other operand first, which takes twice as long on CPU.
    return jax.lax.optimization_barrier(jax.lax.dot_general(y_OB, w_OI, (((0,), (0,)), ((), ())), precision="highest")).T


@partial(jax.jit, donate_argnums=1)
def _add_left(y_Ob: Array, u_OB: Array, step: Array) -> tuple[Array, Array]:
    """The left basis with what `y = A v` adds to it as its block number `step`; and that block."""
    with jax.default_matmul_precision("highest"):
        u_Ob, _, _ = _orthonormal(y_Ob, u_OB, step)
        return jax.lax.dynamic_update_slice_in_dim(u_OB, u_Ob, step * u_Ob.shape[1], axis=1), u_Ob


@partial(jax.jit, donate_argnums=1)
def _add_right(z_Ib: Array, v_IB: Array, step: Array) -> tuple[Array, Array, Array, Array]:
    """The right basis with what `z = A^T u` adds to it behind block number `step`; what was added; `V^T z`; and the
    triangular factor of what was added."""
    with jax.default_matmul_precision("highest"):
        next_Ib, h_Bb, r_bb = _orthonormal(z_Ib, v_IB, step + 1)
        at = (step + 1) * next_Ib.shape[1]
        return jax.lax.dynamic_update_slice_in_dim(v_IB, next_Ib, at, axis=1), next_Ib, h_Bb, r_bb


def _orthonormal(x: Array, basis: Array, filled: Array) -> tuple[Array, Array, Array]:
    """An orthonormal block that spans what `x` adds to a basis of `filled` blocks, `basis^T x` and its triangular factor;
    projected twice, as once is not enough in floating point, and a block that adds nothing is then still orthogonal."""
    outside, h = _outside(x, basis, filled)
    q, r = jnp.linalg.qr(outside)
    q, _ = _outside(q, basis, filled)
    gram = q.T @ q
    # The second time there is little left to do, and Cholesky is quicker; unless the block added nothing.
    near = jnp.max(jnp.abs(gram - jnp.eye(len(gram), dtype=gram.dtype))) < 0.1
    q, again = jax.lax.cond(near, _by_cholesky, lambda q, _: tuple(jnp.linalg.qr(q)), q, gram)
    return q, h, again @ r


def _outside(x: Array, basis: Array, filled: Array) -> tuple[Array, Array]:
    """`x - basis basis^T x` and `basis^T x`. A basis has one shape at every step, its columns beyond `filled` blocks being
    zero: the products take as many columns as are near that."""
    block, columns = x.shape[1], basis.shape[1]
    widths = [*range(2 * block, columns, 3 * block), columns]

    def by(width: int) -> Callable[..., tuple[Array, Array]]:
        def outside(x: Array, basis: Array) -> tuple[Array, Array]:
            h = basis[:, :width].T @ x
            return x - basis[:, :width] @ h, jnp.pad(h, ((0, columns - width), (0, 0)))

        return outside

    index = jnp.sum(filled * block > np.asarray(widths[:-1]))
    return jax.lax.switch(index, [by(width) for width in widths], x, basis)


def _by_cholesky(q: Array, gram: Array) -> tuple[Array, Array]:
    lower = jnp.linalg.cholesky(gram)
    inverse = jax.scipy.linalg.solve_triangular(lower, jnp.eye(len(gram), dtype=gram.dtype), lower=True)
    return q @ inverse.T, lower.T


@jax.jit
def _ritz(u_OB: Array, v_IB: Array, left_Bb: Array, right_Bb: Array) -> tuple[Array, Array]:
    with jax.default_matmul_precision("highest"):
        return u_OB @ right_Bb, v_IB @ left_Bb


def fits(shape: tuple[int, ...], rank: int) -> bool:
    """Whether a matrix is large enough for the bases, and `rank` small enough for a block."""
    return min(shape) >= BLOCK * (STEPS + 1) and rank <= BLOCK


def leading_triplets(w_OI: Float[Array, "O I"], wanted: Sequence[Wanted], restarts: int = 4) -> list[Leading]:
    """The leading triplets of a finite matrix (`fits`) in each wanted frame; they share passes over the matrix.

    The first SHARP vectors reach an angle of `tolerance` radians where neighbouring singular values are GAP_FLOOR apart,
    the others a residual of LOOSE; `converged` says whether they did within `restarts` restarts.
    """
    o, i = w_OI.shape
    solvers = [_solver((o, i), w_OI.dtype, one, restarts) for one in wanted]
    blocks, found = {i: next(solver) for i, solver in enumerate(solvers)}, dict[int, Leading]()
    while blocks:
        for product in (forward, backward):
            products = product(w_OI, [wanted[i].frame for i in blocks], list(blocks.values()))
            for i, block in zip(list(blocks), products):
                try:
                    blocks[i] = solvers[i].send(block)
                except StopIteration as end:
                    found[i] = end.value
                    del blocks[i]
    return [found[i] for i in range(len(wanted))]


def _solver(shape: tuple[int, int], dtype: Any, wanted: Wanted, restarts: int) -> Generator[Array, Array, Leading]:
    """The iteration without its products: yields `x` for `A x`, then `y` for `A^T y`, and so on in turn."""
    (o, i), rank, block = shape, wanted.rank, wanted.block
    columns = block * STEPS
    sharp_K = np.arange(rank) < SHARP
    rounding = 4 * float(jnp.finfo(dtype).eps)  # of s_1; nothing improves below it
    x_Ib = jax.random.uniform(jax.random.key(wanted.seed), (i, block), dtype, -1.0)
    passes = 0
    for _ in range(restarts + 1):
        u_OB, v_IB, v_Ib = _begin(x_Ib, o)
        h_BB = np.zeros((columns + block, columns))  # V^T A^T U
        left_Bb, right_Bb = np.zeros((columns + block, block), np.float32), np.zeros((columns, block), np.float32)
        for step in range(STEPS):
            old, new = slice(step * block, (step + 1) * block), slice((step + 1) * block, (step + 2) * block)
            u_OB, u_Ob = _add_left((yield v_Ib), u_OB, np.int32(step))
            v_IB, v_Ib, h_Bb, r_bb = _add_right((yield u_Ob), v_IB, np.int32(step))
            passes += 2
            h_BB[:, old], h_BB[new, old] = np.asarray(h_Bb), np.asarray(r_bb)
            left, s, right = linalg.svd(h_BB[: old.stop, : old.stop], check_finite=False)
            residual_K = np.linalg.norm(h_BB[new, old] @ right[:rank, old].T, axis=0)
            if step == 0:  # too few Ritz values to see their gaps
                continue
            below_K = s[:rank] - s[1 : rank + 1]
            nearest_K = np.minimum(below_K, np.append(np.inf, below_K[:-1]))
            reach_K = np.where(sharp_K, wanted.tolerance * np.maximum(nearest_K, GAP_FLOOR * s[:rank]), LOOSE * s[:rank])
            reach_K = np.maximum(reach_K, rounding * s[0])
            if converged := bool((residual_K <= reach_K).all()):
                break
        left_Bb[: old.stop], right_Bb[: old.stop] = left[:, :block], right[:block].T
        u_Ob, x_Ib = _ritz(u_OB, v_IB, left_Bb, right_Bb)
        if converged:
            break
    u_OK, v_IK = jax.device_get((u_Ob[:, :rank], x_Ib[:, :rank]))
    return Leading(u_OK, s[:rank], v_IK, np.maximum(residual_K, rounding * s[0]), converged, passes)


@partial(jax.jit, static_argnums=1)
def _begin(x_Ib: Array, o: int) -> tuple[Array, Array, Array]:
    """Both bases, empty but for the first block on the right; and that block, from what it is to span."""
    v_Ib = jnp.linalg.qr(x_Ib)[0]
    (i, block), dtype = x_Ib.shape, x_Ib.dtype
    u_OB, v_IB = jnp.zeros((o, block * STEPS), dtype), jnp.zeros((i, block * (STEPS + 1)), dtype)
    return u_OB, jax.lax.dynamic_update_slice_in_dim(v_IB, v_Ib, 0, axis=1), v_Ib
