"""One basis for several layers' matrices: what sharing it costs, beside no sharing at the same number of parameters.

A window of N matrices `W_n[out, in]` is approximated in one of three ways, each the best of its kind (Eckart-Young):

| choice | form | parameters | the basis comes from |
|---|---|---|---|
| own | `A_n B_n` | `N r (O + I)` | each matrix by itself |
| input | `A_n B`, one `B[r, in]` | `r (N O + I)` | the matrices stacked by rows |
| output | `B A_n`, one `B[out, r]` | `r (O + N I)` | the matrices stacked by columns |

Errors are those of outputs: `sum_n ||(W_n - Y_n) R_n||_F^2`, where `R_n R_n^T` is the second moment of what matrix n is given;
of plain Frobenius error, R_n is the identity. Weighted and shared in the input space, the basis is the best for the window's
mean moment and every `A_n` the best for its own: an upper bound of the least error, equal to it where the moments agree.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

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
    """The symmetric root of a second moment to which `ridge` times its mean eigenvalue is added in every direction."""
    e_I, x_II = np.linalg.eigh(moment_II.astype(np.float64))
    e_I = np.maximum(e_I, 0.0)
    return (x_II * np.sqrt(e_I + ridge * e_I.mean())) @ x_II.T


def errors(w_NOI: Window, root_NII: Roots | None = None) -> dict[str, Float[np.ndarray, " ranks"]]:
    """For each choice the squared error at rank 0, 1, ... `highest_rank`, where it is 0; float64.

    `root_NII` holds the R_n, symmetric; None: the identity.
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


def factors(w_NOI: Window, choice: str, rank: int, root_NII: Roots | None = None) -> Factors:
    """The approximation at `rank`, float64; at `highest_rank` it is exact. Raises `GcjaxError` for a rank outside 1..that."""
    if not 1 <= rank <= highest_rank(w_NOI.shape, choice):
        raise GcjaxError(f"rank {rank} is outside 1..{highest_rank(w_NOI.shape, choice)}, those of {choice} at {w_NOI.shape}")
    w_NOI = w_NOI.astype(np.float64)
    x_NOI = w_NOI if root_NII is None else w_NOI @ root_NII
    if choice == "own":
        left_NOr = np.stack([_leading(x_OI @ x_OI.T, rank) for x_OI in x_NOI])
        return Factors(left_NOr, left_NOr.swapaxes(1, 2) @ w_NOI)
    if choice == "output":
        left_1Or = _leading(np.einsum("noi,npi->op", x_NOI, x_NOI, optimize=True), rank)[None]
        return Factors(left_1Or, left_1Or.swapaxes(1, 2) @ w_NOI)
    right_rI = _input_basis(w_NOI, root_NII, rank).T
    if root_NII is None:
        return Factors(w_NOI @ right_rI.T, right_rI[None])
    # A_n solves min ||(W_n - A_n B) R_n||: least squares on what is given to the basis.
    given_NrI = right_rI @ root_NII
    left_NOr = np.stack([np.linalg.lstsq(g_rI.T, x_OI.T, rcond=None)[0].T for g_rI, x_OI in zip(given_NrI, x_NOI)])
    return Factors(left_NOr, right_rI[None])


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


def _leading(gram_DD: np.ndarray, rank: int) -> np.ndarray:
    return np.linalg.eigh(gram_DD)[1][:, ::-1][:, :rank]


def _input_basis(w_NOI: np.ndarray, root_NII: np.ndarray | None, rank: int) -> np.ndarray:
    """`[I, rank]`, the leading directions of the inputs; their spans are nested."""
    gram_II = np.einsum("noi,noj->ij", w_NOI, w_NOI, optimize=True)
    if root_NII is None:
        return _leading(gram_II, rank)
    # In the coordinates z = M^-1 x of the mean moment M^2 = mean R_n^2 the problem is the plain one.
    e_I, q_II = np.linalg.eigh(np.mean(root_NII @ root_NII, axis=0))
    mean_II, back_II = (q_II * np.sqrt(e_I)) @ q_II.T, (q_II / np.sqrt(e_I)) @ q_II.T
    return back_II @ _leading(mean_II @ gram_II @ mean_II, rank)


def _input_errors(w_NOI: np.ndarray, root_NII: np.ndarray) -> np.ndarray:
    r = highest_rank(w_NOI.shape, "input")
    basis_Ir = _input_basis(w_NOI, root_NII, r)
    kept_r = np.zeros(r)
    total = 0.0
    for w_OI, root_II in zip(w_NOI, root_NII):
        x_OI = w_OI @ root_II
        # Orthonormal, in order: what the first r columns span is what r directions of the basis give.
        q_Ir, _ = np.linalg.qr(root_II @ basis_Ir)
        kept_r += ((x_OI @ q_Ir) ** 2).sum(axis=0)
        total += float((x_OI**2).sum())
    return np.append(np.maximum(total - np.append(0.0, np.cumsum(kept_r[:-1])), 0.0), 0.0)
