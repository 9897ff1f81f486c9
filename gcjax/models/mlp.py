"""The residual MLP of the ablations (arXiv 2605.04971, section 4): input projection, L equal layers under a scan, readout.

A hidden layer maps `h` to `skip * h + residual_scale * f(h)` with `skip` 1 (residual) or 0, where `f(h)` is `act(W n(h))`
(form `act_w`) or `W act(n(h))` (form `w_act`) and `n` the pre-normalization. Kernels are `[in, out]` as in Flax; `stacks`
is the one place that turns them into the measuring half's `W[out, in]`. `act(x)` is `f(a x) / a + c`, with `activation_scale` a
and `activation_shift` c: the larger a, the further f is from linear at the same `x`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, UInt8

from gcjax.errors import GcjaxError, nearest

Params = dict[str, Array]


class Hidden(NamedTuple):
    """What every layer sees and does, layers first."""

    input_LBD: Float[Array, "L B D"]  # of the matrix
    before_LBD: Float[Array, "L B D"]  # the activation's argument
    after_LBD: Float[Array, "L B D"]  # its value


class Model(NamedTuple):
    """A network as pure functions of its parameters."""

    init: Callable[[PRNGKeyArray], Params]
    apply: Callable[[Params, Array], Array]
    stacks: Callable[[Mapping[str, Array]], dict[str, Array]]
    roles: Mapping[str, str]  # parameter name -> "matrix" (a stack of layers), "embedding" (input, readout) or "vector"
    hidden: Callable[[Params, Array], Hidden] | None = None  # where the layers are of the form that Hidden describes
    activate: Callable[[Array], Array] | None = None


def radial(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """`x tanh(||x||)`: nonlinear, yet equivariant under every rotation. Its gradient at 0 is 0, not NaN."""
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    positive = square > 0
    norm = jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1.0)), 0.0)
    return x * jnp.tanh(norm)


def radial_constant(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """`radial` on all coordinates but the last, which becomes 1: equivariant under the rotations that leave that one alone."""
    return jnp.concatenate([radial(x[..., :-1]), jnp.ones_like(x[..., -1:])], axis=-1)


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "none": lambda x: x,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "radial": radial,
}
# Of the MLP's ablations alone.
OWN_ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    **ACTIVATIONS,
    "abs": jnp.abs,
    "softsign": jax.nn.soft_sign,
    "soft_threshold": lambda x: x - jnp.clip(x, -1.0, 1.0),
    "radial_constant": radial_constant,
    "relu_less_mean": lambda x: jax.nn.relu(x) - jax.nn.relu(x).mean(axis=-1, keepdims=True),
}
TAKE_MORE = ("leaky_relu", "relu_less_batch_mean")  # a slope; the other examples of a batch
NORMALIZATIONS = ("none", "layernorm", "layernorm_affine")
FORMS = ("act_w", "w_act")


class MLP(nn.Module):
    """Declares the parameters; the arithmetic of one layer is `layer`. Input `[B, pixels]` uint8, output `[B, classes]`."""

    depth: int
    width: int
    classes: int
    activation: str
    normalization: str
    form: str
    residual: bool
    bias: bool
    init_gain: Any  # float or traced scalar, as all below
    residual_scale: Any
    activation_scale: Any
    activation_shift: Any
    negative_slope: Any

    @nn.compact
    def __call__(self, x_BI: UInt8[Array, "B I"]) -> tuple[Float[Array, "B C"], Hidden]:
        fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
        hidden = nn.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=0)
        zeros, ones = nn.initializers.zeros_init(), nn.initializers.ones_init()
        L, D = self.depth, self.width

        # These three first: Flax draws by order, so a seed then means the same weights whatever else there is.
        layers = {"w": self.param("hidden", lambda *a: self.init_gain * hidden(*a), (L, D, D))}
        input_ID = self.param("input", fan_in, (x_BI.shape[-1], D))
        readout_DC = self.param("readout", fan_in, (D, self.classes))
        if self.bias:
            layers["b"] = self.param("hidden_bias", zeros, (L, D))
        if self.normalization == "layernorm_affine":
            layers["scale"] = self.param("norm_scale", ones, (L, D))
            layers["shift"] = self.param("norm_shift", zeros, (L, D))

        h_BD = x_BI.astype(jnp.float32) / 255 @ input_ID
        h_BD, seen = jax.lax.scan(self.layer, h_BD, layers)
        logits_BC = h_BD @ readout_DC
        return (logits_BC + self.param("readout_bias", zeros, (self.classes,)) if self.bias else logits_BC), seen

    def layer(self, h_BD: Array, layer: Mapping[str, Array]) -> tuple[Array, Hidden]:
        x_BD = h_BD if self.normalization == "none" else jax.nn.standardize(h_BD, epsilon=1e-6)
        if "scale" in layer:
            x_BD = x_BD * layer["scale"] + layer["shift"]
        before_BD = x_BD
        if self.form == "w_act":
            x_BD = self.activate(x_BD)
        y_BD = x_BD @ layer["w"]
        if "b" in layer:
            y_BD = y_BD + layer["b"]
        if self.form == "act_w":
            before_BD, y_BD = y_BD, self.activate(y_BD)
        seen = Hidden(x_BD, before_BD, y_BD if self.form == "act_w" else x_BD)
        return h_BD + self.residual_scale * y_BD if self.residual else self.residual_scale * y_BD, seen

    def activate(self, x_BD: Array) -> Array:
        x_BD = x_BD * self.activation_scale
        match self.activation:
            case "leaky_relu":
                y_BD = jnp.where(x_BD > 0, x_BD, self.negative_slope * x_BD)
            case "relu_less_batch_mean":
                # What it has learned of the mean is no function of the weights to the gradient, as with a running mean.
                y_BD = jax.nn.relu(x_BD)
                y_BD = y_BD - jax.lax.stop_gradient(y_BD.mean(axis=0))
            case _:
                y_BD = OWN_ACTIVATIONS[self.activation](x_BD)
        return y_BD / self.activation_scale + self.activation_shift


ROLES: Mapping[str, str] = {
    "hidden": "matrix",
    "input": "embedding",
    "readout": "embedding",
    "hidden_bias": "vector",
    "readout_bias": "vector",
    "norm_scale": "vector",
    "norm_shift": "vector",
}


def stacks(params: Mapping[str, Array]) -> dict[str, Array]:
    """The hidden layers as a stack `W[L, out, in]`, from parameters or from anything shaped like them (gradients)."""
    return {"hidden": params["hidden"].swapaxes(-1, -2)}


def build(config: Any, pixels: int, classes: int) -> Model:
    """The MLP that `config` (the study's `model` section) describes; its numbers may be traced.

    Raises `GcjaxError` for an activation, normalization or form that does not exist.
    """
    activations = (*OWN_ACTIVATIONS, *TAKE_MORE)
    for field, known in (("activation", activations), ("normalization", NORMALIZATIONS), ("form", FORMS)):
        if config[field] not in known:
            raise GcjaxError(f"model.{field}={config[field]!r} does not exist; {nearest(config[field], known)}")
    module = MLP(
        depth=config.depth,
        width=config.width,
        classes=classes,
        activation=config.activation,
        normalization=config.normalization,
        form=config.form,
        residual=config.residual,
        bias=config.bias,
        init_gain=config.init_gain,
        residual_scale=config.residual_scale,
        activation_scale=config.activation_scale,
        activation_shift=config.activation_shift,
        negative_slope=config.negative_slope,
    )

    def init(key: PRNGKeyArray) -> Any:
        return dict(module.init(key, jnp.zeros((1, pixels), jnp.uint8))["params"])

    def apply(params: Params, x_BI: Array) -> Any:
        return module.apply({"params": params}, x_BI)[0]

    def hidden(params: Params, x_BI: Array) -> Any:
        return module.apply({"params": params}, x_BI)[1]

    return Model(init, apply, stacks, ROLES, hidden, module.activate)
