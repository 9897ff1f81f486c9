"""Conversion: logits equal those of transformers, and a checkpoint that does not fit is refused by its tensors' names."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcjax.errors import GcjaxError
from gcjax.models import llama
from gcjax.pretrained import convert

# Hugging Face configs of 3 layers in which no two dimensions agree.
SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
FAMILIES = {
    "llama": {"model_type": "llama"},
    "llama, MHA, tied": {"model_type": "llama", "num_key_value_heads": None, "tie_word_embeddings": True},
    "llama 3": {"model_type": "llama", "rope_parameters": LLAMA3, "head_dim": 8},
    "llama, linear": {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}},
    "llama, gelu": {"model_type": "llama", "hidden_act": "gelu_pytorch_tanh"},
    "mistral": {"model_type": "mistral", "sliding_window": 64},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2, untied": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 10},
}


def _nothing(name):
    raise AssertionError(f"{name} was read")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """family -> (config.json, tensors, tokens, logits of transformers) of a random checkpoint that transformers saved."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.numpy")
    made = {}

    def make(family):
        if family not in made:
            torch.manual_seed(sorted(FAMILIES).index(family))
            fields = SIZES | FAMILIES[family]
            config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            with torch.no_grad():
                for name, value in model.named_parameters():  # biases start at 0 and gains at 1
                    if "norm" in name or "bias" in name:
                        value.add_(0.5 * torch.randn_like(value))
                tokens = torch.randint(0, SIZES["vocab_size"], (2, 48))
                logits = model(tokens).logits.numpy()
            directory = tmp_path_factory.mktemp("checkpoint")
            model.save_pretrained(directory)
            config = json.loads((directory / "config.json").read_text())
            tensors = safetensors.load_file(directory / "model.safetensors")
            made[family] = config, tensors, tokens.numpy(), logits
        return made[family]

    return make


def _shapes(tensors):
    return {name: value.shape for name, value in tensors.items()}


def _logits(source, tensors, tokens):
    params = convert.convert(_shapes(tensors), tensors.__getitem__, source.model, format=source.format)
    return np.asarray(jax.jit(llama.build(source.model).apply)(params, jnp.asarray(tokens)))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(checkpoints, family, record_property):
    config, tensors, tokens, expected = checkpoints(family)
    source = convert.model_config(config, _shapes(tensors), _nothing)
    found = _logits(source, tensors, tokens)
    off = np.abs(found - expected).max()
    record_property("largest_difference", off)
    print(f"{family}: {off:.1e} of {np.abs(expected).max():.1f}")
    assert off < 2e-4
    assert np.abs(expected).std() > 0.1


@pytest.mark.parametrize("family", ["llama 3", "qwen2", "qwen3"])
def test_the_comparison_sees_each_thing_that_a_family_adds(checkpoints, family):
    config, tensors, tokens, expected = checkpoints(family)
    source = convert.model_config(config, _shapes(tensors), _nothing)
    if family == "llama 3":
        source.model.rope_scaling.kind = "none"
    added = {"qwen2": ".bias", "qwen3": "_norm.weight"}.get(family, "nothing")
    tensors = {n: np.full_like(v, n.endswith(".weight")) if added in n and "attn" in n else v for n, v in tensors.items()}
    assert np.abs(_logits(source, tensors, tokens) - expected).max() > 1e-2


# The rest needs no torch: checkpoints made from the table of parameters that the model itself declares.
def _hugging_face(family="llama", **changes):
    return SIZES | FAMILIES[family] | changes


def _made(config, seed=0):
    """Random tensors with the names and shapes of transformers' classes, written out here."""
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    E = config.get("head_dim") or D // config["num_attention_heads"]
    Q, K = E * config["num_attention_heads"], E * (config.get("num_key_value_heads") or config["num_attention_heads"])
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (V, D)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {f"{at}input_layernorm.weight": (D,), f"{at}post_attention_layernorm.weight": (D,)}
        shapes |= {f"{at}self_attn.{n}_proj.weight": s for n, s in (("q", (Q, D)), ("k", (K, D)), ("v", (K, D)), ("o", (D, Q)))}
        shapes |= {f"{at}mlp.{n}_proj.weight": s for n, s in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F)))}
        if config["model_type"] == "qwen2":
            shapes |= {f"{at}self_attn.{n}_proj.bias": (s,) for n, s in (("q", Q), ("k", K), ("v", K))}
        if config["model_type"] == "qwen3":
            shapes |= {f"{at}self_attn.{n}_norm.weight": (E,) for n in "qk"}
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def _convert(config, tensors, **options):
    source = convert.model_config(config, _shapes(tensors), tensors.__getitem__)
    return convert.convert(_shapes(tensors), tensors.__getitem__, source.model, **({"format": source.format} | options))


def _same(a, b):
    assert set(a) == set(b)
    for name, value in a.items():
        np.testing.assert_array_equal(value, b[name], err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_written_here_are_those_of_transformers(checkpoints, family):
    assert _shapes(_made(_hugging_face(family))) == _shapes(checkpoints(family)[1])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_parameter_is_filled_from_its_tensor_as_out_by_in_stacks(family):
    config = _hugging_face(family)
    tensors = _made(config)
    source = convert.model_config(config, _shapes(tensors), _nothing)
    model = llama.build(source.model)
    params = _convert(config, tensors)
    declared = jax.eval_shape(model.init, jax.random.key(0))
    assert {name: (v.shape, v.dtype) for name, v in params.items()} == {n: (v.shape, v.dtype) for n, v in declared.items()}
    for name, w_LOI in model.stacks(params).items():
        block = "mlp" if name in ("gate", "up", "down") else "self_attn"
        for i, w_OI in enumerate(w_LOI):
            np.testing.assert_array_equal(w_OI, tensors[f"model.layers.{i}.{block}.{name}_proj.weight"])
    assert sum(v.size for v in params.values()) == sum(v.size for v in tensors.values())


def test_ten_layers_are_in_the_order_of_their_numbers_whatever_the_order_of_the_tensors():
    config = _hugging_face(num_hidden_layers=12)
    tensors = _made(config)
    params = _convert(config, dict(sorted(tensors.items())))
    np.testing.assert_array_equal(params["o"][10], tensors["model.layers.10.self_attn.o_proj.weight"].T)
    _same(params, _convert(config, dict(reversed(tensors.items()))))


@pytest.mark.parametrize("prefix", ["", "module.model.", "_orig_mod._orig_mod.model.", "model.language_model."])
def test_prefixes_that_wrappers_add_are_stripped(prefix):
    config = _hugging_face("qwen3")
    tensors = _made(config)
    renamed = {prefix + name.removeprefix("model."): value for name, value in tensors.items()}
    _same(_convert(config, renamed), _convert(config, tensors))


def test_bfloat16_rounds_to_nearest():
    config = _hugging_face("qwen2")
    exact, half = _convert(config, _made(config)), _convert(config, _made(config), dtype="bfloat16")
    assert {value.dtype for value in half.values()} == {jnp.dtype("bfloat16")}
    _same(half, {name: value.astype("bfloat16") for name, value in exact.items()})


def test_every_tensor_is_read_once_and_each_stack_is_placed_before_the_next_is_read():
    config, events = _hugging_face(), []
    tensors = _made(config)
    source = convert.model_config(config, _shapes(tensors), _nothing)

    def read(name):
        events.append(name)
        return tensors[name]

    def place(name, value):
        assert isinstance(value, np.ndarray)
        events.append(("placed", name))
        return name

    params = convert.convert(_shapes(tensors), read, source.model, place=place)
    assert params == {name: name for name in params}
    assert sorted(event for event in events if isinstance(event, str)) == sorted(tensors)
    at = events.index(("placed", "gate"))
    assert [event.split(".")[-2] for event in events[at - 3 : at]] == ["gate_proj"] * 3


LAYER = "model.layers.1."
Q1 = f"{LAYER}self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(Q1), "tensors missing: layers.1.self_attn.q_proj.weight$"),
        (lambda t: t.pop("lm_head.weight"), "tensors missing: lm_head.weight$"),
        (lambda t: t.pop("model.norm.weight"), "tensors missing: norm.weight$"),
        (lambda t: t.update({f"{LAYER}self_attn.o_proj.bias": np.ones(24)}), f"unknown: {LAYER}self_attn.o_proj.bias$"),
        (lambda t: t.update({f"{LAYER}self_attn.q_proj.bias": np.ones(24)}), f"unknown: {LAYER}self_attn.q_proj.bias$"),
        (lambda t: t.update({"model.layers.3.input_layernorm.weight": np.ones(24)}), "unknown: model.layers.3.input_layern"),
        (lambda t: t.update({"vision.weight": np.ones(24)}), "unknown: vision.weight$"),
        (lambda t: t.update({Q1.replace(".1.", "." + "1" * 5000 + "."): np.ones(1)}), "unknown: model.layers.111"),
        (
            lambda t: t.update({Q1.replace(".1.", ".01."): t[Q1]}),
            r"duplicate: model.layers.01.self_.* \(as model.layers.1.self",
        ),
        (lambda t: t.update({f"module.{Q1}": t[Q1]}), r"duplicate: module.model.layers.1.* \(as model.layers.1.self_attn.q"),
        (lambda t: t.update({Q1: t[Q1].T[:9]}), f"shape: {Q1} \\[9, 24\\] instead of \\[24, 24\\]$"),
        (
            lambda t: t.update({f"{LAYER}mlp.up_proj.weight": np.ones((24, 40))}),
            r"up_proj.weight \[24, 40\] instead of \[40, 24\]",
        ),
        (lambda t: (t.pop(Q1), t.update({"x": np.ones(1)})), "unknown: x; tensors missing: layers.1.self_attn.q_proj.weight$"),
        (lambda t: [t.pop(n) for n in list(t) if ".2." in n], "missing: layers.2.*, .* and 1 more$"),
    ],
)
def test_tensors_that_do_not_fit_are_named_before_anything_is_read(damage, message):
    config = _hugging_face(tie_word_embeddings=False)
    tensors = _made(config)
    source = convert.model_config(config, _shapes(tensors), _nothing)
    damage(tensors)
    with pytest.raises(GcjaxError, match=f"the checkpoint does not fit the model; .*{message}"):
        convert.convert(_shapes(tensors), _nothing, source.model)


@given(data=st.data())
def test_any_tensor_left_out_doubled_or_reshaped_is_the_one_that_is_named(data):
    config = _hugging_face(data.draw(st.sampled_from(["llama", "qwen2", "qwen3"])), tie_word_embeddings=False)
    shapes = _shapes(_made(config))
    source = convert.model_config(config, shapes, _nothing)
    name = data.draw(st.sampled_from(sorted(shapes)))
    damage = data.draw(st.sampled_from(["missing", "duplicate", "of the wrong shape", "unknown"]))
    if damage == "missing":
        del shapes[name]
    elif damage == "duplicate":
        shapes[f"module.{name}"] = shapes[name]
    elif damage == "unknown":
        shapes[f"{name}_scale"] = shapes[name]
    else:
        shapes[name] = (*shapes[name][:-1], shapes[name][-1] + 1)
    with pytest.raises(GcjaxError) as caught:
        convert.convert(shapes, _nothing, source.model)
    assert re.findall("tensors (.*?):", str(caught.value)) == [damage]
    assert name.removeprefix("model.") in str(caught.value)


def test_harmless_extras_are_ignored():
    config = _hugging_face(tie_word_embeddings=True)
    tensors = _made(config)
    expected = _convert(config, tensors)
    extras = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(3) for i in range(3)}
    extras |= {"model.rotary_emb.inv_freq": np.ones(3), "lm_head.weight": tensors["model.embed_tokens.weight"]}
    _same(_convert(config, tensors | extras), expected)
    _same(_convert(config, tensors | extras, dtype="bfloat16"), _convert(config, tensors, dtype="bfloat16"))


def test_a_head_beside_a_tied_embedding_must_equal_it():
    config = _hugging_face(tie_word_embeddings=True)
    tensors = _made(config)
    head = tensors["model.embed_tokens.weight"].copy()
    head[-1, -1] += 1
    with pytest.raises(GcjaxError, match=r"lm_head.weight differs from model.embed_tokens.weight, though .* tied"):
        _convert(config, tensors | {"lm_head.weight": head})
    with pytest.raises(GcjaxError, match=r"unknown: lm_head.weight"):
        _convert(config, tensors | {"lm_head.weight": head[:-1]})


def test_what_is_read_must_be_what_was_announced():
    config = _hugging_face()
    tensors = _made(config)
    source = convert.model_config(config, _shapes(tensors), _nothing)
    for wrong in (np.ones((1, 24), np.float32), np.ones((24, 24), np.int8)):
        with pytest.raises(GcjaxError, match=f"{Q1} was read as {wrong.dtype}"):
            convert.convert(_shapes(tensors), lambda n, w=wrong: w if n == Q1 else tensors[n], source.model)
    with pytest.raises(GcjaxError, match="float32 or bfloat16, not 'int8'"):
        _convert(config, tensors, dtype="int8")
    with pytest.raises(GcjaxError, match="format='gguff' does not exist; did you mean 'gguf'"):
        _convert(config, tensors, format="gguff")


def _model_section(config, tensors=None):
    return convert.model_config(
        config, _shapes(_made(SIZES | {"model_type": "llama"}) if tensors is None else tensors), _nothing
    )


def test_missing_fields_have_the_safe_defaults():
    config = _hugging_face()
    for field in ("num_key_value_heads", "rms_norm_eps", "initializer_range", "max_position_embeddings"):
        del config[field]
    model = _model_section(config | {"rope_scaling": None, "head_dim": None}).model
    assert (model.key_value_heads, model.head_dim, model.norm_eps, model.rope_theta) == (4, 6, 1e-6, 10000.0)
    assert (model.init_std, model.rope_scaling.kind, model.dtype, model.activation) == (0.02, "none", "float32", "silu")
    assert (model.attention, model.rope, model.value_activation, model.max_length) == ("softmax", True, "none", 0)
    assert (model.qkv_bias, model.qk_norm, model.tied, model.residual, model.norm) == (False, False, False, True, "rmsnorm")
    assert _model_section({**config, "model_type": "qwen3"}).model.head_dim == 128


def test_tied_or_not_is_told_by_the_config_or_else_by_the_tensors():
    config = _hugging_face()
    tensors = _made(config)
    headless = {name: value for name, value in tensors.items() if name != "lm_head.weight"}
    assert not _model_section(config, tensors).model.tied
    assert _model_section(config, headless).model.tied
    assert _model_section(config | {"tie_word_embeddings": True}, tensors).model.tied
    assert not _model_section(config | {"tie_word_embeddings": False}, headless).model.tied


def test_old_and_new_spellings_of_the_rotary_scaling_and_dtype_mean_the_same():
    new = _hugging_face("llama 3", dtype="bfloat16")
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    old = {name: value for name, value in new.items() if name not in ("rope_parameters", "dtype")}
    old |= {"rope_scaling": scaling, "rope_theta": 500.0, "torch_dtype": "bfloat16"}
    oldest = old | {"rope_scaling": {"type" if name == "rope_type" else name: value for name, value in scaling.items()}}
    first = _model_section(new).model
    assert first.rope_scaling.to_dict() == {
        "kind": "llama3",
        "factors": (),
        **{n: v for n, v in scaling.items() if n != "rope_type"},
    }
    assert first.dtype == "bfloat16"
    assert _model_section(old).model == first == _model_section(oldest).model
    del oldest["rope_scaling"]["original_max_position_embeddings"]
    assert _model_section(oldest).model.rope_scaling.original_max_position_embeddings == 128


def test_the_longest_sequence_is_that_of_the_checkpoint_unless_linear_scaling_makes_it_ambiguous():
    for family in FAMILIES:
        assert _model_section(_hugging_face(family)).model.max_length == (0 if family == "llama, linear" else 128)
    metadata, renamed = _gguf(_hugging_face(), _made(_hugging_face()))
    for changes, expected in (({}, 128), ({"llama.context_length": None}, 0), ({"llama.rope.scale_linear": 4.0}, 0)):
        assert convert.model_config(metadata | changes, _shapes(renamed), _nothing).model.max_length == expected


def test_a_sliding_window_is_noted_where_it_is_used():
    notes = [
        _model_section(_hugging_face(family, **changes)).notes
        for family, changes in (("mistral", {}), ("mistral", {"sliding_window": None}), ("llama", {}),
                                ("qwen2", {"sliding_window": 64, "use_sliding_window": False}),
                                ("qwen2", {"sliding_window": 64, "use_sliding_window": True}))
    ]  # fmt: skip
    assert [len(note) for note in notes] == [1, 0, 0, 0, 1]
    assert "contexts of up to 64 tokens" in notes[0][0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gemma3_text"},
            "model_type='gemma3_text' is not a model that gcjax converts; there are: llama, mistral",
        ),
        ({"model_type": "qwen33"}, "did you mean 'qwen3'"),
        ({"model_type": "smollm3"}, "model_type='smollm3' is not"),
        ({"model_type": None}, "model_type=None is not"),
        ({"hidden_size": None}, "hidden_size=None where one positive number"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 where one positive number"),
        ({"attention_bias": True}, "bias on the attention output"),
        ({"mlp_bias": True}, "biases in the MLP"),
        ({"attn_logit_softcapping": 50.0}, "softcapping of attention logits"),
        ({"final_logit_softcapping": 30.0}, "softcapping of logits"),
        ({"num_local_experts": 8}, r"experts \(num_local_experts=8\)"),
        ({"num_experts": 64}, "experts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "for each type of layer"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rotary scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rotary scaling 'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rotary scaling 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rotary scaling 'linear' lacks factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_scaling": [1]}, "something of the wrong type"),
        ({"rms_norm_eps": "tiny"}, "something of the wrong type"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types linear_attention"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', .* tanh form"),
        ({"hidden_act": "xielu"}, "hidden_act='xielu'"),
    ],
)
def test_what_the_model_does_not_implement_is_refused(changes, message):
    with pytest.raises(GcjaxError, match=message):
        _model_section(_hugging_face(**changes))


# GGUF: names and metadata as llama.cpp's converter writes them, spelt out here.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def _permute(weights, n_head, n_head_kv):
    """llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute."""
    if n_head_kv is not None and n_head != n_head_kv:
        n_head = n_head_kv
    return weights.reshape(n_head, 2, weights.shape[0] // n_head // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def _gguf(config, tensors):
    """(metadata, tensors) of the GGUF that llama.cpp's converter makes of a Hugging Face checkpoint."""
    arch = "llama" if config["model_type"] == "mistral" else config["model_type"]
    heads, shared = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    metadata = {
        "general.architecture": arch,
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": shared,
        f"{arch}.attention.layer_norm_rms_epsilon": float(np.float32(config["rms_norm_eps"])),
        f"{arch}.rope.freq_base": (config.get("rope_parameters") or {}).get("rope_theta", 10000.0),
    }
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if config.get("head_dim"):
        metadata |= {f"{arch}.attention.key_length": head_dim, f"{arch}.attention.value_length": head_dim}
    if arch == "llama":
        metadata[f"{arch}.rope.dimension_count"] = head_dim
    renamed = {}
    for name, value in tensors.items():
        if arch == "llama" and re.search(r"\.(q|k)_proj\.", name):
            value = _permute(value, heads, heads if ".q_proj." in name else shared)
        module, _, kind = name.rpartition(".")
        layer = re.match(r"model\.layers\.(\d+)\.(.*)", module)
        to = f"blk.{layer[1]}.{GGUF_NAMES[layer[2]]}" if layer else GGUF_NAMES[module]
        renamed[f"{to}.{kind}"] = value
    return metadata, renamed


@pytest.mark.parametrize("family", ["llama", "llama, MHA, tied", "mistral", "qwen2", "qwen3"])
def test_a_gguf_gives_the_parameters_of_the_checkpoint_it_was_made_from(family):
    config = _hugging_face(family)
    tensors = _made(config)
    metadata, renamed = _gguf(config, tensors)
    source = convert.model_config(metadata, _shapes(renamed), _nothing)
    _same(_convert(metadata, renamed), _convert(config, tensors))
    expected = convert.model_config(config, _shapes(tensors), _nothing).model
    found = source.model.to_dict() | {"init_std": expected.init_std, "norm_eps": expected.norm_eps}
    assert found == expected.to_dict()
    assert source.model.norm_eps == pytest.approx(expected.norm_eps, rel=1e-6)
    permuted = family.startswith(("llama", "mistral"))
    assert source.format == ("gguf-permuted" if permuted else "gguf")
    wrong = _convert(metadata, renamed, format="gguf" if permuted else "gguf-permuted")
    assert (np.asarray(wrong["q"]) != np.asarray(_convert(config, tensors)["q"])).any()


def _llama3_factors(plain_W):
    """llama.cpp, LlamaModel.generate_extra_tensors."""
    low, high = 32 / LLAMA3["low_freq_factor"], 32 / LLAMA3["high_freq_factor"]
    factors = []
    for wavelength in 2 * np.pi / plain_W:
        if wavelength < high:
            factors.append(1)
        elif wavelength > low:
            factors.append(LLAMA3["factor"])
        else:
            smooth = (32 / wavelength - LLAMA3["low_freq_factor"]) / (LLAMA3["high_freq_factor"] - LLAMA3["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    return np.array(factors, np.float32)


def test_a_gguf_s_rotary_factors_are_the_scaling_of_llama_3():
    config = _hugging_face("llama 3")
    tensors = _made(config)
    metadata, renamed = _gguf(config, tensors)
    factors = _llama3_factors(500.0 ** (-np.arange(0, 8, 2) / 8))
    assert 1 in factors
    assert 8 in factors
    assert len(set(factors.tolist())) > 2
    renamed["rope_freqs.weight"] = factors
    source = convert.model_config(metadata, _shapes(renamed), renamed.__getitem__)
    plain = convert.model_config(config, _shapes(tensors), _nothing)
    frequencies = [llama.frequencies(8, model.rope_theta, model.rope_scaling) for model in (source.model, plain.model)]
    np.testing.assert_allclose(*frequencies, rtol=1e-6)
    _same(_convert(metadata, renamed), _convert(config, tensors))
    with pytest.raises(GcjaxError, match=r"unknown: rope_freqs.weight"):
        convert.convert(_shapes(renamed), _nothing, plain.model, format="gguf-permuted")
    with pytest.raises(GcjaxError, match=r"both rope_freqs.weight and llama.rope.scaling.type='linear'"):
        convert.model_config(metadata | {"llama.rope.scaling.type": "linear"}, _shapes(renamed), renamed.__getitem__)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma3"}, "general.architecture='gemma3' is not a model that gcjax converts"),
        ({"llama.block_count": None}, "llama.block_count=None where one positive number"),
        ({"llama.attention.head_count": [4, 4, 2]}, r"llama.attention.head_count=\[4, 4, 2\] where one positive"),
        ({"llama.attention.head_count_kv": [2, 1, 2]}, "head_count_kv differs between layers"),
        ({"llama.attention.value_length": 5}, "value_length differs"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count is not the head's 6"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.attn_logit_softcapping": 50.0}, "softcapping"),
        ({"llama.residual_scale": 0.2}, "scale of the residual stream"),
        ({"llama.rope.scaling.type": "yarn"}, "rotary scaling 'yarn'"),
    ],
)
def test_gguf_metadata_that_the_model_does_not_implement_is_refused(changes, message):
    config = _hugging_face()
    metadata, renamed = _gguf(config, _made(config))
    with pytest.raises(GcjaxError, match=message):
        convert.model_config(metadata | changes, _shapes(renamed), renamed.__getitem__)


def test_gguf_metadata_of_linear_scaling_and_a_window():
    config = _hugging_face()
    metadata, renamed = _gguf(config, _made(config))
    for changes in ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {"llama.rope.scale_linear": 4.0}):
        model = convert.model_config(metadata | changes, _shapes(renamed), _nothing).model
        assert (model.rope_scaling.kind, model.rope_scaling.factor) == ("linear", 4.0)
    assert (
        "up to 4096"
        in convert.model_config(metadata | {"llama.attention.sliding_window": 4096}, _shapes(renamed), _nothing).notes[0]
    )
    with pytest.raises(GcjaxError, match=r"no token_embd.weight"):
        convert.model_config(metadata, {}, _nothing)
