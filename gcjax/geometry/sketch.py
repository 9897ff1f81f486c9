"""Gram alignment of matrices that are too large for their Gram matrices: shared random probes.

With `H = W^T W - (tr / d) I` the alignment of two layers is `<H, H'> / (||H|| ||H'||)`, and `<H, H'>` is the mean of
`(H z) . (H' z)` over random signs z (Hutchinson 1989). All layers share the probes, so a layer keeps `H z` alone. The
leading triplets are known: their part of each product is put in exactly and taken out of the sample, which leaves the noise
of the tail.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gcjax.geometry.krylov import Frame, backward, forward


class Sketch(NamedTuple):
    """What is kept of one matrix in one space of dimension D, on the host: N probes, K leading triplets."""

    hz_DN: np.ndarray
    x_DK: np.ndarray  # leading singular vectors in this space
    s_K: np.ndarray


def probes(d: int, count: int, seed: int) -> Float[Array, "D N"]:
    """Random signs, the same for every layer."""
    return jax.random.rademacher(jax.random.key(seed), (d, count), jnp.float32)


def apply_grams(
    w_OI: Float[Array, "O I"], frames: Sequence[Frame | None], z_IN: Array, z_ON: Array, energies: Sequence[float]
) -> list[tuple[Array, Array]]:
    """`H z` of the matrix in each frame, in the input and in the output space, from `energy = ||A||_F^2`; in four passes."""
    (o, i), n = w_OI.shape, len(frames)
    hz_IN = backward(w_OI, frames, forward(w_OI, frames, [z_IN] * n))
    hz_ON = forward(w_OI, frames, backward(w_OI, frames, [z_ON] * n))
    return [(x - energy / i * z_IN, y - energy / o * z_ON) for x, y, energy in zip(hz_IN, hz_ON, energies)]


def alignment(a: Sketch, b: Sketch, z_DN: np.ndarray) -> tuple[float, float]:
    """Gram alignment of two layers, and its standard error by jackknife over the probes."""
    ab_N, aa_N, bb_N = _products(a, b, z_DN), _products(a, a, z_DN), _products(b, b, z_DN)
    n = len(ab_N)
    without_N = [(x_N.sum() - x_N) / (n - 1) for x_N in (ab_N, aa_N, bb_N)]
    value_N = without_N[0] / np.sqrt(without_N[1] * without_N[2])
    error = np.sqrt((n - 1) / n * np.sum((value_N - value_N.mean()) ** 2))
    return float(ab_N.mean() / np.sqrt(aa_N.mean() * bb_N.mean())), float(error)


def square_norm(one: Sketch, z_DN: np.ndarray) -> float:
    """An estimate of `||H||_F^2`."""
    return float(_products(one, one, z_DN).mean())


def _products(a: Sketch, b: Sketch, z_DN: np.ndarray) -> np.ndarray:
    """An estimate of `<H_a, H_b>` from each probe."""
    (a2_K, la_DN), (b2_K, lb_DN) = _leading(a, z_DN), _leading(b, z_DN)
    cross_KK = a.x_DK.astype(np.float64).T @ b.x_DK
    exact = a2_K @ cross_KK**2 @ b2_K - a2_K.sum() * b2_K.sum() / len(z_DN)
    return exact + np.einsum("dn,dn->n", a.hz_DN, b.hz_DN) - np.einsum("dn,dn->n", la_DN, lb_DN)


def _leading(one: Sketch, z_DN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The leading eigenvalues of its Gram matrix, and their traceless part applied to the probes."""
    square_K = one.s_K.astype(np.float64) ** 2
    return square_K, (one.x_DK * square_K) @ (one.x_DK.T @ z_DN) - square_K.sum() / len(z_DN) * z_DN
