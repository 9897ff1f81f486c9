"""Moves of a residual MLP's weights that may leave its function unchanged: along them, and how far training went that way.

A network without biases maps `h -> skip h + scale f(h W_l)` between an input and a readout matrix (kernels `[in, out]`, rows of
activity), its *links* being `M_l = skip I + scale W_l`. A move has a matrix G_b at each boundary b = 0..L between them:

    input -> input G_0,   M_l -> G_(l-1)^-1 M_l G_l,   readout -> G_L^-1 readout.

Whether that changes the function depends on f. Linear f: never, for any invertible G_b. Radial f: not for one rotation common
to all boundaries, which moves no layer against another. Positively homogeneous f (ReLU, |x|): not for one positive diagonal
common to all. Without skips each boundary has such a group to itself. Behind a plain LayerNorm `W_l -> W_l + 1 a^T` changes
nothing. A *direction* is the derivative of a move at the identity: generators A_b of G_b = exp(t A_b), or the shifts a_l.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, PRNGKeyArray

Params = Mapping[str, Array]  # input [I, D], hidden [L, D, D], readout [D, C]
FAMILIES = ("general", "rotation", "diagonal", "common rotation", "common diagonal", "rotation but one", "shift")
_HOMOGENEOUS = ("relu", "leaky_relu", "abs", "relu_less_batch_mean")


class Form(NamedTuple):
    """How a layer uses its matrix: `skip` (1 or 0) and `scale` of the residual branch."""

    skip: float
    scale: float


class Response(NamedTuple):
    """Of the loss along a curve of weights, t in units of the weights' own norm."""

    loss: Float[Array, ""]  # L(0), nats
    slope: Float[Array, ""]  # dL/dt
    gauss_newton: Float[Array, ""]  # what the change of the logits alone adds to the next
    curvature: Float[Array, ""]  # d^2 L/dt^2
    finite: Float[Array, ""]  # L(t) - L(0) at the finite t that was asked for


def symmetries(model: Any) -> tuple[str, ...]:
    """The FAMILIES whose every member leaves the function of the MLP that `model` (a config's section) describes unchanged.

    Only what is known is listed: GELU, SiLU, tanh have none. Biases and affine normalization are not covered: ().
    """
    if model["bias"] or model["normalization"] == "layernorm_affine":
        return ()
    if model["normalization"] == "layernorm":
        return ("shift",) if model["form"] == "act_w" else ()
    if model["activation_shift"]:
        return ()
    own = {
        "none": ("general", "rotation", "diagonal", "common rotation", "common diagonal", "rotation but one"),
        "radial": ("common rotation", "rotation but one")
        if model["residual"]
        else ("rotation", "common rotation", "rotation but one"),
        "radial_constant": ("rotation but one",),
        **dict.fromkeys(_HOMOGENEOUS, ("common diagonal",) if model["residual"] else ("diagonal", "common diagonal")),
    }
    return own.get(model["activation"], ())


def generators(key: PRNGKeyArray, family: str, params: Params) -> Float[Array, "..."]:
    """A random direction of a family: `A[L + 1, D, D]`, or shifts `a[L, D]`, normal entries."""
    (L, D), dtype = params["hidden"].shape[:2], params["hidden"].dtype
    if family == "shift":
        return jax.random.normal(key, (L, D), dtype)
    common = family.startswith("common") or family == "rotation but one"
    a_BDD = jax.random.normal(key, (1 if common else L + 1, D, D), dtype)
    a_BDD = within(family, a_BDD)
    return jnp.broadcast_to(a_BDD, (L + 1, D, D))


def within(family: str, a_BDD: Float[Array, "B D D"]) -> Float[Array, "B D D"]:
    """The part of any matrices that lies in the family's algebra, boundary by boundary."""
    if family.endswith("diagonal"):
        return a_BDD * jnp.eye(a_BDD.shape[-1], dtype=a_BDD.dtype)
    if "rotation" in family:
        a_BDD = (a_BDD - a_BDD.swapaxes(-1, -2)) / 2
        return a_BDD.at[:, -1].set(0).at[:, :, -1].set(0) if family == "rotation but one" else a_BDD
    return a_BDD


def links(params: Params, form: Form) -> Float[Array, "L D D"]:
    """`M_l = skip I + scale W_l`."""
    return form.skip * jnp.eye(params["hidden"].shape[-1], dtype=params["hidden"].dtype) + form.scale * params["hidden"]


def _rebuilt(params: Params, form: Form, in_BDD: Array, out_BDD: Array) -> dict[str, Array]:
    """Weights after the move with G = `in_BDD` and its inverse `out_BDD`."""
    moved_LDD = out_BDD[:-1] @ links(params, form) @ in_BDD[1:]
    eye_DD = jnp.eye(moved_LDD.shape[-1], dtype=moved_LDD.dtype)
    hidden_LDD = (moved_LDD - form.skip * eye_DD) / form.scale
    return {"input": params["input"] @ in_BDD[0], "hidden": hidden_LDD, "readout": out_BDD[-1] @ params["readout"]}


def move(params: Params, form: Form, g_BDD: Float[Array, "B D D"]) -> dict[str, Array]:
    """The weights after the finite move with the invertible G_b."""
    return _rebuilt(params, form, g_BDD, jnp.linalg.inv(g_BDD))


def finite(params: Params, form: Form, direction: Array, t: Any) -> dict[str, Array]:
    """The weights at a finite `t` along a direction: `G_b = exp(t A_b)`, or `W_l + t 1 a_l^T`."""
    if direction.ndim == 2:
        return {**params, "hidden": params["hidden"] + t * direction[:, None, :]}
    forth, back = (jax.vmap(jax.scipy.linalg.expm)(sign * t * direction) for sign in (1, -1))
    return _rebuilt(params, form, forth, back)


def curve(params: Params, form: Form, direction: Array, t: Any) -> dict[str, Array]:
    """`finite` to the second order in t, which is all that first and second derivatives at 0 see."""
    if direction.ndim == 2:
        return finite(params, form, direction, t)
    eye_DD, square_BDD = jnp.eye(direction.shape[-1], dtype=direction.dtype), direction @ direction / 2
    return _rebuilt(params, form, *(eye_DD + sign * t * direction + t**2 * square_BDD for sign in (1, -1)))


def tangent(params: Params, form: Form, direction: Array) -> dict[str, Array]:
    """The derivative of the weights along a direction, at 0; linear in the direction."""
    if direction.ndim == 2:
        hidden_LDD = jnp.broadcast_to(direction[:, None, :], params["hidden"].shape)
        return {**jax.tree.map(jnp.zeros_like, dict(params)), "hidden": hidden_LDD}
    m_LDD = links(params, form)
    return {
        "input": params["input"] @ direction[0],
        "hidden": (m_LDD @ direction[1:] - direction[:-1] @ m_LDD) / form.scale,
        "readout": -direction[-1] @ params["readout"],
    }


def norm(params: Any) -> Float[Array, ""]:
    """Of all weights together, Frobenius."""
    return jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(params)))


def like(key: PRNGKeyArray, params: Params) -> dict[str, Array]:
    """Random weights, each array with the norm of that in `params`: what a direction is compared with."""
    keys = dict(zip(sorted(params), jax.random.split(key, len(params))))
    drawn = {name: jax.random.normal(keys[name], x.shape, x.dtype) for name, x in params.items()}
    return {name: x * (jnp.linalg.norm(params[name]) / jnp.linalg.norm(x)) for name, x in drawn.items()}


def respond(
    path: Callable[[Any], Any],
    far: Any,
    logits_of: Callable[[Any], Float[Array, "N C"]],
    labels_N: Integer[Array, " N"],
) -> Response:
    """How the mean cross-entropy changes along `path` (t -> weights) at 0, and to the weights `far`."""
    zero, one = jnp.zeros((), far["hidden"].dtype), jnp.ones((), far["hidden"].dtype)

    def loss_of(logits_NC: Array) -> Array:
        return -jnp.take_along_axis(jax.nn.log_softmax(logits_NC), labels_N[:, None], axis=-1).mean()

    def first(t: Array) -> tuple[Array, Array]:
        return jax.jvp(lambda s: loss_of(logits_of(path(s))), (t,), (one,))

    (loss, slope), (_, curvature) = jax.jvp(first, (zero,), (one,))
    logits_NC, change_NC = jax.jvp(lambda s: logits_of(path(s)), (zero,), (one,))
    p_NC = jax.nn.softmax(logits_NC)
    spread_N = jnp.sum(p_NC * change_NC**2, axis=-1) - jnp.sum(p_NC * change_NC, axis=-1) ** 2
    return Response(loss, slope, spread_N.mean(), curvature, loss_of(logits_of(far)) - loss)


def share_of_motion(
    params: Params, form: Form, motion: Params, family: str, iterations: int
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """How much of a change of the weights is along a family of moves: the share of its square, and the relative residual of
    the normal equations, by conjugate gradients. Stopped early, the share is too small, never too large.

    `family`: general, rotation or diagonal, whose boundaries are independent.
    """
    shape = (len(params["hidden"]) + 1, *params["hidden"].shape[1:])
    forward = partial(tangent, params, form)
    transpose = jax.linear_transpose(forward, jax.ShapeDtypeStruct(shape, params["hidden"].dtype))

    def back(x: Any) -> Array:
        return within(family, transpose(dict(x))[0])

    right = back(motion)
    found, _ = jax.scipy.sparse.linalg.cg(lambda a: back(forward(within(family, a))), right, tol=1e-5, maxiter=iterations)
    found = within(family, found)
    left = jax.tree.map(jnp.subtract, dict(motion), forward(found))
    residual = norm([back(left)]) / norm([right])
    return 1 - (norm(left) / norm(motion)) ** 2, residual


def gauges(params: Params, form: Form, target: Params, start_BDD: Float[Array, "B D D"], sweeps: int) -> Float[Array, "B D D"]:
    """Orthogonal G_b for which the moved weights are nearest to `target`'s, from `start`: a local minimum, by alternation.

    Each G_b, its neighbours fixed, is the polar factor of what it joins (orthogonal Procrustes).
    """
    m_LDD, goal_LDD = links(params, form), links(target, form)
    first_DD = form.scale**2 * params["input"].T @ target["input"]  # links are scale times the weights
    last_DD = form.scale**2 * params["readout"] @ target["readout"].T
    parity_B = jnp.arange(len(start_BDD)) % 2

    def sweep(q_BDD: Array, _: Any) -> tuple[Array, None]:
        for parity in (0, 1):
            before_LDD = m_LDD.swapaxes(-1, -2) @ q_BDD[:-1] @ goal_LDD  # for the boundary behind a link
            behind_LDD = m_LDD @ q_BDD[1:] @ goal_LDD.swapaxes(-1, -2)  # for that before it
            joined = jnp.concatenate([first_DD[None], before_LDD]) + jnp.concatenate([behind_LDD, last_DD[None]])
            u, _, vt = jnp.linalg.svd(joined, full_matrices=False)
            q_BDD = jnp.where((parity_B == parity)[:, None, None], u @ vt, q_BDD)
        return q_BDD, None

    return jax.lax.scan(sweep, start_BDD, None, length=sweeps)[0]
