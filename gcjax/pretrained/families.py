"""The table of architectures: how each family names its matrices and norms, in safetensors and in GGUF.

Sources: the modelling code of `transformers`, and llama.cpp's converter for GGUF, which stores every matrix as [out, in] and
q, k, v one after the other, whatever the family, and Gemma's gains as g.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Family(NamedTuple):
    name: str
    types: tuple[str, ...]  # `model_type` of config.json, `general.architecture` of GGUF
    matrices: Mapping[str, tuple[str, ...]]  # tensor -> the projections in its rows, in order; `*` an expert's number
    norms: Mapping[str, tuple[str, ...]]  # tensor -> the projections that its gain belongs to
    offset: float = 0.0
    transposed: bool = False
    interleaved: bool = False  # fused q, k, v lie head by head: [head, 3, head_dim, in]


QKV, _MLP = ("q", "k", "v"), ("gate", "up")
_DECODER: Mapping[str, tuple[str, ...]] = {
    **{f"self_attn.{p}_proj": (p,) for p in "qkvo"},
    "self_attn.dense": ("o",),
    "self_attn.qkv_proj": QKV,
    **{f"mlp.{p}_proj": (p,) for p in ("gate", "up", "down")},
    "mlp.gate_up_proj": _MLP,
    **dict.fromkeys(("mlp.c_fc", "mlp.fc1"), ("up",)),
    **dict.fromkeys(("mlp.c_proj", "mlp.fc2"), ("down",)),
    **{f"mlp.experts.*.{p}_proj": (p,) for p in ("gate", "up", "down")},
    "mlp.experts.gate_up_proj": _MLP,
    "mlp.experts.down_proj": ("down",),
    "block_sparse_moe.experts.*.w1": ("gate",),
    "block_sparse_moe.experts.*.w2": ("down",),
    "block_sparse_moe.experts.*.w3": ("up",),
}
_GPT2 = {"attn.c_attn": QKV, "attn.c_proj": ("o",), "mlp.c_fc": ("up",), "mlp.c_proj": ("down",)}
_NEOX = {"attention.query_key_value": QKV, "attention.dense": ("o",),
         "mlp.dense_h_to_4h": ("up",), "mlp.dense_4h_to_h": ("down",)}  # fmt: skip
_BERT: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("attention.self.query", "attention.q_lin"), ("q",)),
    **dict.fromkeys(("attention.self.key", "attention.k_lin"), ("k",)),
    **dict.fromkeys(("attention.self.value", "attention.v_lin"), ("v",)),
    **dict.fromkeys(("attention.output.dense", "attention.out_lin"), ("o",)),
    **dict.fromkeys(("intermediate.dense", "ffn.lin1"), ("up",)),
    **dict.fromkeys(("output.dense", "ffn.lin2"), ("down",)),
}
_BLOCK: Mapping[str, tuple[str, ...]] = {
    **{f"attn_{p}": (p,) for p in "qkv"},
    "attn_qkv": QKV,
    "attn_output": ("o",),
    **{f"ffn_{p}{form}": (p,) for p in ("gate", "up", "down") for form in ("", ".*", "_exps")},
    "ffn_gate_up_exps": _MLP,
}

_PRE = {"input_layernorm": QKV, "post_attention_layernorm": _MLP}  # in these, a pre-norm in spite of its name
_SANDWICH = {"input_layernorm": QKV, "post_attention_layernorm": ("o",),
             "pre_feedforward_layernorm": _MLP, "post_feedforward_layernorm": ("down",)}  # fmt: skip
_POST = {"post_attention_layernorm": ("o",), "post_feedforward_layernorm": ("down",)}
_GLM = _PRE | {"post_self_attn_layernorm": ("o",), "post_mlp_layernorm": ("down",)}
_PARALLEL = {"input_layernorm": QKV + _MLP}
_BLOCK_PRE = {"attn_norm": QKV, "ffn_norm": _MLP}
_BLOCK_POST = {"post_attention_norm": ("o",), "post_ffw_norm": ("down",)}

_LLAMA = (
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3", "phi3", "granite", "stablelm", "starcoder2"),
    *("deepseek", "deepseek_v2", "deepseek_v3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"),
    *("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text"),
)
_BLOCK_LLAMA = (
    *("llama", "mistral3", "qwen2", "qwen2vl", "qwen3", "smollm3", "granite", "stablelm", "starcoder2"),
    *("deepseek", "deepseek2", "qwen2moe", "qwen3moe", "olmoe"),
)
# By format. Where a config names no type, the row that explains most tensors counts, the first among equals.
FAMILIES: Mapping[str, tuple[Family, ...]] = {
    "safetensors": (
        Family("llama", _LLAMA, _DECODER, _PRE),
        Family("gemma", ("gemma",), _DECODER, _PRE, offset=1.0),
        Family("gemma2", ("gemma2", "gemma3", "gemma3_text"), _DECODER, _SANDWICH, offset=1.0),
        Family("olmo2", ("olmo2", "olmo3"), _DECODER, _POST),
        Family("olmo", ("olmo",), _DECODER, {}),
        Family("glm4", ("glm4",), _DECODER, _GLM),
        Family("phi", ("phi", "cohere", "cohere2"), _DECODER, _PARALLEL),
        Family("gpt2", ("gpt2",), _GPT2, {"ln_1": QKV, "ln_2": _MLP}, transposed=True),
        Family("gpt_neox", ("gpt_neox",), _NEOX, _PRE, interleaved=True),
        Family("bert", ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert"), _BERT, {}),
    ),
    "gguf": (
        Family("llama", _BLOCK_LLAMA, _BLOCK, _BLOCK_PRE),
        Family("llama", ("phi3",), {**_BLOCK, "ffn_up": _MLP}, _BLOCK_PRE),
        Family("gemma", ("gemma",), _BLOCK, _BLOCK_PRE),
        Family("gemma2", ("gemma2", "gemma3"), _BLOCK, _BLOCK_PRE | _BLOCK_POST),
        Family("olmo2", ("olmo2",), _BLOCK, _BLOCK_POST),
        Family("olmo", ("olmo",), _BLOCK, {}),
        Family("gpt2", ("gpt2",), _BLOCK, _BLOCK_PRE),
        Family("gpt_neox", ("gptneox",), _BLOCK, _BLOCK_PRE),
        Family("bert", ("bert",), _BLOCK, {}),
    ),
}
NAMED = (_DECODER, _BLOCK)  # names that say what they hold, whatever the type
PERMUTED = (  # by llama.cpp's converter, for rotary embeddings of neighbouring rows
    *("llama", "mistral3", "smollm3", "olmo", "granite", "granitemoe", "deepseek", "arcee", "deci", "minicpm"),
    *("internlm2", "baichuan", "xverse"),
)
UNMEASURED = {  # what is known of tensors that are no projection
    r"(mlp|moe)\.gate$|router|gate_inp$": "routers",
    r"shared_expert|shexp$": "shared experts",
    r"_a_proj|_b_proj|attn_k?q?v?_[ab]\b|kv_a_mqa": "latent attention, which has no plain q, k and v",
}
