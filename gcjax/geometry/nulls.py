"""Chance levels: what each measure gives for matrices whose singular frames are independent and uniform (Haar).

NumPy and SciPy only, so a number that is shown can always carry its null without a device.
"""

from collections.abc import Sequence

import numpy as np
from scipy import special


def cosine_mean(d: int) -> float:
    """Expected `|<x, y>|` of two random unit vectors in d dimensions, `Gamma(d/2) / (sqrt(pi) Gamma((d+1)/2))`."""
    return float(np.exp(special.gammaln(d / 2) - special.gammaln((d + 1) / 2)) / np.sqrt(np.pi))


def cosine_quantile(q: Sequence[float], d: int) -> np.ndarray:
    """Quantiles of `|<x, y>|`: its square follows Beta(1/2, (d-1)/2)."""
    return np.sqrt(special.betaincinv(0.5, (d - 1) / 2, np.asarray(q)))


def cosine_mean_quantile(q: Sequence[float], d: int, pairs: int, draws: int = 20_000, seed: int = 0) -> np.ndarray:
    """Quantiles of the mean of `|<x, x'>|` over `pairs` adjacent layers, by simulation.

    Neighbouring pairs share a layer and are independent all the same: given either vector, the other one is uniform.
    """
    cosine_NP = np.sqrt(np.random.default_rng(seed).beta(0.5, (d - 1) / 2, size=(draws, pairs)))
    return np.quantile(cosine_NP.mean(axis=1), q)


def overlap_mean(k: np.ndarray, d: int) -> np.ndarray:
    """Expected subspace overlap of two random k-dimensional subspaces, k / d."""
    return np.asarray(k) / d


def gram_alignment_std(d: int) -> float:
    """Standard deviation of the gram alignment of one pair; its mean is 0. Exact for every pair of spectra.

    The traceless symmetric matrices are an irreducible representation of O(d), so by Schur's lemma a Haar rotation spreads
    a unit vector evenly over their d(d+1)/2 - 1 dimensions. The shape beyond the variance does depend on the spectra.
    """
    return (d * (d + 1) / 2 - 1) ** -0.5


def gram_alignment_of_gains(gain_LD: np.ndarray, energy_L: np.ndarray, fourth_L: np.ndarray) -> np.ndarray:
    """Gram alignment `[P]` of adjacent layers `W_l Q_l diag(gain_l)` in independent Haar frames Q_l, in the gains' space.

    It is a ratio of expectations, exact moments of Haar conjugates: equal gains align frames that have nothing in common.
    `energy` is `||W||_F^2`, `fourth` `||W^T W||_F^2`, the sums of the second and fourth powers of the singular values.
    """
    square_LD = gain_LD.astype(np.float64) ** 2
    d, total_L, fourth_of_gain_L = square_LD.shape[1], square_LD.sum(axis=1), (square_LD**2).sum(axis=1)
    # E S_ii^2, E S_ij^2 and E S_ii S_jj of S = Q^T (W^T W) Q
    diagonal_L = (energy_L**2 + 2 * fourth_L) / (d * (d + 2))
    off_L = (d * fourth_L - energy_L**2) / (d * (d - 1) * (d + 2))
    both_L = ((d + 1) * energy_L**2 - 2 * fourth_L) / (d * (d - 1) * (d + 2))
    distinct_L = total_L**2 - fourth_of_gain_L  # sum over i != j of g_i^2 g_j^2
    norm_L = np.sqrt((1 - 1 / d) * diagonal_L * fourth_of_gain_L + (off_L - both_L / d) * distinct_L)
    mean_LD = energy_L[:, None] / d * (square_LD - total_L[:, None] / d)
    return np.sum(mean_LD[1:] * mean_LD[:-1], axis=1) / (norm_L[1:] * norm_L[:-1])


def haar_squares(d: int, draws: int, seed: int = 0) -> np.ndarray:
    """Squared entries of `draws` Haar-random orthogonal matrices, `[draws, d, d]` float32."""
    rng = np.random.default_rng(seed)
    squares = np.empty((draws, d, d), np.float32)
    for i in range(draws):
        # The QR of a Gaussian matrix is Haar once R's diagonal is made positive; squares do not see those signs.
        squares[i] = np.linalg.qr(rng.standard_normal((d, d)))[0] ** 2
    return squares


def gram_alignment_quantile(q: Sequence[float], spectrum_LM: np.ndarray, squares_NDD: np.ndarray | int) -> np.ndarray:
    """Quantiles of the mean gram alignment over adjacent pairs of a stack with these spectra in Haar frames.

    `spectrum_LM` holds the singular values, `squares_NDD` comes from `haar_squares` for the space's dimension d >= M. In
    relative frame Q the alignment of diagonals a and b is `a^T (Q * Q) b`: one set of draws serves all pairs and all stacks.
    Each pair takes another draw. Given d alone, where drawing costs too much, the mean is taken to be normal with its exact
    standard deviation: pairs are uncorrelated. NaN where a spectrum is not finite or zero.
    """
    if not np.isfinite(spectrum_LM).all() or (spectrum_LM[:, 0] <= 0).any():
        return np.full(len(q), np.nan)
    if isinstance(squares_NDD, int):
        return special.ndtri(np.asarray(q)) * gram_alignment_std(squares_NDD) / np.sqrt(len(spectrum_LM) - 1)
    d, draws = squares_NDD.shape[-1], len(squares_NDD)
    eigen_DL = np.zeros((d, len(spectrum_LM)), np.float32)
    eigen_DL[: spectrum_LM.shape[-1]] = (spectrum_LM / spectrum_LM[:, :1]).T ** 2
    eigen_DL -= eigen_DL.mean(axis=0)
    eigen_DL /= np.linalg.norm(eigen_DL, axis=0)
    turned_NDL = (squares_NDD.reshape(-1, d) @ eigen_DL).reshape(draws, d, -1)
    alignment_NP = np.einsum("ndp,dp->np", turned_NDL[..., 1:], eigen_DL[:, :-1])
    for p in range(alignment_NP.shape[-1]):
        alignment_NP[:, p] = np.roll(alignment_NP[:, p], p * 7919 % draws)
    return np.quantile(alignment_NP.mean(axis=1), q)
