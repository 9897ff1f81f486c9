"""Names and shapes are those of `transformers`' own classes, and what a matrix does is what their layers compute."""

import contextlib
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcjax.errors import GcjaxError
from gcjax.pretrained.architectures import PROJECTIONS, Gain, Heads, Part, assemble, plan

L, D, F, H, N, HD, E = 3, 64, 96, 4, 2, 16, 4  # layers, width, MLP width, heads, key/value heads, head dimension, experts

SIZES = {"vocab_size": 50, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": H,
         "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GROUPED = {"num_key_value_heads": N}
WIDE = {**GROUPED, "head_dim": 24}
PLAIN = {}
MOE = {**GROUPED, "num_local_experts": E, "num_experts": E, "num_experts_per_tok": 2, "moe_intermediate_size": F,
       "shared_expert_intermediate_size": 40}  # fmt: skip
MLA = {"n_routed_experts": E, "num_experts_per_tok": 2, "moe_intermediate_size": F, "first_k_dense_replace": 1, "n_group": 1,
       "topk_group": 1, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": HD,
       "n_shared_experts": 1}  # fmt: skip
CASES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "smollm3", "granite", "stablelm", "starcoder2"), GROUPED),
    **dict.fromkeys(("phi3", "phi", "cohere", "cohere2"), GROUPED),
    **dict.fromkeys(("olmo", "olmo2", "olmo3"), GROUPED),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "qwen3", "glm4", "ministral"), WIDE),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"), MOE),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), MLA),
    **dict.fromkeys(("gpt2", "gpt_neox", "bert", "roberta", "electra"), PLAIN),
    "distilbert": {"hidden_dim": F},
}
ENCODERS = ("bert", "roberta", "electra", "distilbert")
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3")
FAMILY = {"gpt2": "gpt2", "gpt_neox": "gpt_neox", "gemma": "gemma", "gemma2": "gemma2", "olmo": "olmo",
          "gemma3_text": "gemma2", "olmo2": "olmo2", "olmo3": "olmo2", "glm4": "glm4", "phi": "phi",
          "cohere": "phi", "cohere2": "phi",
          **dict.fromkeys(ENCODERS, "bert")}  # fmt: skip


def build(kind, **changes):
    """A tiny model: gains away from their special values, no bias; and its config as config.json would hold it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **CASES[kind], **changes})
    torch.manual_seed(0)
    auto = transformers.AutoModelForMaskedLM if kind in ENCODERS else transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            tensor.zero_()
        elif tensor.ndim == 1:
            tensor.uniform_(0.3, 2.5)
        else:
            tensor.normal_(std=0.05)
    return model, config.to_dict()


def tensors(model):
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def planned(weights, config, **options):
    return plan({name: tuple(w.shape) for name, w in weights.items()}, config, **options)


def stacks(weights, found):
    """{projection: {layer: W[out, in]}}"""
    result = {}
    for m in found.matrices:
        w = assemble(m, weights.__getitem__)
        assert w.shape == m.shape
        assert w.dtype == np.float32
        assert w.flags.c_contiguous
        result.setdefault(m.projection, {})[m.layer] = w
    return result


def notes(found):
    return "\n".join(found.notes)


def blocks(model):
    """The layers, by what they are: the list of as many modules as the model is deep."""
    return next(m for m in model.modules() if type(m).__name__ == "ModuleList" and len(m) == L)


def slots(kind, block):
    """{projection: view of the parameter in which `W[out, in]` lies}, by the model's code: up to a reshape."""
    if kind == "gpt2":
        named = block.attn.c_attn.weight.T.chunk(3)
        return {**dict(zip("qkv", named)), "o": block.attn.c_proj.weight.T,
                "up": block.mlp.c_fc.weight.T, "down": block.mlp.c_proj.weight.T}  # fmt: skip
    if kind == "gpt_neox":
        qkv = block.attention.query_key_value.weight.view(H, 3, HD, D)
        return {**{p: qkv[:, i] for i, p in enumerate("qkv")}, "o": block.attention.dense.weight,
                "up": block.mlp.dense_h_to_4h.weight, "down": block.mlp.dense_4h_to_h.weight}  # fmt: skip
    if kind == "distilbert":
        named = block.attention.q_lin, block.attention.k_lin, block.attention.v_lin, block.attention.out_lin
        return {p: m.weight for p, m in zip(("q", "k", "v", "o", "up", "down"), (*named, block.ffn.lin1, block.ffn.lin2))}
    if kind in ENCODERS:
        one = block.attention.self
        named = one.query, one.key, one.value, block.attention.output.dense, block.intermediate.dense, block.output.dense
        return {p: m.weight for p, m in zip(("q", "k", "v", "o", "up", "down"), named)}
    attention, mlp, result = block.self_attn, block.mlp, {}
    if hasattr(attention, "qkv_proj"):
        result.update(zip("qkv", attention.qkv_proj.weight.split([H * HD, N * HD, N * HD])))
    elif getattr(attention, "q_proj", None) is not None:
        result.update({p: getattr(attention, f"{p}_proj").weight for p in "qkv"})
    result["o"] = (attention.o_proj if hasattr(attention, "o_proj") else attention.dense).weight
    if hasattr(mlp, "experts"):
        gate, up = mlp.experts.gate_up_proj.chunk(2, dim=1)
        return result | {"gate": gate, "up": up, "down": mlp.experts.down_proj.transpose(0, 1)}
    if hasattr(mlp, "gate_up_proj"):
        result.update(zip(("gate", "up"), mlp.gate_up_proj.weight.chunk(2)))
    for projection, name in (("gate", "gate_proj"), ("up", "up_proj"), ("up", "c_fc"), ("up", "fc1"), ("down", "down_proj"),
                             ("down", "c_proj"), ("down", "fc2")):  # fmt: skip
        if hasattr(mlp, name):
            result[projection] = getattr(mlp, name).weight
    return result


def matrix_of(view):
    """The view as `W[out, in]`: the input dimension is the last, or the last two where experts are side by side."""
    return view.reshape(len(view), -1) if view.ndim == 3 and len(view) == D else view.reshape(-1, view.shape[-1])


SPACE = {**dict.fromkeys(PROJECTIONS, "input"), "o": "output", "down": "output"}


def plant(model, kind, seed=0):
    """Into every layer, every projection: noise, and a direction that all layers share in its space, in the other apart."""
    torch, rng = pytest.importorskip("torch"), np.random.default_rng(seed)
    shared, planted = {}, {}
    for layer, block in enumerate(blocks(model)):
        for projection, view in slots(kind, block).items():
            out, into = matrix_of(view).shape
            u, v = rng.standard_normal(out), rng.standard_normal(into)
            key = (projection, out, into)  # of another shape: another stack
            if SPACE[projection] == "input":
                v = shared.setdefault(key, v)
            else:
                u = shared.setdefault(key, u)
            w = 0.02 * rng.standard_normal((out, into)) + 10 * np.outer(u / np.linalg.norm(u), v / np.linalg.norm(v))
            planted[projection, layer] = w.astype(np.float32)
            view.copy_(torch.from_numpy(planted[projection, layer]).reshape(view.shape))
    return planted


@pytest.mark.parametrize("kind", list(CASES))
def test_what_is_planted_in_a_model_is_found_again(kind):
    model, config = build(kind)
    planted = plant(model, kind)
    weights = tensors(model)
    found = planned(weights, config)
    dense_first = kind.startswith("deepseek")  # one dense layer before those with experts: of another shape
    expected = {key for key in planted if not (dense_first and key[1] == 0 and key[0] != "o")}
    assert {(m.projection, m.layer) for m in found.matrices} == expected
    assert found.family == FAMILY.get(kind, "llama")
    assert found.layers == tuple(range(L))
    assert found.experts == (E if kind in EXPERTS else 0)
    for projection, layers in stacks(weights, found).items():
        triplets = []
        for layer, w in layers.items():
            np.testing.assert_array_equal(w, planted[projection, layer])
            u, _, vt = np.linalg.svd(w, full_matrices=False)
            triplets.append((u[:, 0], vt[0]))
        for (u, v), (u2, v2) in itertools.combinations(triplets, 2):
            cosines = {"input": abs(v @ v2), "output": abs(u @ u2)}
            assert cosines.pop(SPACE[projection]) > 0.99, projection
            assert cosines.popitem()[1] < 0.6, projection


class Spy:
    """Runs a model on one token at position 0, where rotary embeddings do nothing, and keeps what each module saw."""

    def __init__(self, model):
        torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
        self.model, self.attention, self.seen = model, [], {}

        def attend(module, query, key, value, *_, **__):
            mixed = torch.randn(1, 1, query.shape[1], value.shape[3])
            self.attention.append([flat(x) for x in (query, key, value, mixed)])
            return mixed, None

        def keep(name, module, args, options, result):
            inputs = [*args, *options.values()]
            outputs = result if isinstance(result, tuple) else (result,)
            self.seen[name] = tuple(next((flat(x) for x in xs if torch.is_tensor(x)), None) for xs in (inputs, outputs))

        transformers.AttentionInterface.register("spy", attend)
        transformers.AttentionMaskInterface.register("spy", lambda *_, **__: None)
        model.set_attn_implementation("spy")
        for block in blocks(model):  # per-head norms act behind the matrices
            for name in ("q_norm", "k_norm"):
                if hasattr(getattr(block, "self_attn", None), name):
                    setattr(block.self_attn, name, torch.nn.Identity())
        for name, module in model.named_modules():
            module.register_forward_hook(functools.partial(keep, name), with_kwargs=True)
        model(torch.tensor([[7]]))

    def around(self, tensor):
        """Input and output of the module that holds the tensor."""
        return self.seen[tensor.removesuffix(".weight").removesuffix(".gate_up_proj" * (".experts." in tensor))]


def flat(x):
    return x.detach().numpy().ravel()


def close(x, y):
    return x is not None and y is not None and x.shape == y.shape and np.allclose(x, y, rtol=1e-4, atol=1e-5)


def activation(config):
    name = next(config[k] for k in ("hidden_activation", "hidden_act", "activation_function", "activation") if config.get(k))
    function = pytest.importorskip("transformers").activations.ACT2FN[name]
    return lambda x: flat(function(pytest.importorskip("torch").from_numpy(np.ascontiguousarray(x))))


@pytest.mark.parametrize("kind", list(CASES))
def test_matrices_compute_what_the_layers_do(kind):
    model, config = build(kind)
    weights = tensors(model)
    found = planned(weights, config)
    spy, act, w = Spy(model), activation(config), stacks(weights, found)
    where = {(m.projection, m.layer): m.parts[0].tensor for m in found.matrices}
    for layer, (*attended, mixed) in enumerate(spy.attention):
        for projection, rows in zip("qkv", attended):
            if projection in w:
                assert close(w[projection][layer] @ spy.around(where[projection, layer])[0], rows), projection
        assert close(w["o"][layer] @ mixed, spy.around(where["o", layer])[1])
    for layer, down in w["down"].items():
        up, gate = w["up"][layer], w["gate"][layer] if "gate" in w else None
        if not found.experts:
            x, (z, y) = spy.around(where["up", layer])[0], spy.around(where["down", layer])
            assert close(act(up @ x) if gate is None else act(gate @ x) * (up @ x), z)
            assert close(down @ z, y)
            continue
        torch, experts = pytest.importorskip("torch"), blocks(model)[layer].mlp.experts
        x, one = np.random.default_rng(layer).standard_normal(D).astype(np.float32), slice(None)
        for e in range(E):
            rows = slice(e * F, (e + 1) * F)
            y = experts(torch.from_numpy(x)[None], torch.tensor([[e]]), torch.ones(1, 1))
            assert close(down[one, rows] @ (act(gate[rows] @ x) * (up[rows] @ x)), flat(y))


@pytest.mark.parametrize("kind", [kind for kind in CASES if kind not in ENCODERS])
def test_gains_are_those_of_the_norms_beside_the_matrices(kind):
    torch = pytest.importorskip("torch")
    model, config = build(kind)
    found = planned(tensors(model), config)
    spy, modules = Spy(model), dict(model.named_modules())
    learned = {n for n, m in modules.items() if getattr(m, "weight", None) is not None and m.weight.ndim == 1}
    for m in found.matrices:
        if ".experts." in m.parts[0].tensor and m.projection == "down":
            continue  # one module with gate and up: it has no input of its own
        x, y = spy.around(m.parts[0].tensor)
        before = {name for name in learned if close(spy.seen[name][1], x)}
        behind = {name for name in learned if close(spy.seen[name][0], y)}
        gain = {m.gain.tensor.removesuffix(".weight")} if m.gain else set()
        assert (before, behind) == ((set(), gain) if m.projection in ("o", "down") else (gain, set())), m
        assert m.gain is None or m.gain.space == ("output" if m.projection in ("o", "down") else "input")
        for name in gain:
            norm = modules[name]
            norm.weight.fill_(1 - m.gain.offset)  # a gain of 1 leaves what is normalized
            power = norm.forward(torch.randn(5, D)).square().mean(-1)
            torch.testing.assert_close(power, torch.ones(5), rtol=1e-3, atol=1e-3)


def test_encoders_have_norms_behind_the_sum_and_so_no_gain():
    for kind in ENCODERS:
        model, config = build(kind)
        assert all(m.gain is None for m in planned(tensors(model), config).matrices)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "phi3", *EXPERTS])
def test_a_saved_checkpoint_is_read_like_the_model_that_wrote_it(kind, tmp_path):
    """Experts are packed in memory, one by one under other names in the files of this version of `transformers`."""
    safetensors = pytest.importorskip("safetensors.numpy")
    model, config = build(kind)
    model.save_pretrained(tmp_path)
    saved = {name: w for path in tmp_path.glob("*.safetensors") for name, w in safetensors.load_file(path).items()}
    memory, disk = (planned(weights, config) for weights in (tensors(model), saved))
    assert disk[:2] == memory[:2]
    assert [m[:3] + m[4:] for m in disk.matrices] == [m[:3] + m[4:] for m in memory.matrices]
    expected = stacks(tensors(model), memory)
    for projection, layers in stacks(saved, disk).items():
        for layer, w in layers.items():
            np.testing.assert_array_equal(w, expected[projection][layer])
    if kind in EXPERTS:
        assert len({part.tensor for m in disk.matrices if m.projection == "up" for part in m.parts}) > L * (E - 1) - E


GGUF = {"llama": "LLAMA", "mixtral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "gemma": "GEMMA", "gemma2": "GEMMA2",
        "gemma3_text": "GEMMA3", "phi3": "PHI3", "olmo": "OLMO", "olmo2": "OLMO2", "smollm3": "SMOLLM3", "gpt2": "GPT2",
        "gpt_neox": "GPTNEOX", "bert": "BERT", "qwen2_moe": "QWEN2MOE", "qwen3_moe": "QWEN3MOE", "deepseek_v3": "DEEPSEEK2",
        "stablelm": "STABLELM", "starcoder2": "STARCODER2", "granite": "GRANITE", "olmoe": "OLMOE"}  # fmt: skip
PERMUTED = ("llama", "mixtral", "olmo", "smollm3", "granite")


def as_gguf(model, kind, config):
    """The model's tensors under the names of the gguf package, converted as llama.cpp's converter does; its metadata."""
    gguf = pytest.importorskip("gguf")
    arch = gguf.MODEL_ARCH[GGUF[kind]]
    names, label, result = gguf.get_tensor_name_map(arch, L), gguf.MODEL_ARCH_NAMES[arch], {}
    for name, w in tensors(model).items():
        if kind == "gpt2" and w.ndim == 2 and ".h." in name:
            w = w.T
        if kind == "gpt_neox" and name.endswith("query_key_value.weight"):
            w = w.reshape(H, 3, HD, D).swapaxes(0, 1).reshape(3 * D, D)
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            w = w + 1
        for ending, heads in (("q_proj.weight", H), ("k_proj.weight", N)):
            if kind in PERMUTED and name.endswith(ending):
                w = w.reshape(heads, 2, HD // 2, D).swapaxes(1, 2).reshape(w.shape)
        pieces = {name: w}
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            pieces = {f"{base}gate_proj": w[:, :F], f"{base}up_proj": w[:, F:]}
        for piece, values in pieces.items():
            target = names.get_name(piece.removeprefix("bert."), try_suffixes=(".weight", ".bias"))
            if target:  # else part of the embedding or the output, which has no name in this architecture
                result[target if target.endswith(("weight", "bias")) else f"{target}.weight"] = values
    counts = {"head_count": H, "head_count_kv": config.get("num_key_value_heads") or H}
    if config.get("head_dim") and kind != "deepseek_v3":
        counts["key_length"] = np.uint32(config["head_dim"])
    return result, {"general.architecture": label, **{f"{label}.attention.{key}": n for key, n in counts.items()}}


@pytest.mark.parametrize("kind", list(GGUF))
def test_gguf_names_lead_to_the_same_matrices_heads_and_gains(kind):
    model, config = build(kind)
    weights, (stored, metadata) = tensors(model), as_gguf(model, kind, config)
    here, there = planned(weights, config), planned(stored, metadata, format="gguf")
    assert (there.layers, there.heads, there.experts) == (here.layers, here.heads, here.experts)
    assert there.family == here.family
    assert there.rotary_permuted == (kind in PERMUTED)
    assert not here.rotary_permuted
    expected = stacks(weights, here)
    assert [m[:3] for m in there.matrices] == [m[:3] for m in here.matrices]
    for one, other in zip(here.matrices, there.matrices):
        w = assemble(other, stored.__getitem__)
        if there.rotary_permuted and one.projection in ("q", "k"):
            heads = H if one.projection == "q" else N
            w = w.reshape(heads, HD // 2, 2, D).swapaxes(1, 2).reshape(w.shape)
        np.testing.assert_array_equal(w, expected[one.projection][one.layer])
        assert (one.gain is None) == (other.gain is None)
        if one.gain and other.gain:
            assert other.gain.space == one.gain.space
            assert other.gain.offset == 0
            np.testing.assert_array_equal(stored[other.gain.tensor], weights[one.gain.tensor] + one.gain.offset)


@pytest.mark.parametrize(("kind", "family"), [("gemma3", "gemma2"), ("qwen2_5_vl", "llama"), ("llava", "llama")])
def test_towers_of_multimodal_models_are_left_out(kind, family):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    text = SIZES | GROUPED | ({"head_dim": 24} if kind == "gemma3" else {})
    if kind == "qwen2_5_vl":  # its multimodal rotary embedding needs sections
        text["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    config = transformers.AutoConfig.for_model(kind, text_config=text | ({"model_type": "llama"} if kind == "llava" else {}))
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    found = plan({name: tuple(w.shape) for name, w in model.state_dict().items()}, config.to_dict())
    assert (found.family, found.layers) == (family, tuple(range(L)))
    assert {m.projection for m in found.matrices} == set(PROJECTIONS)
    assert all(m.gain for m in found.matrices if m.projection not in ("o", "down"))
    assert "vision and audio towers are left out" in notes(found)


# Without torch: what names and shapes alone decide.

SHAPES = {
    "self_attn.q_proj": (H * HD, D),
    "self_attn.k_proj": (N * HD, D),
    "self_attn.v_proj": (N * HD, D),
    "self_attn.o_proj": (D, H * HD),
    "mlp.gate_proj": (F, D),
    "mlp.up_proj": (F, D),
    "mlp.down_proj": (D, F),
    "input_layernorm": (D,),
    "post_attention_layernorm": (D,),
}
LLAMA = {"model_type": "llama", "num_attention_heads": H, "num_key_value_heads": N, "hidden_size": D}


def llama(layers, prefix="model.", without=()):
    """Names and shapes of a Llama checkpoint."""
    shapes = {f"{prefix}layers.{n}.{t}.weight": s for n in layers for t, s in SHAPES.items() if (n, t) not in without}
    return {"model.embed_tokens.weight": (50, D), **shapes, "lm_head.weight": (50, D)}


def stripped(found, prefix):
    """The plan with the prefix of its tensors taken off."""
    return found._replace(
        matrices=tuple(
            m._replace(
                parts=tuple(p._replace(tensor=p.tensor.removeprefix(prefix)) for p in m.parts),
                gain=m.gain and m.gain._replace(tensor=m.gain.tensor.removeprefix(prefix)),
            )
            for m in found.matrices
        )
    )


def test_a_plan_is_by_projection_then_by_number_of_the_layer():
    shapes = llama(range(12))
    found = plan(dict(sorted(shapes.items())), LLAMA)
    assert [(m.projection, m.layer) for m in found.matrices] == list(itertools.product(PROJECTIONS, range(12)))
    assert found == plan(dict(reversed(shapes.items())), LLAMA)
    assert found.heads == Heads(H, N, HD)
    assert (found.family, found.experts, found.notes, found.rotary_permuted) == ("llama", 0, (), False)
    q = found.matrices[10]
    assert q.parts == (Part("model.layers.10.self_attn.q_proj.weight", None, False, None),)
    assert q.gain == Gain("model.layers.10.input_layernorm.weight", "input", 0.0)


@given(st.lists(st.sampled_from(["model.", "language_model.", "transformer.", "module.", "base_model.model.", "_orig_mod."])))
def test_prefixes_of_wrappers_change_nothing(prefixes):
    prefix = "".join(prefixes)
    assert stripped(plan(llama(range(3), prefix), LLAMA), prefix) == stripped(plan(llama(range(3)), LLAMA), "model.")


def test_a_compiled_layer_is_found_under_its_wrapper():
    shapes = {name.replace("self_attn.", "_orig_mod.self_attn."): shape for name, shape in llama(range(2)).items()}
    assert [m[:3] for m in plan(shapes, LLAMA).matrices] == [m[:3] for m in plan(llama(range(2)), LLAMA).matrices]


def test_gaps_are_told_with_the_pairs_that_span_them():
    found = plan(llama([0, 1, 4, 5, 9]), LLAMA)
    assert found.layers == (0, 1, 4, 5, 9)
    assert found.notes == ("layers of q, k, v, o, gate, up, down are absent: pairs 1-4, 5-9 span a gap",)
    found = plan(llama(range(4), without={(2, "self_attn.o_proj")}), LLAMA)
    assert found.notes == ("layers of o are absent: pairs 1-3 span a gap",)


@pytest.mark.parametrize(
    ("extra", "names"),
    [
        (llama([1], "transformer."), r"model\.layers\.1\..+ and transformer\.layers\.1\."),
        ({"model.layers.1.mlp.gate_up_proj.weight": (2 * F, D)}, r"gate_proj\.weight and .+gate_up_proj\.weight are both gate"),
        ({"model.layers.1.mlp.experts.0.up_proj.weight": (F, D)}, r"up_proj\.weight and .+experts\.0\.up_proj\.weight"),
        ({"model.layers.1.mlp.experts.down_proj": (E, D, F)}, r"down_proj\.weight and .+experts\.down_proj are both down"),
    ],
)
def test_two_tensors_for_one_projection_are_refused_and_both_named(extra, names):
    for shapes in (llama(range(3)) | extra, extra | llama(range(3))):
        with pytest.raises(GcjaxError, match="layer 1") as caught:
            plan(shapes, LLAMA)
        tensors = sorted(str(caught.value).split(" are both")[0].split(" and "))
        assert len(set(tensors)) == 2
        assert set(tensors) <= shapes.keys()
    with pytest.raises(GcjaxError, match=names):
        plan(llama(range(3)) | extra, LLAMA)


def test_a_projection_is_a_stack_of_one_shape_and_the_rest_is_told():
    wide = {name: (2 * F, D) for name in llama([1, 4]) if "up_proj" in name}
    found = plan(llama(range(6)) | wide, LLAMA)
    assert [m.layer for m in found.matrices if m.projection == "up"] == [0, 2, 3, 5]
    assert "up is (96, 64) in layers 0, 2, 3, 5; left out with another shape: layers 1, 4" in found.notes
    assert "layers of up are absent: pairs 0-2, 3-5 span a gap" in found.notes


def test_the_order_of_experts_moves_no_singular_vector_that_the_stream_sees():
    rng, weights = np.random.default_rng(0), {}
    for e in range(12):
        for name, shape in (("w1", (F, D)), ("w2", (D, F)), ("w3", (F, D))):
            weights[f"model.layers.0.block_sparse_moe.experts.{e}.{name}.weight"] = rng.standard_normal(shape).astype(
                np.float32
            )
    weights["model.layers.0.post_attention_layernorm.weight"] = np.ones(D, np.float32)
    order = rng.permutation(12)
    shuffled = {
        name.replace(f"experts.{name.split('.')[5]}.", f"experts.{order[int(name.split('.')[5])]}.")
        if "experts" in name
        else name: w
        for name, w in weights.items()
    }
    one, other = (
        stacks(tensors, planned(tensors, {"model_type": "mixtral"})) for tensors in (weights, dict(sorted(shuffled.items())))
    )
    for projection, shape in (("gate", (12 * F, D)), ("up", (12 * F, D)), ("down", (D, 12 * F))):
        w, w2 = one[projection][0], other[projection][0]
        assert w.shape == w2.shape == shape
        assert (w != w2).any()
        grams = [m @ m.T if projection == "down" else m.T @ m for m in (w, w2)]
        np.testing.assert_allclose(grams[0], grams[1], rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(one["gate"][0][2 * F : 3 * F], weights["model.layers.0.block_sparse_moe.experts.2.w1.weight"])
    np.testing.assert_array_equal(
        one["down"][0][:, 2 * F : 3 * F], weights["model.layers.0.block_sparse_moe.experts.2.w2.weight"]
    )


def test_packed_experts_of_a_type_outside_the_table_are_not_taken_for_granted():
    """GPT-OSS, Llama 4 and others store them as [E, in, out], under the same names."""
    shapes = llama(range(2), without={(n, f"mlp.{p}_proj") for n in range(2) for p in ("gate", "up", "down")})
    shapes |= {f"model.layers.{n}.mlp.experts.gate_up_proj": (E, D, 2 * F) for n in range(2)}
    found = plan(shapes, {"model_type": "gpt_oss", "num_attention_heads": H, "num_key_value_heads": N})
    assert {m.projection for m in found.matrices} == set("qkvo")
    assert all(m.gain is None for m in found.matrices)
    assert found.family == "gpt_oss"
    assert "'gpt_oss' is not in the table" in notes(found)
    assert "mlp.experts.gate_up_proj" in notes(found)


def test_without_a_model_type_names_decide():
    found = plan(llama(range(2)), {})
    assert found.family == "llama"
    assert found.heads is None
    assert "names no model type: taken for llama" in notes(found)
    assert "no usable num_attention_heads: heads are unknown" in notes(found)
    for kind in ("gemma2", "olmo2", "olmo", "gpt2", "bert"):
        model, _ = build(kind)
        assert planned(tensors(model), {}).family == FAMILY[kind]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_key_value_heads": None}, None),
        ({"num_attention_heads": 3}, None),
        ({"num_key_value_heads": N, "head_dim": HD}, Heads(H, N, HD)),
        ({"head_dim": None}, Heads(H, N, HD)),
        ({"num_attention_heads": "many"}, None),
    ],
)
def test_head_counts_are_checked_against_the_shapes_and_not_needed_where_nothing_is_fused(changes, expected):
    found = plan(llama(range(2)), LLAMA | changes)
    assert found.heads == expected
    assert len(found.matrices) == 2 * len(PROJECTIONS)
    assert ("heads are unknown" in notes(found)) == (expected is None)


def test_a_text_config_is_looked_into():
    config = {"model_type": "llava", "num_attention_heads": 99, "text_config": LLAMA, "vision_config": {}}
    assert plan(llama(range(2), "language_model.model."), config).heads == Heads(H, N, HD)


def two(tensor, *shape):
    return {f"model.layers.{n}.{tensor}.weight": shape for n in range(2)}


PHI3 = {"model_type": "phi3", "num_attention_heads": H}


@pytest.mark.parametrize(
    ("shapes", "config", "message"),
    [
        (two("self_attn.qkv_proj", 128, D), PHI3, "128 rows, where num_attention_heads=4 of the config make 192"),
        (two("self_attn.qkv_proj", 128, D), {**PHI3, "num_key_value_heads": 1}, "heads=4, num_key_value_heads=1 .* make 96"),
        (two("self_attn.qkv_proj", 128, D), {"model_type": "phi3"}, "no usable num_attention_heads to split"),
        (two("self_attn.qkv_proj", 128, D), {**PHI3, "num_attention_heads": 0}, "no usable num_attention_heads to split"),
        (two("attention.query_key_value", 192, D), {"model_type": "gpt_neox"}, "no usable num_attention_heads to split"),
        (two("attention.query_key_value", 192, D), {"model_type": "gpt_neox", "num_attention_heads": 5}, "heads=5 .* make 180"),
        (two("attn.c_attn", D, 192), {"model_type": "gpt2", "n_head": 7}, "n_head=7 .* make 189"),
        (two("attn.c_attn", 192, D), {"model_type": "gpt2", "n_head": 4}, "64 rows"),
        (two("mlp.gate_up_proj", 7, D), {"model_type": "phi3"}, "7 rows, an odd number"),
        (two("mlp.experts.gate_up_proj", 8, D), {"model_type": "mixtral"}, r"\(8, 64\), but should be \[experts, out, in\]"),
        (two("mlp.experts.down_proj", 2**30, 1, 1), {"model_type": "mixtral"}, r"but should be \[experts, out, in\]"),
        (two("mlp.up_proj", F * D), LLAMA, "should be a matrix"),
        (two("mlp.up_proj", 0, D), LLAMA, "should be a matrix"),
        ({"blk.0.attn_qkv.weight": (128, D)}, {"general.architecture": "phi3"}, "no usable phi3.attention.head_count to split"),
        (
            {"layers.0.mlp.experts.0.up_proj.weight": (F, D), "layers.0.mlp.experts.1.up_proj.weight": (F, 32)},
            {"model_type": "mixtral"},
            "experts of one layer, but .* do not join",
        ),
    ],
)
def test_what_cannot_be_split_or_joined_is_refused(shapes, config, message):
    with pytest.raises(GcjaxError, match=message):
        plan(shapes, config, "gguf" if "general.architecture" in config else "safetensors")


def test_fused_thirds_need_no_head_count():
    found = plan(two("attn.c_attn", D, 3 * D), {"model_type": "gpt2"})
    assert [(m.projection, m.shape) for m in found.matrices[::2]] == [(p, (D, D)) for p in "qkv"]
    assert found.matrices[2].parts[0].rows == (slice(D, 2 * D),)


def test_head_counts_for_every_layer_are_one_if_they_agree():
    shapes = {f"blk.{n}.attn_{p}.weight": SHAPES[f"self_attn.{p}_proj"] for n in range(2) for p in "qk"}
    for counts, heads in (([N, N], Heads(H, N, HD)), (np.array([N, N]), Heads(H, N, HD)), ([N, 1], None), ([], None)):
        config = {"general.architecture": "llama", "llama.attention.head_count": H, "llama.attention.head_count_kv": counts}
        assert plan(shapes, config, "gguf").heads == heads


def test_layers_that_predict_further_tokens_are_no_part_of_the_stack():
    config = {**LLAMA, "model_type": "deepseek_v3", "num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    found = plan(llama(range(4)), config)
    assert found.layers == (0, 1, 2)
    assert found.notes == ("layers from 3 on predict further tokens and are left out",)
    assert plan(llama(range(4)), {**LLAMA, "num_hidden_layers": 3}).layers == (0, 1, 2, 3)


def test_norms_that_do_not_fit_are_no_gain():
    shapes = llama(range(3), without={(1, "input_layernorm")}) | {"model.layers.2.post_attention_layernorm.weight": (HD,)}
    found = plan(shapes, LLAMA)
    bare = {(m.projection, m.layer) for m in found.matrices if m.gain is None and m.projection not in ("o", "down")}
    assert bare == {("q", 1), ("k", 1), ("v", 1), ("gate", 2), ("up", 2)}
    assert "q has no norm gain that fits in layer 1" in found.notes


def test_other_architectures_are_stacks_by_pattern():
    shapes = {f"backbone.layers.{n}.mixer.{t}.weight": s for n in (0, 2, 10) for t, s in (("in_proj", (F, D)), ("out", (D, F)))}
    shapes |= {"backbone.layers.0.norm.weight": (D,), "backbone.embed.weight": (50, D), "backbone.layers.0.mixer.only": (3, D)}
    found = plan(dict(reversed(shapes.items())), {"model_type": "mamba"})
    assert found.family == "pattern"
    assert [(m.projection, m.layer, m.shape) for m in found.matrices] == [
        *(("backbone.layers.*.mixer.in_proj", n, (F, D)) for n in (0, 2, 10)),
        *(("backbone.layers.*.mixer.out", n, (D, F)) for n in (0, 2, 10)),
    ]
    assert "'mamba' has no names known here: stacks are matrices of one shape" in notes(found)
    assert all(m.gain is None and m.axis == 0 for m in found.matrices)
    x = np.ones((F, D), np.float32)
    assert assemble(found.matrices[0], {"backbone.layers.0.mixer.in_proj.weight": x}.__getitem__) is x


def test_a_pattern_counts_layers_and_not_what_a_layer_has_several_of():
    model = {f"encoder.block.{n}.layer.{i}.wi.weight": (F, D) for n in range(3) for i in range(5)}
    found = plan(model | {f"encoder.block.{n}.experts.{e}.w": (F, D) for n in range(3) for e in range(4)}, {})
    assert {m.projection for m in found.matrices} == {f"encoder.block.*.layer.{i}.wi" for i in range(5)}
    assert found.layers == (0, 1, 2)
    assert "experts are left out" in notes(found)


@pytest.mark.parametrize("shapes", [{}, {"a.0.w": (3, 3), "b.1.w": (3, 3)}, {"a.0.w": (3,), "a.1.w": (3,)}])
def test_without_any_stack_some_names_are_told(shapes):
    with pytest.raises(GcjaxError, match=rf"no layers .* {len(shapes)} tensors \({', '.join(shapes)}\)"):
        plan(shapes, {})


def test_an_unknown_format_is_refused():
    with pytest.raises(GcjaxError, match="did you mean 'gguf'"):
        plan(llama([0]), LLAMA, "ggfu")


names = st.lists(st.sampled_from(["model", "layers", "blk", "0", "01", "7", "9" * 5000, "\u0663", "self_attn", "q_proj", "mlp",
                                  "experts", "gate_up_proj", "attn_qkv", "", "weight"]), max_size=7).map(".".join)  # fmt: skip


@given(
    shapes=st.dictionaries(names, st.lists(st.integers(0, 2**40), max_size=4).map(tuple), max_size=8),
    kind=st.sampled_from([None, "llama", "phi3", "gpt_neox", "x", 3, ["llama"]]),
    heads=st.sampled_from([None, 0, 2, -1, "2", [], [[1]], {}, 2.5]),
    format=st.sampled_from(["safetensors", "gguf"]),
)
def test_no_names_shapes_or_settings_raise_anything_else(shapes, kind, heads, format):
    key = "general.architecture" if format == "gguf" else "model_type"
    config = {key: kind, "num_attention_heads": heads, f"{kind}.attention.head_count": heads, "text_config": heads}
    with contextlib.suppress(GcjaxError):
        assert plan(shapes, config, format).matrices


def test_assemble_copies_only_what_it_must_and_reads_each_tensor_once():
    rng = np.random.default_rng(1)
    w, half = rng.standard_normal((4, 3)).astype(np.float32), rng.standard_normal((4, 3)).astype(np.float16)
    packed, reads = rng.standard_normal((E, 6, 5)).astype(np.float32), []
    store = {"w": w, "half": half, "packed": packed, "columns": np.asfortranarray(w)}

    def read(name):
        reads.append(name)
        return store[name]

    def whole(name):
        return (
            plan({f"a.{n}.{name}": (4, 3) for n in range(2)}, {}).matrices[0]._replace(parts=(Part(name, None, False, None),))
        )

    assert assemble(whole("w"), read) is w
    for name in ("half", "columns"):
        got = assemble(whole(name), read)
        assert got.dtype == np.float32
        assert got.flags.c_contiguous
        np.testing.assert_array_equal(got, store[name])
    reads.clear()
    parts = tuple(Part("packed", e, False, (slice(4, 6), slice(0, 1))) for e in range(E))
    got = assemble(whole("w")._replace(shape=(3 * E, 5), parts=parts), read)
    np.testing.assert_array_equal(got, np.concatenate([x[[4, 5, 0]] for x in packed]))
    got = assemble(
        whole("w")._replace(
            shape=(3, 6 * E), parts=tuple(p._replace(transposed=True, rows=(slice(0, 3),)) for p in parts), axis=1
        ),
        read,
    )
    np.testing.assert_array_equal(got, np.concatenate([x.T[:3] for x in packed], axis=1))
    assert reads == ["packed", "packed"]
