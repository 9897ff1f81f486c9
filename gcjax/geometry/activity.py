"""What a layer's activation does to real inputs, and how far its weights and gradients follow the mean of what they see.

Rival explanations of why continuity stays: how strongly an activation breaks rotation symmetry, how far it is from linear, its
even part, its mean. Each is a share of energy in 0..1, 0 where the activation has nothing of it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


class Activity(NamedTuple):
    """One number a layer."""

    before_rms_L: Float[Array, "L"]  # of the activation's argument
    asymmetry_L: Float[Array, "L"]  # `||f(R x) - R f(x)||^2 / (2 ||f(x)||^2)` under a random rotation R; 1: nothing in common
    nonlinear_L: Float[Array, "L"]  # share of f(x) that is not along x
    even_L: Float[Array, "L"]  # share of f(x) in `(f(x) + f(-x)) / 2`
    mean_L: Float[Array, "L"]  # share of f(x) in its mean over inputs
    input_mean_L: Float[Array, "L"]  # share of the matrix's inputs in their mean
    v1_mean_L: Float[Array, "L"]  # |cos| of v_1 with that mean
    u1_mean_L: Float[Array, "L"]  # |cos| of u_1 with the mean of f(x)
    gradient_mean_L: Float[Array, "L"]  # share of the gradient's energy along the inputs' mean; chance 1 / I


def _energy(x: Array) -> Array:
    return jnp.sum(x * x, axis=tuple(range(1, x.ndim)))


def _share(part_L: Array, whole_L: Array) -> Array:
    """Of the energy, layer by layer; 0 where there is none."""
    return jnp.where(whole_L > 0, part_L / jnp.where(whole_L > 0, whole_L, 1.0), 0.0)


def _along(x_LD: Array, mean_LD: Array) -> Array:
    norm_L = jnp.linalg.norm(mean_LD, axis=-1)
    return jnp.abs(jnp.sum(x_LD * mean_LD, axis=-1)) / jnp.where(norm_L > 0, norm_L, 1.0)


def rotation(key: PRNGKeyArray, dimension: int) -> Float[Array, "D D"]:
    """A random orthogonal matrix, Haar-distributed (QR with the signs of R's diagonal undone: arXiv math-ph/0609050)."""
    q_DD, r_DD = jnp.linalg.qr(jax.random.normal(key, (dimension, dimension)))
    return q_DD * jnp.sign(jnp.diagonal(r_DD))


def measure(
    input_LBI: Float[Array, "L B I"],
    before_LBD: Float[Array, "L B D"],
    after_LBO: Float[Array, "L B O"],
    activate: Callable[[Array], Array],
    gradient_LOI: Float[Array, "L O I"],
    v1_LI: Float[Array, "L I"],
    u1_LO: Float[Array, "L O"],
    key: PRNGKeyArray,
) -> Activity:
    """Every measure over a batch of inputs of each layer; `activate` takes `[B, D]`. Traceable, pure."""
    with jax.default_matmul_precision("highest"):
        turn_DD, B = rotation(key, before_LBD.shape[-1]), before_LBD.shape[1]
        act = jax.vmap(activate)
        own_LBD, turned_LBD, mirrored_LBD = act(before_LBD), act(before_LBD @ turn_DD), act(-before_LBD)
        own_L, even_L, odd_L = _energy(own_LBD), _energy(own_LBD + mirrored_LBD), _energy(own_LBD - mirrored_LBD)
        slope_L = _share(jnp.einsum("lbd,lbd->l", own_LBD, before_LBD), _energy(before_LBD))
        input_mean_LI, mean_LO = input_LBI.mean(axis=1), after_LBO.mean(axis=1)
        along_LO = jnp.einsum("loi,li->lo", gradient_LOI, input_mean_LI)
        return Activity(
            before_rms_L=jnp.sqrt(jnp.mean(before_LBD**2, axis=(1, 2))),
            asymmetry_L=_share(_energy(turned_LBD - own_LBD @ turn_DD), 2 * own_L),
            nonlinear_L=_share(_energy(own_LBD - slope_L[:, None, None] * before_LBD), own_L),
            even_L=_share(even_L, even_L + odd_L),
            mean_L=_share(B * _energy(mean_LO), _energy(after_LBO)),
            input_mean_L=_share(B * _energy(input_mean_LI), _energy(input_LBI)),
            v1_mean_L=_along(v1_LI, input_mean_LI),
            u1_mean_L=_along(u1_LO, mean_LO),
            gradient_mean_L=_share(_energy(along_LO), _energy(gradient_LOI) * _energy(input_mean_LI)),
        )
