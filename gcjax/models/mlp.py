"""The residual MLP of the ablations (arXiv 2605.04971, section 4): input projection, L equal layers under a scan, readout.

A hidden layer maps `h` to `skip * h + residual_scale * f(h)` with `skip` 1 (residual) or 0, where `f(h)` is `act(W n(h))`
(form `act_w`) or `W act(n(h))` (form `w_act`) and `n` the pre-normalization. Kernels are `[in, out]` as in Flax; `stacks`
is the one place that turns them into the measuring half's `W[out, in]`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, UInt8

from gcjax.errors import GcjaxError, nearest

Params = dict[str, Array]


class Model(NamedTuple):
    """A network as pure functions of its parameters."""

    init: Callable[[PRNGKeyArray], Params]
    apply: Callable[[Params, Array], Array]
    stacks: Callable[[Mapping[str, Array]], dict[str, Array]]
    roles: Mapping[str, str]  # parameter name -> "matrix" (a stack of layers), "embedding" (input, readout) or "vector"


def radial(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """`x tanh(||x||)`: nonlinear, yet equivariant under every rotation. Its gradient at 0 is 0, not NaN."""
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    positive = square > 0
    norm = jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1.0)), 0.0)
    return x * jnp.tanh(norm)


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "none": lambda x: x,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "radial": radial,
}
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
    init_gain: Any  # float or traced scalar
    residual_scale: Any

    @nn.compact
    def __call__(self, x_BI: UInt8[Array, "B I"]) -> Float[Array, "B C"]:
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
        h_BD, _ = jax.lax.scan(lambda h, layer: (self.layer(h, layer), None), h_BD, layers)
        logits_BC = h_BD @ readout_DC
        return logits_BC + self.param("readout_bias", zeros, (self.classes,)) if self.bias else logits_BC

    def layer(self, h_BD: Array, layer: Mapping[str, Array]) -> Array:
        act = ACTIVATIONS[self.activation]
        x_BD = h_BD if self.normalization == "none" else jax.nn.standardize(h_BD, epsilon=1e-6)
        if "scale" in layer:
            x_BD = x_BD * layer["scale"] + layer["shift"]
        if self.form == "w_act":
            x_BD = act(x_BD)
        x_BD = x_BD @ layer["w"]
        if "b" in layer:
            x_BD = x_BD + layer["b"]
        if self.form == "act_w":
            x_BD = act(x_BD)
        return h_BD + self.residual_scale * x_BD if self.residual else self.residual_scale * x_BD


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
    """The MLP that `config` (the study's `model` section) describes; `init_gain` and `residual_scale` may be traced.

    Raises `GcjaxError` for an activation, normalization or form that does not exist.
    """
    for field, known in (("activation", ACTIVATIONS), ("normalization", NORMALIZATIONS), ("form", FORMS)):
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
    )

    def init(key: PRNGKeyArray) -> Any:
        return dict(module.init(key, jnp.zeros((1, pixels), jnp.uint8))["params"])

    def apply(params: Params, x_BI: Array) -> Any:
        return module.apply({"params": params}, x_BI)

    return Model(init, apply, stacks, ROLES)
