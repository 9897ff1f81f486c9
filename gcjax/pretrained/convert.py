"""Checkpoints of the Llama family (Llama, Mistral, SmolLM, Qwen2, Qwen3; safetensors or GGUF) -> parameters of `models.llama`.

A checkpoint is three plain things: its config (a Hugging Face `config.json`, or GGUF metadata), its tensors' shapes
`[out, in]` by name, and `read(name)`, which loads one of them.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from gcjax.errors import GcjaxError, nearest, some
from gcjax.models import llama

Shapes = Mapping[str, tuple[int, ...]]
Read = Callable[[str], np.ndarray]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # the same names in config.json and in GGUF
ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu": "relu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
DTYPES = ("float32", "bfloat16")
# llama.cpp's converter reorders the rows of q and k for architecture "llama" (which files of Mistral and SmolLM name too),
# so that a rotary pair i, i + E/2 stands at 2i, 2i + 1; those of Qwen it leaves alone.
FORMATS = ("safetensors", "gguf", "gguf-permuted")


class Source(NamedTuple):
    """What a checkpoint's own config says: the `model` section of `models.llama`, its format, and notes for the user."""

    model: ConfigDict
    format: str
    notes: tuple[str, ...]


# parameter -> its name in safetensors (prefixes such as `model.` stripped), in GGUF, and whether it is stored transposed
NAMES: Mapping[str, tuple[str, str, bool]] = {
    "embedding": ("embed_tokens.weight", "token_embd.weight", False),
    "q": ("layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight", True),
    "k": ("layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight", True),
    "v": ("layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight", True),
    "o": ("layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight", True),
    "gate": ("layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight", True),
    "up": ("layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight", True),
    "down": ("layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight", True),
    "q_bias": ("layers.{}.self_attn.q_proj.bias", "blk.{}.attn_q.bias", False),
    "k_bias": ("layers.{}.self_attn.k_proj.bias", "blk.{}.attn_k.bias", False),
    "v_bias": ("layers.{}.self_attn.v_proj.bias", "blk.{}.attn_v.bias", False),
    "q_norm": ("layers.{}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight", False),
    "k_norm": ("layers.{}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight", False),
    "attention_norm": ("layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight", False),
    "mlp_norm": ("layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight", False),
    "final_norm": ("norm.weight", "output_norm.weight", False),
    "head": ("lm_head.weight", "output.weight", True),
}
PREFIXES = re.compile(r"^((_orig_mod|module|model|language_model)\.)+")
ROPE_FACTORS = "rope_freqs.weight"  # of a GGUF: what each rotary frequency is divided by, for llama3 scaling
UNSCALED = {"kind": "none", "factor": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "factors": ()}  # fmt: skip


def tensor_name(parameter: str, layer: int | None = None) -> str:
    """Hugging Face's name of a parameter, of one layer where it is a stack of them."""
    return ("" if parameter == "head" else "model.") + NAMES[parameter][0].format(layer)


def hugging_face_config(section: Any) -> dict[str, Any]:
    """A config.json from which `model_config` reads `section` again, but for rotary factors of a GGUF."""
    scaling = section.rope_scaling
    needed = {"none": (), "factors": (), "linear": ("factor",), "llama3": tuple(UNSCALED)[1:5]}[scaling.kind]
    family = "qwen3" if section.qk_norm else "qwen2" if section.qkv_bias else "llama"
    found = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]],
        "model_type": family,
        "vocab_size": section.vocabulary,
        "hidden_size": section.width,
        "intermediate_size": section.mlp_width,
        "num_hidden_layers": section.depth,
        "num_attention_heads": section.heads,
        "num_key_value_heads": section.key_value_heads,
        "head_dim": section.head_dim,
        "hidden_act": {"gelu": "gelu_pytorch_tanh"}.get(section.activation, section.activation),
        "rms_norm_eps": section.norm_eps,
        "rope_theta": section.rope_theta,
        "rope_scaling": {"rope_type": scaling.kind} | {field: scaling[field] for field in needed} if needed else None,
        "initializer_range": section.init_std,
        "tie_word_embeddings": section.tied,
        "dtype": section.dtype,
    }
    return found | ({"max_position_embeddings": section.max_length} if section.max_length else {})


def model_config(config: Mapping[str, Any], shapes: Shapes, read: Read) -> Source:
    """The model that `config` (a decoded config.json, or GGUF metadata by key) describes; `read` serves rope_freqs alone.

    Raises `GcjaxError` naming the first thing in it that `models.llama` does not implement, or a field that is missing.
    """
    try:
        return _from_gguf(config, shapes, read) if "general.architecture" in config else _from_hugging_face(config, shapes)
    except (AttributeError, TypeError, ValueError) as error:
        raise GcjaxError(f"the checkpoint's config holds something of the wrong type: {error}") from error


def _from_hugging_face(config: Mapping[str, Any], shapes: Shapes) -> Source:
    family = _family(config.get("model_type"), "model_type")
    required = _required(config, ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"))
    width, depth, heads, mlp_width, vocabulary = required

    for field, what in (
        ("attention_bias", "a bias on the attention output"),
        ("mlp_bias", "biases in the MLP"),
        ("attn_logit_softcapping", "softcapping of attention logits"),
        ("final_logit_softcapping", "softcapping of logits"),
        ("num_experts", "experts"),
        ("num_local_experts", "experts"),
    ):
        _refuse(config, field, what)
    unknown = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        raise GcjaxError(f"config.json has layer_types {', '.join(sorted(unknown))}, which models.llama does not implement")
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        hint = "; its gelu is the tanh form" if activation == "gelu" else ""
        raise GcjaxError(f"config.json has hidden_act={activation!r}, which models.llama does not implement{hint}")

    # transformers 5 keeps theta and the scaling together as rope_parameters; before, rope_theta stood beside rope_scaling.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise GcjaxError("config.json has rope_parameters for each type of layer, which models.llama does not implement")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise GcjaxError(f"config.json has partial_rotary_factor={partial}; models.llama turns whole heads only")

    # Qwen's configs name a window that they do not use.
    window = config.get("sliding_window") if config.get("use_sliding_window", family == "mistral") else None
    model = {
        "vocabulary": vocabulary,
        "width": width,
        "depth": depth,
        "heads": heads,
        "key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or (128 if family == "qwen3" else width // heads),
        "mlp_width": mlp_width,
        "activation": ACTIVATIONS[activation],
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope_theta": float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        "rope_scaling": _scaling(rope, config.get("max_position_embeddings")),
        # Absent, it is false for all families, but a checkpoint that has no head can only be tied.
        "tied": config.get("tie_word_embeddings", all(PREFIXES.sub("", name) != NAMES["head"][0] for name in shapes)),
        "init_std": float(config.get("initializer_range", 0.02)),
        "dtype": "bfloat16" if str(config.get("dtype") or config.get("torch_dtype")).endswith("bfloat16") else "float32",
    }
    return Source(_section(model, family, config.get("max_position_embeddings")), "safetensors", _window_note(window))


def _from_gguf(config: Mapping[str, Any], shapes: Shapes, read: Read) -> Source:
    family = _family(config["general.architecture"], "general.architecture")
    fields = ("embedding_length", "block_count", "attention.head_count", "feed_forward_length")
    width, depth, heads, mlp_width = _required(config, [f"{family}.{field}" for field in fields])
    if "token_embd.weight" not in shapes:
        raise GcjaxError("the GGUF has no token_embd.weight; is it one of several parts?")

    def get(field: str, default: Any) -> Any:
        return config.get(f"{family}.{field}", default)

    for field, what in (
        ("expert_count", "experts"),
        ("attn_logit_softcapping", "softcapping of attention logits"),
        ("final_logit_softcapping", "softcapping of logits"),
        ("attention.scale", "a scale of the attention logits"),
        ("embedding_scale", "a scale of the embedding"),
        ("residual_scale", "a scale of the residual stream"),
        ("logit_scale", "a scale of the logits"),
    ):
        _refuse(config, f"{family}.{field}", what)
    shared, head_dim = get("attention.head_count_kv", heads), get("attention.key_length", width // heads)
    if not isinstance(shared, int | np.integer):
        raise GcjaxError(f"{family}.attention.head_count_kv differs between layers, which models.llama does not implement")
    if get("attention.value_length", head_dim) != head_dim:
        raise GcjaxError(f"{family}.attention.value_length differs from key_length, which models.llama does not implement")
    if get("rope.dimension_count", head_dim) != head_dim:
        raise GcjaxError(f"{family}.rope.dimension_count is not the head's {head_dim}; models.llama turns whole heads only")

    factor = get("rope.scaling.factor", get("rope.scale_linear", 1.0))
    kind = get("rope.scaling.type", "linear" if f"{family}.rope.scale_linear" in config else "none")
    scaling = _scaling({"type": kind, "factor": factor}, None)
    if ROPE_FACTORS in shapes:
        if kind != "none":
            raise GcjaxError(
                f"the GGUF has both {ROPE_FACTORS} and {family}.rope.scaling.type={kind!r}, which is not implemented"
            )
        scaling |= {"kind": "factors", "factors": tuple(read(ROPE_FACTORS).astype(np.float64).ravel().tolist())}
    model = {
        "vocabulary": shapes["token_embd.weight"][0],
        "width": int(width),
        "depth": int(depth),
        "heads": int(heads),
        "key_value_heads": int(shared),
        "head_dim": int(head_dim),
        "mlp_width": int(mlp_width),
        "activation": "silu",
        "norm_eps": float(get("attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_theta": float(get("rope.freq_base", 10000.0)),
        "rope_scaling": scaling,
        "tied": NAMES["head"][1] not in shapes,
        "init_std": 0.02,
        "dtype": "float32",
    }
    format = "gguf-permuted" if family == "llama" else "gguf"
    longest = get("context_length", None)
    return Source(_section(model, family, longest), format, _window_note(get("attention.sliding_window", None)))


def _section(model: dict[str, Any], family: str, longest: int | None) -> ConfigDict:
    same = {"kind": "llama", "attention": "softmax", "value_activation": "none", "norm": "rmsnorm", "rope": True,
            "residual": True, "remat": False}  # fmt: skip
    # Some checkpoints with linear scaling name the context from before it, some the one that it stretches that to.
    known = int(longest) if longest and model["rope_scaling"]["kind"] != "linear" else 0
    own = {"max_length": known, "qkv_bias": family == "qwen2", "qk_norm": family == "qwen3"}
    return ConfigDict(model | same | own)


def _family(name: Any, field: str) -> str:
    if name not in FAMILIES:
        raise GcjaxError(f"{field}={name!r} is not a model that gcjax converts; {nearest(name, FAMILIES)}")
    return name


def _required(config: Mapping[str, Any], fields: Iterable[str]) -> list[int]:
    for field in fields:
        if not isinstance(config.get(field), int | np.integer) or config[field] < 1:
            raise GcjaxError(f"the checkpoint's config has {field}={config.get(field)!r} where one positive number is needed")
    return [config[field] for field in fields]


def _refuse(config: Mapping[str, Any], field: str, what: str) -> None:
    if config.get(field):
        raise GcjaxError(f"the checkpoint has {what} ({field}={config[field]!r}), which models.llama does not implement")


def _window_note(window: int | None) -> tuple[str, ...]:
    note = f"the checkpoint attends within a sliding window; models.llama equals it for contexts of up to {window} tokens"
    return (note,) if window else ()


def _scaling(rope: Mapping[str, Any], longest: int | None) -> dict[str, Any]:
    """The `rope_scaling` section from that of a checkpoint; `longest` stands in for a missing original context."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "none" if kind == "default" else kind
    needed = {"none": (), "linear": ("factor",), "llama3": tuple(UNSCALED)[1:5]}
    if kind not in needed:
        raise GcjaxError(f"the checkpoint has rotary scaling {kind!r}, which models.llama does not implement")
    found = {"original_max_position_embeddings": longest} | dict(rope)
    missing = [field for field in needed[kind] if found.get(field) is None]
    if missing:
        raise GcjaxError(f"the checkpoint's rotary scaling {kind!r} lacks {', '.join(missing)}")
    return UNSCALED | {"kind": kind} | {field: type(UNSCALED[field])(found[field]) for field in needed[kind]}


def convert(
    shapes: Shapes,
    read: Read,
    config: Any,
    dtype: str = "float32",
    format: str = "safetensors",
    place: Callable[[str, np.ndarray], Any] = lambda name, value: jnp.asarray(value),
) -> dict[str, Any]:
    """The parameters of `models.llama.build(config)` from a checkpoint's tensors, each read once, in `dtype`.

    Stacks are filled tensor by tensor, and `place(parameter, array)` puts each on its device or sharding before the next
    is begun: the host holds one stack and one tensor beside what `place` keeps.
    Raises `GcjaxError` before anything is read where a tensor is unknown, missing, there twice or of another shape.
    """
    if dtype not in DTYPES:
        raise GcjaxError(f"parameters can be converted to float32 or bfloat16, not {dtype!r}")
    if format not in FORMATS:
        raise GcjaxError(f"format={format!r} does not exist; {nearest(format, FORMATS)}")
    declared = {name: value.shape for name, value in jax.eval_shape(llama.build(config).init, jax.random.key(0)).items()}
    tensors, tied_head = _locate(shapes, config, format, declared)

    params = {}
    for name, shape in declared.items():
        value = np.empty(shape, jnp.dtype(dtype))
        for index in np.ndindex(shape[:1]) if "{}" in NAMES[name][0] else [()]:
            value[index] = _load(tensors[name, *index], read, shapes, name, config, format)
        if name == "embedding" and tied_head and not np.array_equal(value, read(tied_head).astype(value.dtype)):
            raise GcjaxError(f"{tied_head} differs from {tensors['embedding',]}, though the config says that they are tied")
        params[name] = place(name, value)
    return params


def _locate(
    shapes: Shapes, config: Any, format: str, declared: Mapping[str, tuple[int, ...]]
) -> tuple[dict[tuple[Any, ...], str], str | None]:
    """(parameter, layer) -> tensor, for every parameter of the model; and the name of a head stored beside a tied embedding."""
    templates = {name: names[0] if format == "safetensors" else names[1] for name, names in NAMES.items()}
    by_template = {template: name for name, template in templates.items()}
    wanted = {}
    for name, shape in declared.items():
        layered, transposed = "{}" in NAMES[name][0], NAMES[name][2]
        stored = shape[1:] if layered else shape
        indices = [(name, layer) for layer in range(shape[0])] if layered else [(name,)]
        wanted |= dict.fromkeys(indices, stored[::-1] if transposed else stored)

    found, problems, tied_head = {}, {"unknown": [], "duplicate": [], "of the wrong shape": [], "missing": []}, None
    for tensor, shape in shapes.items():
        plain = PREFIXES.sub("", tensor) if format == "safetensors" else tensor
        layer = re.match(r"(?:layers|blk)\.(\d{1,9})\.", plain)
        template = plain if layer is None else plain[: layer.start(1)] + "{}" + plain[layer.end(1) :]
        key = (by_template.get(template), *([int(layer[1])] if layer else []))
        if key == ("head",) and config["tied"] and tuple(shape) == tuple(declared["embedding"]):
            tied_head = tensor
        elif plain.endswith("rotary_emb.inv_freq") or (tensor == ROPE_FACTORS and config["rope_scaling"]["kind"] == "factors"):
            continue  # computed from the config, or already in it
        elif key not in wanted:
            problems["unknown"].append(tensor)
        elif key in found:
            problems["duplicate"].append(f"{tensor} (as {found[key]})")
        else:
            found[key] = tensor
            if tuple(shape) != wanted[key]:
                problems["of the wrong shape"].append(f"{tensor} {list(shape)} instead of {list(wanted[key])}")
    problems["missing"] = [templates[key[0]].format(*key[1:]) for key in wanted if key not in found]
    sentences = [f"tensors {problem}: {some(names, 8)}" for problem, names in problems.items() if names]
    if sentences:
        raise GcjaxError("the checkpoint does not fit the model; " + "; ".join(sentences))
    return found, tied_head


def _load(tensor: str, read: Read, shapes: Shapes, name: str, config: Any, format: str) -> np.ndarray:
    """One tensor as the model declares it: `[in, out]`, its rotary rows in halves."""
    value = read(tensor)
    if value.shape != tuple(shapes[tensor]) or not jnp.issubdtype(value.dtype, jnp.floating):
        raise GcjaxError(f"{tensor} was read as {value.dtype} {list(value.shape)}, not as numbers {list(shapes[tensor])}")
    if format == "gguf-permuted" and name in ("q", "k", "q_bias", "k_bias"):
        pairs = value.reshape(-1, config["head_dim"] // 2, 2, *value.shape[1:])
        value = pairs.swapaxes(1, 2).reshape(value.shape)
    return value.T if NAMES[name][2] else value
