"""One basis for several layers' matrices: what sharing it costs, beside no sharing at the same number of parameters.

A window of N matrices `W_n[out, in]` is approximated in one of three ways, each the best of its kind (Eckart-Young):

| choice | form | parameters | the basis comes from |
|---|---|---|---|
| own | `A_n B_n` | `N r (O + I)` | each matrix by itself |
| input | `A_n B`, one `B[r, in]` | `r (N O + I)` | the matrices stacked by rows |
| output | `B A_n`, one `B[out, r]` | `r (O + N I)` | the matrices stacked by columns |

Errors are those of outputs: `sum_n ||(W_n - Y_n) R_n||_F^2`, where the root R_n of the second moment of what matrix n is given
has `R_n R_n^T` equal to it; of plain Frobenius error, R_n is the identity. Weighted and shared in the input space, the basis
is the best for the window's mean moment and every `A_n` the best for its own: an upper bound of the least error, equal to it
where the moments agree.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.linalg import solve_triangular

from gcjax.errors import GcjaxError, nearest

CHOICES = ("own", "input", "output")

Window = Float[np.ndarray, "N O I"]
Roots = Float[np.ndarray, "N I I"]


class Factors(NamedTuple):
    """`left_n right_n` approximates matrix n; what is shared is there once."""

    left: Float[np.ndarray, "* O r"]
    right: Float[np.ndarray, "* r I"]

    def dense(self) -> Window:
        """The approximations, written out."""
        return self.left @ self.right

    @property
    def parameters(self) -> int:
        return self.left.size + self.right.size


def parameters_per_rank(shape: tuple[int, int, int], choice: str) -> int:
    """Parameters that one more rank costs a window of this shape; raises `GcjaxError` for an unknown choice."""
    n, o, i = shape
    if choice not in CHOICES:
        raise GcjaxError(f"there is no choice {choice!r}; {nearest(choice, CHOICES)}")
    return {"own": n * (o + i), "input": n * o + i, "output": o + n * i}[choice]


def highest_rank(shape: tuple[int, int, int], choice: str) -> int:
    """The rank from which on nothing is lost."""
    n, o, i = shape
    return {"own": min(o, i), "input": min(n * o, i), "output": min(o, n * i)}[choice]


def root(moment_II: Float[np.ndarray, "I I"], ridge: float) -> Float[np.ndarray, "I I"]:
    """The Cholesky root of a second moment to which `ridge` times its mean eigenvalue is added in every direction.

    Raises `GcjaxError` for a moment that is zero or not finite.
    """
    i, mean = len(moment_II), float(np.trace(moment_II)) / len(moment_II)
    try:
        return np.linalg.cholesky(moment_II.astype(np.float64) + ridge * mean * np.eye(i))
    except np.linalg.LinAlgError as error:
        raise GcjaxError(f"a second moment of {i} inputs has no root; they are zero or not finite") from error


def errors(w_NOI: Window, root_NII: Roots | None = None) -> dict[str, Float[np.ndarray, " ranks"]]:
    """For each choice the squared error at rank 0, 1, ... `highest_rank`, where it is 0; float64.

    `root_NII` holds the R_n; None: the identity.
    """
    w_NOI = w_NOI.astype(np.float64)
    x_NOI = w_NOI if root_NII is None else w_NOI @ root_NII
    found = {
        "own": sum(_tails(_eigenvalues(x_OI)) for x_OI in x_NOI),
        "output": _tails(_eigenvalues(_by_columns(x_NOI))),
        "input": _tails(_eigenvalues(_by_rows(x_NOI))) if root_NII is None else _input_errors(w_NOI, root_NII),
    }
    return {choice: np.asarray(found[choice]) for choice in CHOICES}


def at(error_r: Float[np.ndarray, " ranks"], rank: float) -> float:
    """A squared error at a rank between two whole ones, so that choices are compared at exactly equal parameters."""
    return float(np.interp(rank, np.arange(len(error_r)), error_r))


def factors(w_NOI: Window, choice: str, ranks: Sequence[int], root_NII: Roots | None = None) -> list[Factors]:
    """The approximation at each of `ranks`, from one decomposition, float64; at `highest_rank` it is exact.

    Raises `GcjaxError` for a rank outside 1..that.
    """
    most = highest_rank(w_NOI.shape, choice)
    if wrong := [rank for rank in ranks if not 1 <= rank <= most]:
        raise GcjaxError(f"rank {wrong[0]} is outside 1..{most}, those of {choice} at {w_NOI.shape}")
    w_NOI, top = w_NOI.astype(np.float64), max(ranks)
    x_NOI = w_NOI if root_NII is None else w_NOI @ root_NII
    if choice != "input":
        stacked = x_NOI if choice == "own" else _by_columns(x_NOI)[None]
        left_NOr = np.stack([_span(x_OI, top) for x_OI in stacked])
        right_NrI = left_NOr.swapaxes(1, 2) @ w_NOI
        return [Factors(left_NOr[:, :, :r], right_NrI[:, :r]) for r in ranks]
    if root_NII is None:
        right_rI = _span(_by_rows(w_NOI).T, top).T
        left_NOr = w_NOI @ right_rI.T
        return [Factors(left_NOr[:, :, :r], right_rI[None, :r]) for r in ranks]
    # A_n solves min ||(W_n - A_n B) R_n||: least squares on what is given to the basis, of which R_n^T B^T = Q T.
    right_rI = _input_basis(w_NOI, root_NII, top).T
    solved = [np.linalg.qr(root_II.T @ right_rI.T) for root_II in root_NII]
    targets = [(x_OI @ q_Ir).T for x_OI, (q_Ir, _) in zip(x_NOI, solved)]
    return [
        Factors(
            np.stack([solve_triangular(t_rr[:r, :r], y_rO[:r]).T for y_rO, (_, t_rr) in zip(targets, solved)]),
            right_rI[None, :r],
        )
        for r in ranks
    ]


def random_frames(s_NM: Float[np.ndarray, "N M"], shape: tuple[int, int], seed: int) -> Window:
    """Matrices `[out, in]` with these singular values and independent frames, uniform over all (Haar): what sharing is worth
    where nothing but the spectra is the same."""
    generator, m = np.random.default_rng(seed), s_NM.shape[1]

    def frame(d: int) -> np.ndarray:
        q_DM, r_MM = np.linalg.qr(generator.standard_normal((d, m)))
        return q_DM * np.sign(np.diagonal(r_MM))

    return np.stack([(frame(shape[0]) * s_M) @ frame(shape[1]).T for s_M in s_NM])


def singular_values(w_NOI: Window) -> Float[np.ndarray, "N M"]:
    """All of them, falling, float64."""
    return np.sqrt(np.stack([_eigenvalues(w_OI.astype(np.float64)) for w_OI in w_NOI]))


def ranks(shape: tuple[int, int, int], ratio: float) -> Mapping[str, float]:
    """The rank of each choice, not rounded, at `ratio` of the dense matrices' parameters.

    Raises `GcjaxError` for a ratio outside (0, 1).
    """
    if not 0 < ratio < 1:
        raise GcjaxError(f"ratio {ratio:g} is outside (0, 1), the share of the parameters to keep")
    n, o, i = shape
    return {c: min(ratio * n * o * i / parameters_per_rank(shape, c), highest_rank(shape, c)) for c in CHOICES}


def _by_rows(x_NOI: np.ndarray) -> np.ndarray:
    return x_NOI.reshape(-1, x_NOI.shape[2])


def _by_columns(x_NOI: np.ndarray) -> np.ndarray:
    return x_NOI.transpose(1, 0, 2).reshape(x_NOI.shape[1], -1)


def _eigenvalues(x_OI: np.ndarray) -> np.ndarray:
    """Squared singular values, falling, from the smaller Gram matrix."""
    gram = x_OI @ x_OI.T if x_OI.shape[0] <= x_OI.shape[1] else x_OI.T @ x_OI
    return np.maximum(np.linalg.eigvalsh(gram)[::-1], 0.0)


def _tails(square_r: np.ndarray) -> np.ndarray:
    """What is left of a sum behind its first r terms, r = 0.. all."""
    return np.append(np.cumsum(square_r[::-1])[::-1], 0.0)


def _span(x_OI: np.ndarray, rank: int) -> np.ndarray:
    """The leading left singular vectors `[O, rank]`, from the smaller Gram matrix."""
    if x_OI.shape[0] <= x_OI.shape[1]:
        return _leading(x_OI @ x_OI.T, rank)
    return np.linalg.qr(x_OI @ _leading(x_OI.T @ x_OI, rank))[0]


def _leading(gram_DD: np.ndarray, rank: int) -> np.ndarray:
    return np.linalg.eigh(gram_DD)[1][:, ::-1][:, :rank]


def _input_basis(w_NOI: np.ndarray, root_NII: np.ndarray, rank: int) -> np.ndarray:
    """`[I, rank]`, the leading directions of the inputs; their spans are nested."""
    # With the root C of the mean moment as coordinates, x = C z, the problem is the plain one.
    mean_II = np.linalg.cholesky(np.mean(root_NII @ root_NII.swapaxes(1, 2), axis=0))
    return solve_triangular(mean_II, _span(_by_rows(w_NOI @ mean_II).T, rank), lower=True, trans=1)


def _input_errors(w_NOI: np.ndarray, root_NII: np.ndarray) -> np.ndarray:
    r = highest_rank(w_NOI.shape, "input")
    basis_Ir = _input_basis(w_NOI, root_NII, r)
    kept_r = np.zeros(r)
    total = 0.0
    for w_OI, root_II in zip(w_NOI, root_NII):
        x_OI = w_OI @ root_II
        # Orthonormal, in order: what the first r columns span is what r directions of the basis give.
        q_Ir, _ = np.linalg.qr(root_II.T @ basis_Ir)
        kept_r += ((x_OI @ q_Ir) ** 2).sum(axis=0)
        total += float((x_OI**2).sum())
    return np.append(np.maximum(total - np.append(0.0, np.cumsum(kept_r[:-1])), 0.0), 0.0)
