"""A Llama-style decoder (arXiv 2307.09288; 2407.21783 for llama3 scaling): embedding, L equal layers under a scan, head.

A layer maps `h` to `h + attention(n(h))`, then to `h + down(act(gate n(h)) * up n(h))`. Options cover Qwen2 (q/k/v biases)
and Qwen3 (RMSNorm of each query and key head), the ablations of arXiv 2605.04971, and three that it leaves untested: linear
attention, no rotary embedding, and a nonlinearity between V and O (`value_activation`). Axes beside DESIGN's: E, one head's
dimension; W = E / 2, its rotary frequencies; G = H / N, the query heads that share a key/value head; S, the positions that are
attended to. Kernels are `[in, out]`; `stacks` turns them into `W[out, in]`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, PRNGKeyArray, Real

from gcjax.errors import GcjaxError, nearest
from gcjax.models.mlp import ACTIVATIONS, Model, Params

ATTENTIONS = ("softmax", "linear")
NORMS = ("rmsnorm", "layernorm", "none")  # layernorm has a gain and no shift: it differs from rmsnorm by its centring alone
DTYPES = ("float32", "bfloat16")
ROPE_SCALINGS = ("none", "linear", "llama3", "factors")
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
INPUT_OF = {"q": "q", "k": "q", "v": "q", "o": "o", "gate": "gate", "up": "gate", "down": "down"}  # the first with its input

# parameter name -> its role ("matrix": a stack of layers, "embedding" or "vector") and the part it is counted in
PARAMETERS: Mapping[str, tuple[str, str]] = {
    "embedding": ("embedding", "embedding"),
    **dict.fromkeys(("q", "k", "v", "o"), ("matrix", "attention")),
    **dict.fromkeys(("q_bias", "k_bias", "v_bias"), ("vector", "attention")),
    **dict.fromkeys(("gate", "up", "down"), ("matrix", "mlp")),
    **dict.fromkeys(("attention_norm", "mlp_norm", "q_norm", "k_norm", "final_norm"), ("vector", "norms")),
    "head": ("embedding", "head"),
}
ROLES: Mapping[str, str] = {name: role for name, (role, _) in PARAMETERS.items()}


def frequencies(head_dim: int, theta: float, scaling: Any) -> Float[np.ndarray, " W"]:
    """Rotary frequencies in radians a token, `theta^(-2i / head_dim)`, after `scaling` (the config's `rope_scaling`).

    `linear` divides all by `factor`. `llama3` divides those of wavelengths beyond `original_max_position_embeddings /
    low_freq_factor`, keeps those under `... / high_freq_factor` and blends between. `factors` divides each by its own.
    """
    plain_W = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling["kind"] == "linear":
        return plain_W / scaling["factor"]
    if scaling["kind"] == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns_W = scaling["original_max_position_embeddings"] * plain_W / (2 * np.pi)
        keep_W = np.clip((turns_W - low) / (high - low), 0, 1)
        return keep_W * plain_W + (1 - keep_W) * plain_W / scaling["factor"]
    if scaling["kind"] == "factors":
        return plain_W / np.asarray(scaling["factors"], np.float64)
    return plain_W


def rotate(
    x_BTHE: Float[Array, "B T H E"], positions_T: Real[Array, " T"], frequencies_W: Float[Array, " W"]
) -> Float[Array, "B T H E"]:
    """Rotary embedding (arXiv 2104.09864): entries i and i + E/2 of every head turned by position times frequency i."""
    angle_T1W = (positions_T.astype(jnp.float32)[:, None] * frequencies_W)[:, None]
    cos_T1W, sin_T1W = jnp.cos(angle_T1W), jnp.sin(angle_T1W)
    a_BTHW, b_BTHW = jnp.split(x_BTHE.astype(jnp.float32), 2, axis=-1)
    turned = (a_BTHW * cos_T1W - b_BTHW * sin_T1W, b_BTHW * cos_T1W + a_BTHW * sin_T1W)
    return jnp.concatenate(turned, axis=-1).astype(x_BTHE.dtype)


def linear_attention(
    q_BTHE: Float[Array, "B T H E"], k_BSNE: Float[Array, "B T N E"], v_BSNE: Float[Array, "B T N E"]
) -> Float[Array, "B T H E"]:
    """Causal attention without softmax: the sum over s <= t of (q_t . k_s) v_s / (t sqrt(E)), t counted from 1.

    The scale is softmax's own: as softmax(a)_s = (1 + a_s - mean(a)) / t + O(a^2) for the scores a = q . k / sqrt(E), softmax
    attention is mean(v) + this - mean(a) mean(v) to first order, and both depend alike on position, length and E.
    The feature map is the identity, which leaves q and k free to be rotated together, as softmax does: elu + 1, elementwise
    on both, would break the very symmetry whose breaking is under test. Key/value head n serves query heads nG to nG + G - 1.
    Scores are in float32; both products accumulate in it, the second from scores in the dtype of v.
    """
    (B, T, H, E), N = q_BTHE.shape, k_BSNE.shape[2]
    q_BTNGE = q_BTHE.reshape(B, T, N, H // N, E)
    a_BNGTS = jnp.einsum("BTNGE,BSNE->BNGTS", q_BTNGE, k_BSNE, preferred_element_type=jnp.float32)
    a_BNGTS = jnp.tril(a_BNGTS) / (math.sqrt(E) * jnp.arange(1, T + 1, dtype=jnp.float32)[:, None])
    y_BTNGE = jnp.einsum("BNGTS,BSNE->BTNGE", a_BNGTS.astype(v_BSNE.dtype), v_BSNE, preferred_element_type=jnp.float32)
    return y_BTNGE.reshape(B, T, H, E).astype(v_BSNE.dtype)


def dense(x_BTI: Float[Array, "B T I"], w_IO: Float[Array, "I O"], dtype: Any = None) -> Float[Array, "B T O"]:
    """`x W` as one product of two matrices: over two axes of tokens, XLA's CPU backend copies what the gradient of W needs."""
    y_NO = jnp.matmul(x_BTI.reshape(-1, x_BTI.shape[-1]), w_IO, preferred_element_type=dtype)
    return y_NO.reshape(*x_BTI.shape[:-1], -1)


def rms_norm(x: Float[Array, "*B D"], gain_D: Float[Array, " D"], epsilon: float) -> Float[Array, "*B D"]:
    """`gain * x / rms(x)`, computed in float32 whatever the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    return (x32 * gain_D.astype(jnp.float32)).astype(x.dtype)


class Llama(nn.Module):
    """Declares the parameters; the arithmetic of one layer is `layer`. Input tokens `[B, T]`, output logits `[B, T, V]`."""

    vocabulary: int
    width: int
    depth: int
    heads: int
    key_value_heads: int
    head_dim: int
    mlp_width: int
    activation: str
    attention: str
    value_activation: str
    norm: str
    norm_eps: float
    rope: bool
    frequencies: tuple[float, ...]
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    residual: bool
    init_std: Any  # float or traced scalar
    remat: bool
    dtype: str

    @nn.compact
    def __call__(self, tokens_BT: Integer[Array, "B T"]) -> Float[Array, "B T V"]:
        L, D, F, V, E = self.depth, self.width, self.mlp_width, self.vocabulary, self.head_dim
        Q, K = self.heads * E, self.key_value_heads * E
        zeros, ones, normal = nn.initializers.zeros_init(), nn.initializers.ones_init(), nn.initializers.normal(1.0)
        # What is added to the residual stream 2L times over starts smaller by sqrt(2L), as in GPT-2.
        std = {"o": self.init_std / math.sqrt(2 * L), "down": self.init_std / math.sqrt(2 * L)}

        def draw(name: str, *shape: int) -> Array:
            return self.param(name, lambda *a: std.get(name, self.init_std) * normal(*a), shape)

        # What is drawn comes first: Flax draws by order, so a seed then means the same weights whatever else there is.
        embedding_VD = draw("embedding", V, D)
        shapes = ((D, Q), (D, K), (D, K), (Q, D), (D, F), (D, F), (F, D))
        layers = {name: draw(name, L, *shape) for name, shape in zip(MATRICES, shapes)}
        head_DV = embedding_VD.T if self.tied else draw("head", D, V)
        if self.qkv_bias:
            sizes = {"q_bias": Q, "k_bias": K, "v_bias": K}
            layers |= {name: self.param(name, zeros, (L, size)) for name, size in sizes.items()}
        if self.qk_norm:
            layers |= {name: self.param(name, ones, (L, E)) for name in ("q_norm", "k_norm")}
        if self.norm != "none":
            layers |= {name: self.param(name, ones, (L, D)) for name in ("attention_norm", "mlp_norm")}

        h_BTD = self.embed(embedding_VD, tokens_BT)
        # For the backward pass a layer keeps its products with weights: to keep the rest, above all the T x T weights of
        # attention, takes twice the memory and no less time. Inside a scan nothing merges the recomputation with the first
        # computation, so no barrier against that.
        kept = None if self.remat else jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        step = jax.checkpoint(lambda h_BTD, layer: self.layer(h_BTD, layer)[0], prevent_cse=False, policy=kept)
        h_BTD, _ = jax.lax.scan(lambda h, layer: (step(h, layer), None), h_BTD, layers)
        return self.read_out(h_BTD, self.param("final_norm", ones, (D,)) if self.norm != "none" else None, head_DV)

    def embed(self, embedding_VD: Array, tokens_BT: Array) -> Array:
        # take fills with NaN where a token is outside the vocabulary; indexing would clamp.
        return jnp.take(embedding_VD, tokens_BT, axis=0).astype(self.dtype)

    def read_out(self, h_BTD: Array, gain_D: Array | None, head_DV: Array) -> Array:
        return dense(self.normalize(h_BTD, gain_D), head_DV.astype(self.dtype), jnp.float32)

    def layer(self, h_BTD: Array, layer: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
        """What follows one layer, and what its projections are given, by `INPUT_OF`'s names."""
        w = {name: value if name.endswith("norm") else value.astype(self.dtype) for name, value in layer.items()}
        x_BTD = self.normalize(h_BTD, w.get("attention_norm"))
        mixed_BTQ = self.attend(x_BTD, w)
        y_BTD = dense(mixed_BTQ, w["o"])
        h_BTD = h_BTD + y_BTD if self.residual else y_BTD
        z_BTD = self.normalize(h_BTD, w.get("mlp_norm"))
        gated_BTF = ACTIVATIONS[self.activation](dense(z_BTD, w["gate"])) * dense(z_BTD, w["up"])
        y_BTD = dense(gated_BTF, w["down"])
        given = {"q": x_BTD, "o": mixed_BTQ, "gate": z_BTD, "down": gated_BTF}
        return h_BTD + y_BTD if self.residual else y_BTD, given

    def attend(self, x_BTD: Array, w: Mapping[str, Array]) -> Array:
        """The heads' outputs side by side, before they are projected."""
        positions_T = jnp.arange(x_BTD.shape[1])
        frequencies_W = jnp.asarray(self.frequencies, jnp.float32)

        def project(name: str) -> Array:
            y_BTO = dense(x_BTD, w[name]) + w[f"{name}_bias"] if self.qkv_bias else dense(x_BTD, w[name])
            y_BTHE = y_BTO.reshape(*y_BTO.shape[:2], -1, self.head_dim)
            if name == "v":
                return ACTIVATIONS[self.value_activation](y_BTHE)
            y_BTHE = rms_norm(y_BTHE, w[f"{name}_norm"], self.norm_eps) if self.qk_norm else y_BTHE
            return rotate(y_BTHE, positions_T, frequencies_W) if self.rope else y_BTHE

        # Softmax is in float32 whatever the dtype.
        mix = linear_attention if self.attention == "linear" else partial(jax.nn.dot_product_attention, is_causal=True)
        y_BTHE = mix(project("q"), project("k"), project("v"))
        return y_BTHE.reshape(*y_BTHE.shape[:2], -1)

    def normalize(self, x_BTD: Array, gain_D: Array | None) -> Array:
        if gain_D is None:  # norm "none"
            return x_BTD
        if self.norm == "layernorm":
            x_BTD = x_BTD.astype(jnp.float32)
            x_BTD = x_BTD - jnp.mean(x_BTD, axis=-1, keepdims=True)
        return rms_norm(x_BTD, gain_D, self.norm_eps).astype(self.dtype)


def stacks(params: Mapping[str, Array]) -> dict[str, Array]:
    """Each projection as a stack `W[L, out, in]`, from parameters or from anything shaped like them (gradients)."""
    return {name: params[name].swapaxes(-1, -2) for name in MATRICES}


class Steps(NamedTuple):
    """The decoder one layer at a time, as pure functions, for what changes or leaves out single layers."""

    embed: Callable[[Params, Array], Array]  # parameters, tokens [B, T] -> hidden states [B, T, D]
    layer: Callable[[Params, Array], tuple[Array, dict[str, Array]]]  # one layer's parameters (`of_layer`) -> `Llama.layer`
    read_out: Callable[[Params, Array], Array]  # parameters, hidden states -> logits [B, T, V]


def steps(config: Any) -> Steps:
    """The decoder that `build(config)` gives, in steps; raises as it does, but knows no longest sequence."""
    module = _module(config)

    def read_out(params: Params, h_BTD: Array) -> Array:
        head_DV = params["embedding"].T if module.tied else params["head"]
        return module.read_out(h_BTD, params.get("final_norm"), head_DV)

    return Steps(
        lambda params, tokens_BT: module.embed(params["embedding"], tokens_BT),
        lambda layer, h_BTD: module.layer(h_BTD, layer),
        read_out,
    )


def of_layer(params: Params, index: int) -> dict[str, Array]:
    """One layer's parameters."""
    return {name: value[index] for name, value in params.items() if name not in ("embedding", "final_norm", "head")}


def build(config: Any) -> Model:
    """The decoder that `config` (the study's `model` section) describes; `init_std` may be traced.

    `value_activation` acts on each key/value head's values before they are mixed: `radial` takes the norm of one head.
    `max_length` is the most tokens that a sequence may have, those the model is meant for; 0 sets no limit.
    Raises `GcjaxError` for an activation, attention, norm, dtype or rotary scaling that does not exist, for heads that do
    not fit and for a negative `max_length`; `apply` does, when it is traced, for tokens beyond `max_length`.
    """
    module, longest = _module(config), config["max_length"]

    def init(key: PRNGKeyArray) -> Any:
        return dict(module.init(key, jnp.zeros((1, 1), jnp.int32))["params"])

    def apply(params: Params, tokens_BT: Array) -> Any:
        length = tokens_BT.shape[-1]
        if 0 < longest < length:
            raise GcjaxError(f"the sequence has {length} tokens; cut it to model.max_length={longest}, or raise it")
        return module.apply({"params": params}, tokens_BT)

    return Model(init, apply, stacks, ROLES)


def _module(config: Any) -> Llama:
    scaling = config["rope_scaling"]
    for field, value, known in (
        ("activation", config["activation"], ACTIVATIONS),
        ("attention", config["attention"], ATTENTIONS),
        ("value_activation", config["value_activation"], ACTIVATIONS),
        ("norm", config["norm"], NORMS),
        ("dtype", config["dtype"], DTYPES),
        ("rope_scaling.kind", scaling["kind"], ROPE_SCALINGS),
    ):
        if value not in known:
            raise GcjaxError(f"model.{field}={value!r} does not exist; {nearest(value, known)}")
    heads, shared, head_dim = config["heads"], config["key_value_heads"], config["head_dim"]
    if heads % shared:
        raise GcjaxError(f"model.heads={heads} is no multiple of model.key_value_heads={shared}; each serves as many heads")
    if config["rope"] and head_dim % 2:
        raise GcjaxError(f"model.head_dim={head_dim} is odd; rotary embedding turns pairs of entries, so make it even")
    if scaling["kind"] == "factors" and len(scaling["factors"]) != head_dim // 2:
        found = len(scaling["factors"])
        raise GcjaxError(f"model.rope_scaling.factors has {found} entries; head_dim={head_dim} needs {head_dim // 2}")
    longest = config["max_length"]
    if longest < 0:
        raise GcjaxError(f"model.max_length={longest} is negative; give the longest sequence's tokens, or 0 for no limit")
    turning = frequencies(head_dim, config["rope_theta"], scaling)
    fields = {field.name: config[field.name] for field in dataclasses.fields(Llama) if field.name in config}
    return Llama(**fields, frequencies=tuple(turning.tolist()))


def parameters_per_part(config: Any) -> dict[str, int]:
    """How many parameters the embedding, attention (with biases), MLP, norms and an untied head have, and their total."""
    counts = dict.fromkeys((part for _, part in PARAMETERS.values()), 0)
    for name, value in jax.eval_shape(build(config).init, jax.random.key(0)).items():
        counts[PARAMETERS[name][1]] += value.size
    return counts | {"total": sum(counts.values())}
