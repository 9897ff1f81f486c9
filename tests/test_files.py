"""gcjax.pretrained.files: what other programs write is read bit for bit, and whatever is wrong is one sentence."""

import ast
import contextlib
import dataclasses
import json
import math
import os
import pickle
import re
import shutil
import struct
import tracemalloc
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gcjax.errors import GcjaxError
from gcjax.pretrained import files
from gcjax.pretrained.files import fingerprint, gguf_field, open_checkpoint

FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
FP8 = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
WHOLE = {"I8": np.int8, "U8": np.uint8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "U64": np.uint64, "BOOL": np.bool_}
QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "TQ1_0", "TQ2_0", "MXFP4")  # what the package can write
DECODED = (*(kind.name for kind in gguf.quants._type_traits), "F32", "F16")
KEEP = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
FUZZ = settings(KEEP, max_examples=max(100, settings().max_examples))


def safetensors_bytes(tensors, metadata=None):
    """Written out by hand: {name: (dtype, shape, bytes)}; the package's NumPy half writes no fp8."""
    header, data = {"__metadata__": metadata} if metadata else {}, b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += content
    return with_header(header, data)


def with_header(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def stored(dtype, array):
    return dtype, array.shape, array.tobytes()


def write(path, content):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(content)
    return path


def random_bytes(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def write_gguf(path, tensors, fields=(), **options):
    """{name: (type name, float32 array, or bytes of the type with one row each)}."""
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_block_count(2)
    for add, key, value in fields:
        getattr(writer, f"add_{add}")(key, value)
    for name, (kind, array) in tensors.items():
        raw = gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind]) if array.dtype == np.float32 else array
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sharded(folder, shards, weight_map=None):
    """{file: {tensor: array}}, with an index over all unless one is given."""
    for file, tensors in shards.items():
        write(folder / file, safetensors.numpy.save(tensors))
    weight_map = weight_map or {name: file for file, tensors in shards.items() for name in tensors}
    write(folder / "model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": weight_map}).encode())
    return folder


def assert_bits(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.flags.c_contiguous
    assert got.tobytes() == expected.tobytes()


def refused(path, *parts):
    """`path` is refused in one sentence that has all the parts."""
    with pytest.raises(GcjaxError) as caught:
        open_checkpoint(path)
    sentence = str(caught.value)
    assert all(part in sentence for part in parts), sentence
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 0, 3), (2, 3, 4)], ids=str)
def test_every_float_dtype_is_read_bit_for_bit(tmp_path, dtype, shape):
    kind = np.dtype(FLOATS[dtype])
    array = random_bytes(math.prod(shape) * kind.itemsize).view(kind).reshape(shape)  # NaN payloads and subnormals too
    write(tmp_path / "model.safetensors", safetensors.numpy.save({"other": random(3), "x": array}))
    tensor = open_checkpoint(tmp_path).tensors["x"]
    assert (tensor.name, tensor.shape, tensor.dtype) == ("x", shape, dtype)
    assert tensor.stop - tensor.start == array.nbytes
    with np.errstate(invalid="ignore"):
        assert_bits(tensor.read(), array.astype(np.float64 if dtype == "F64" else np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_what_torch_writes_is_read_as_torch_reads_it(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    weight = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    scale = {"w.weight_scale": torch.tensor(0.5)} if dtype.startswith("float8") else {}
    save_file({"w.weight": weight, **scale}, tmp_path / "model.safetensors")
    tensors = open_checkpoint(tmp_path).tensors
    assert list(tensors) == ["w.weight"]
    assert_bits(tensors["w.weight"].read(), (weight.float() * (0.5 if scale else 1.0)).numpy())


def slices(length):
    bound = st.none() | st.integers(-length - 2, length + 2)
    return st.builds(slice, bound, bound)


@KEEP
@given(st.data())
def test_rows_are_those_of_the_whole(tmp_path, data):
    dtype, kind = data.draw(st.sampled_from(list((FLOATS | FP8).items())))
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    array = random(*shape).astype(kind)
    content = {"x.weight": stored(dtype, array)}
    if dtype in FP8:
        content["x.weight_scale"] = stored("F32", random(shape[0]))
    path = write(tmp_path / "model.safetensors", safetensors_bytes(content))
    tensor, rows = open_checkpoint(path).tensors["x.weight"], data.draw(slices(shape[0]))
    assert_bits(tensor.read(rows), np.ascontiguousarray(tensor.read()[rows]))


def test_rows_with_a_step_or_of_a_scalar_are_a_mistake_of_the_caller(tmp_path):
    path = write(tmp_path / "model.safetensors", safetensors.numpy.save({"x": random(4, 2), "y": np.float32(1)[...]}))
    tensors = open_checkpoint(path).tensors
    with pytest.raises(ValueError, match="rows"):
        tensors["x"].read(slice(0, 4, 2))
    with pytest.raises(ValueError, match="rows"):
        tensors["y"].read(slice(0, 1))


@KEEP
@given(st.sampled_from(list(FP8)), st.integers(1, 40), st.integers(1, 40), st.data())
def test_fp8_is_scaled_by_tensor_by_row_and_by_ragged_blocks(tmp_path, dtype, rows, columns, data):
    weight = (random(rows, columns) * 4).astype(FP8[dtype])
    block = data.draw(st.tuples(st.integers(1, 50), st.integers(1, 50)))
    grid = math.ceil(rows / block[0]), math.ceil(columns / block[1])
    shape = data.draw(st.sampled_from([(), (1,), (1, 1), (rows,), (rows, 1), grid]))
    scale = np.abs(random(*shape, seed=1)).astype(ml_dtypes.bfloat16) + np.ones((), ml_dtypes.bfloat16)
    suffix = data.draw(st.sampled_from(["_scale", "_scale_inv"]))
    content = {f"w.weight{suffix}": stored("BF16", scale), "w.weight": stored(dtype, weight)}
    write(tmp_path / "model.safetensors", safetensors_bytes(content))
    write(tmp_path / "config.json", json.dumps({"quantization_config": {"weight_block_size": block}}).encode())

    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == ["w.weight"]
    full = scale.astype(np.float32)
    if shape == grid and math.prod(shape) > 1 and shape != (rows, 1):
        full = np.kron(full, np.ones(block, np.float32))[:rows, :columns]
    elif shape == (rows,):
        full = full[:, None]
    expected = weight.astype(np.float32) * full
    assert_bits(checkpoint.tensors["w.weight"].read(), expected)
    some = data.draw(slices(rows))
    assert_bits(checkpoint.tensors["w.weight"].read(some), np.ascontiguousarray(expected[some]))


def test_fp8_blocks_are_128_where_no_config_says_otherwise(tmp_path):
    weight, scale = random(130, 300).astype(FP8["F8_E4M3"]), random(2, 3, seed=1)
    content = {"w.weight": stored("F8_E4M3", weight), "w.weight_scale_inv": stored("F32", scale)}
    path = write(tmp_path / "model.safetensors", safetensors_bytes(content))
    expected = weight.astype(np.float32) * np.repeat(np.repeat(scale, 128, 0), 128, 1)[:130, :300]
    tensor = open_checkpoint(path).tensors["w.weight"]
    assert_bits(tensor.read(), expected)
    assert_bits(tensor.read(slice(127, 129)), expected[127:129])


def test_fp8_experts_packed_together_have_a_scale_each(tmp_path):
    weight, scale = random(3, 4, 5).astype(FP8["F8_E4M3"]), random(3, 1, 1, seed=1)
    content = {"experts.up": stored("F8_E4M3", weight), "experts.up_scale": stored("F32", scale)}
    tensor = open_checkpoint(write(tmp_path / "model.safetensors", safetensors_bytes(content))).tensors["experts.up"]
    assert_bits(tensor.read(slice(1, 3)), weight.astype(np.float32)[1:] * scale[1:])


@pytest.mark.parametrize("shape", [(3,), (2, 4), (3, 3)], ids=str)
def test_fp8_whose_scale_does_not_fit_is_refused(tmp_path, shape):
    weight = random(130, 300).astype(FP8["F8_E4M3"])
    content = {"w.weight": stored("F8_E4M3", weight), "w.weight_scale_inv": stored("F32", random(*shape))}
    path = write(tmp_path / "model.safetensors", safetensors_bytes(content))
    refused(path, "w.weight_scale_inv", "w.weight", str(shape), "does not fit")


def test_fp8_without_a_scale_is_refused(tmp_path):
    content = {"w.weight": stored("F8_E5M2", random(3, 4).astype(FP8["F8_E5M2"]))}
    refused(write(tmp_path / "model.safetensors", safetensors_bytes(content)), "w.weight", "without", "w.weight_scale")


@pytest.mark.parametrize("dtype", WHOLE)
def test_integers_and_bools_are_listed_but_not_read(tmp_path, dtype):
    path = write(tmp_path / "model.safetensors", safetensors.numpy.save({"position_ids": np.zeros((1, 4), WHOLE[dtype])}))
    tensor = open_checkpoint(path).tensors["position_ids"]
    assert (tensor.shape, tensor.dtype) == ((1, 4), dtype)
    with pytest.raises(GcjaxError, match=f"position_ids holds {dtype}, not real numbers"):
        tensor.read()


def test_other_dtypes_are_listed_but_not_read(tmp_path):
    path = write(tmp_path / "model.safetensors", safetensors_bytes({"x": ("F4", (3, 2), b"abc"), "c": ("C64", (), b"a" * 8)}))
    for tensor in open_checkpoint(path).tensors.values():
        with pytest.raises(GcjaxError, match=f"{tensor.name} is stored as {tensor.dtype}"):
            tensor.read()


def test_sharded_equals_single(tmp_path):
    tensors = {f"layers.{i}.weight": random(4, i + 1, seed=i) for i in range(6)}
    single = open_checkpoint(write(tmp_path / "one" / "model.safetensors", safetensors.numpy.save(tensors)))
    names = list(tensors)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": {n: tensors[n] for n in names[i::2]} for i in range(2)}
    several = open_checkpoint(sharded(tmp_path / "several", shards))
    assert several.format == single.format == "safetensors"
    assert several.notes == single.notes == ()
    assert set(several.tensors) == set(single.tensors) == set(tensors)
    for name, array in tensors.items():
        assert_bits(several.tensors[name].read(), array)
        assert_bits(single.tensors[name].read(), array)
    assert len({tensor.file for tensor in several.tensors.values()}) == 2
    assert list(several.tensors) == list(open_checkpoint(tmp_path / "several").tensors)


def test_links_into_a_cache_are_followed(tmp_path):
    blob = write(tmp_path / "blobs" / "5d41402a", safetensors.numpy.save({"x": random(2, 2)}))
    (tmp_path / "snapshot").mkdir()
    for name in ("model-1.safetensors", "other.safetensors"):
        (tmp_path / "snapshot" / name).symlink_to("../blobs/5d41402a")
    write(tmp_path / "snapshot" / "model.safetensors.index.json", b'{"weight_map": {"x": "model-1.safetensors"}}')
    checkpoint = open_checkpoint(tmp_path / "snapshot")
    assert_bits(checkpoint.tensors["x"].read(), random(2, 2))
    assert checkpoint.notes == ("other.safetensors ignored: not in the index",)
    assert_bits(open_checkpoint(blob).tensors["x"].read(), random(2, 2))


def test_the_index_is_an_allow_list_for_each_tensor(tmp_path):
    shards = {
        "a.safetensors": {"x": random(2, seed=1), "y": random(2, seed=2)},
        "b.safetensors": {"y": random(2, seed=3), "z": random(2, seed=4)},
        "consolidated.safetensors": {"x": random(2, seed=5)},
        "stray.safetensors": {"w": random(2, seed=6)},
    }
    sharded(tmp_path, shards, {"x": "a.safetensors", "y": "b.safetensors"})
    checkpoint = open_checkpoint(tmp_path)
    assert {name: tensor.file.name for name, tensor in checkpoint.tensors.items()} == {
        "x": "a.safetensors",
        "y": "b.safetensors",
    }
    assert checkpoint.notes == (
        "consolidated.safetensors, stray.safetensors ignored: not in the index",
        "y in a.safetensors ignored: the index does not give them to that file",
        "z in b.safetensors ignored: the index does not give them to that file",
    )


def test_what_the_index_names_and_is_not_there_is_refused(tmp_path):
    files_of = {"x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors"}
    sharded(tmp_path, {"b.safetensors": {"other": random(2)}}, files_of)
    refused(tmp_path, str(tmp_path), "lacks a.safetensors, c.safetensors", "download")
    sharded(tmp_path, {file: {"x": random(2)} for file in files_of.values()}, files_of)
    refused(tmp_path, "b.safetensors lacks 'y'", "index")


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", "a/b", "..", ".", "", "c:x", "a\\b", "a\0b", 3, None, ["a"]], ids=repr)
def test_an_index_that_leaves_its_directory_is_refused(tmp_path, file):
    write(tmp_path / "model.safetensors.index.json", json.dumps({"weight_map": {"x": file}}).encode())
    refused(tmp_path, "model.safetensors.index.json", "'x'", "no file of its directory")


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"a": 1, "a": 2}', b"\xff", b"[" * 100_000, b'{"weight_map": {}}', b'{"weight_map": 1}', b"{}"]
)
def test_a_broken_index_is_refused(tmp_path, content):
    write(tmp_path / "model.safetensors.index.json", content)
    refused(tmp_path, str(tmp_path / "model.safetensors.index.json"), "download it again")


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"a": \xff}', b"", b"[" * 100_000])
def test_a_broken_config_is_refused(tmp_path, content):
    write(tmp_path / "model.safetensors", safetensors.numpy.save({"x": random(2)}))
    write(tmp_path / "config.json", content)
    refused(tmp_path, "config.json", "download it again")


def test_config_is_read_beside_the_weights(tmp_path):
    path = write(tmp_path / "model.safetensors", safetensors.numpy.save({"x": random(2)}))
    assert open_checkpoint(path).config == open_checkpoint(tmp_path).config == {}
    write(tmp_path / "config.json", b'{"hidden_size": 64, "rope_scaling": null}')
    assert open_checkpoint(path).config == open_checkpoint(tmp_path).config == {"hidden_size": 64, "rope_scaling": None}


def test_which_file_of_a_directory_without_an_index_is_read(tmp_path):
    one = safetensors.numpy.save({"x": random(2)})
    write(tmp_path / "consolidated.safetensors", one)
    assert [t.file.name for t in open_checkpoint(tmp_path).tensors.values()] == ["consolidated.safetensors"]
    write(tmp_path / "weights.safetensors", one)
    write(tmp_path / "weights.gguf", b"GGUF")
    checkpoint = open_checkpoint(str(tmp_path))
    assert [t.file.name for t in checkpoint.tensors.values()] == ["weights.safetensors"]
    assert checkpoint.notes == (
        "consolidated.safetensors ignored: not part of the model",
        "weights.gguf ignored: the directory holds safetensors too",
    )
    write(tmp_path / "more.safetensors", one)
    refused(tmp_path, "more.safetensors, weights.safetensors without model.safetensors.index.json")
    write(tmp_path / "model.safetensors", one)
    write(tmp_path / "adapter_model.safetensors", one)
    checkpoint = open_checkpoint(tmp_path)
    assert [t.file.name for t in checkpoint.tensors.values()] == ["model.safetensors"]
    assert "adapter_model.safetensors ignored: an adapter is not part of the model" in checkpoint.notes


def test_paths_without_weights_are_refused(tmp_path):
    refused(tmp_path / "nowhere", str(tmp_path / "nowhere"), "does not exist")
    refused(tmp_path, str(tmp_path), "no weights, only nothing at all")
    write(tmp_path / "README.md", b"hello world")
    write(tmp_path / "model.safetensors.d" / "x", b"")
    refused(tmp_path, "no weights, only README.md, model.safetensors.d")
    refused(tmp_path / "README.md", "README.md is neither a safetensors nor a GGUF file")
    refused(write(tmp_path / "config.json", b"{}"), "give its directory")
    os.mkfifo(tmp_path / "model.safetensors")  # opening it would wait for ever
    refused(tmp_path / "model.safetensors", "no regular file")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("blob")
    refused(tmp_path, "lacks model.safetensors, or has links to nothing")


def test_an_unreadable_path_is_refused(tmp_path, monkeypatch):
    def deny(*args, **kwargs):
        raise PermissionError("not yours")

    path = write(tmp_path / "model.safetensors", safetensors.numpy.save({"x": random(2)}))
    checkpoint = open_checkpoint(path)
    monkeypatch.setattr(Path, "open", deny)
    refused(path, str(path), "not yours")
    for attempt in (lambda: checkpoint.tensors["x"].read(), lambda: fingerprint(checkpoint), lambda: gguf_field(path, "x")):
        with pytest.raises(GcjaxError, match="not yours"):
            attempt()


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ""])
def test_pickles_are_refused_with_the_command_that_converts_them(tmp_path, suffix):
    ran = tmp_path / "ran"

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(ran),)

    path = write(tmp_path / "model" / f"pytorch_model{suffix}", pickle.dumps({"x": Hostile()}, protocol=2))
    sentence = refused(path, str(path), "pickle")
    if suffix:
        assert refused(path.parent) == sentence
    command = re.search(r'python -c "(.*)"$', sentence)
    assert command
    (_, call) = ast.parse(command[1]).body
    assert ast.unparse(call) == (
        f"AutoModelForCausalLM.from_pretrained({str(path.parent)!r})"
        f".save_pretrained({str(path.parent / 'safetensors')!r}, safe_serialization=True)"
    )
    assert not ran.exists()


def test_the_code_knows_no_pickle():
    for path in Path(files.__file__).parent.glob("*.py"):
        if path.name in ("files.py", "headers.py", "directory.py"):
            tree = list(ast.walk(ast.parse(path.read_text())))
            imported = {alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names}
            imported |= {node.module for node in tree if isinstance(node, ast.ImportFrom)}
            assert not imported & {"pickle", "torch", "joblib", "dill", "shelve"}
            used = {node.attr for node in tree if isinstance(node, ast.Attribute) if ast.unparse(node.value) == "np"}
            assert "load" not in used
            assert "gguf" not in {alias.name for node in tree[0].body if isinstance(node, ast.Import) for alias in node.names}


def test_adapters_are_refused(tmp_path):
    write(tmp_path / "adapter_config.json", b"{}")
    refused(tmp_path, str(tmp_path), "adapter (LoRA)", "merge")
    tensors = {"base.q_proj.lora_A.weight": random(2, 2), "base.q_proj.lora_B.weight": random(2, 2)}
    path = write(tmp_path / "adapter_model.safetensors", safetensors.numpy.save(tensors))
    refused(tmp_path, "adapter (LoRA)", "merge")
    refused(path, "adapter (LoRA)", "merge", "lora_A")


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "pytorch_model.bin", "model-1.safetensors"])
def test_lfs_pointers_are_refused(tmp_path, name):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    refused(write(tmp_path / name, pointer), name, "git lfs pull")
    if not name.endswith(".bin"):
        refused(tmp_path, name, "git lfs pull")


@pytest.mark.parametrize(
    ("names", "config", "packed"),
    [
        ({"q.qweight": "I32", "q.qzeros": "I32"}, {}, "GPTQ or AWQ"),
        ({"q.qweight": "I32", "q.qzeros": "I32"}, {"quant_method": "gptq"}, "GPTQ"),
        ({"q.qweight": "I32", "q.qzeros": "I32"}, {"quant_method": "awq"}, "AWQ"),
        ({"q.weight": "U8", "q.weight.absmax": "F32"}, {}, "bitsandbytes"),
        ({"q.weight": "U8", "q.weight.quant_state.bitsandbytes__nf4": "U8"}, {}, "bitsandbytes"),
        ({"q.weight": "I8", "q.SCB": "F32"}, {}, "bitsandbytes"),
        ({"q.weight_packed": "I32", "q.weight_scale": "F32"}, {}, "compressed-tensors"),
        ({"e.up_blocks": "U8", "e.up_scales": "U8"}, {}, "MXFP4"),
        ({"q.weight": "U8", "q.weight_scale": "F8_E4M3", "q.weight_scale_2": "F32"}, {}, "NVFP4"),
        ({"q.weight": "I8"}, {"quant_method": "eetq"}, "eetq"),
        ({"q.weight": "I32"}, {}, "an unknown format in I32"),
    ],
)
def test_packed_integers_are_refused_by_the_name_of_their_format(tmp_path, names, config, packed):
    itemsize = {"I32": 4, "F32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1}
    content = {name: (dtype, (2, 3), bytes(6 * itemsize[dtype])) for name, dtype in names.items()}
    write(tmp_path / "model.safetensors", safetensors_bytes(content))
    write(tmp_path / "config.json", json.dumps({"quantization_config": config or None}).encode())
    refused(tmp_path, f"packed as {packed} (", "cannot be decoded", "q." if "e.up_blocks" not in names else "e.up_blocks")


F32_2 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"hello", "is not a safetensors file"),
        (b"<html><head>Not found</head></html>", "is not a safetensors file"),
        (struct.pack("<Q", 1000) + b"{}", "the header is said to have 1000 bytes, the file has 10"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "the header is said to have 18446744073709551615 bytes"),
        (with_header(b'{"x', b""), "its header is not a valid JSON object"),
        (with_header(b'{"a": ' + b"[" * 100_000, b""), "its header is not a valid JSON object"),
        (with_header(b'{"x": {}, "x": {}}', b""), "a key is there twice"),
        (with_header({"x": F32_2}, bytes(5)), "is truncated: 3 bytes are missing"),
        (with_header({"x": F32_2}, bytes(9)), "the last 1 bytes belong to no tensor"),
        (with_header({"x": F32_2 | {"data_offsets": [4, 12]}}, bytes(12)), "4 bytes before x belong to no tensor"),
        (with_header({"x": F32_2, "y": F32_2}, bytes(8)), "the bytes of 'x' and 'y' overlap"),
        (with_header({"x": F32_2, "y": F32_2 | {"data_offsets": [4, 12]}}, bytes(12)), "'x' and 'y' overlap"),
        (with_header({"x": F32_2 | {"dtype": "F33"}}, bytes(8)), "the dtype 'F33' of 'x' is unknown"),
        (with_header({"x": F32_2 | {"shape": [3]}}, bytes(8)), "'x' has 8 bytes, which is not what F32 [3] takes"),
        (with_header({"x": F32_2 | {"shape": [-2]}}, bytes(8)), "does not give 'x' a dtype, a shape and a byte range"),
        (with_header({"x": F32_2 | {"shape": [True, 2]}}, bytes(8)), "does not give 'x' a dtype"),
        (with_header({"x": F32_2 | {"shape": [2.0]}}, bytes(8)), "does not give 'x' a dtype"),
        (with_header({"x": F32_2 | {"shape": "2"}}, bytes(8)), "does not give 'x' a dtype"),
        (with_header({"x": F32_2 | {"data_offsets": [8, 0]}}, bytes(8)), "'x' has -8 bytes"),
        (with_header({"x": F32_2 | {"data_offsets": [0]}}, bytes(8)), "does not give 'x' a dtype"),
        (with_header({"x": F32_2 | {"shape": [0], "data_offsets": [10**4300 - 1] * 2}}, b""), "does not give 'x' a dtype"),
        (with_header({"x": F32_2 | {"shape": [0, 2**62], "data_offsets": [0, 0]}}, b""), "'x' has an impossible shape"),
        (with_header({"x": F32_2 | {"shape": [1] * 70 + [2]}}, bytes(8)), "'x' has an impossible shape"),
        (with_header({"a\nb": F32_2}, bytes(8)), "is no name of a tensor"),
        (with_header({"\ud800": F32_2}, bytes(8)), "is no name of a tensor"),
        (with_header({"__metadata__": 3, "x": F32_2}, bytes(8)), "__metadata__ is no JSON object"),
        (with_header({"__metadata__": {"format": "pt"}}, b""), "holds no tensors"),
    ],
)
def test_a_damaged_safetensors_file_is_refused(tmp_path, content, said):
    path = write(tmp_path / "model.safetensors", content)
    refused(path, str(path), said)
    refused(tmp_path, said)


def test_a_header_larger_than_any_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as stream:  # sparse
        stream.write(struct.pack("<Q", 200_000_000) + b"{")
        stream.truncate(300_000_000)
    tracemalloc.start()
    try:
        refused(path, "a header of 200000000 bytes")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", QUANTIZED)
def test_gguf_is_read_as_the_package_decodes_it(tmp_path, kind):
    array = random(5, 3, 256)
    path = write_gguf(tmp_path / "model.gguf", {"first": ("F32", random(7)), "x": (kind, array)})
    for place in (path, tmp_path):
        checkpoint = open_checkpoint(place)
        assert (checkpoint.format, checkpoint.config["llama.block_count"]) == ("gguf", 2)
    tensor = checkpoint.tensors["x"]
    assert (tensor.shape, tensor.dtype) == ((5, 3, 256), kind)
    enum = gguf.GGMLQuantizationType[kind]
    expected = gguf.quants.dequantize(gguf.quants.quantize(array, enum), enum)
    assert_bits(tensor.read(), expected)
    assert_bits(tensor.read(slice(1, -1)), expected[1:-1])
    assert_bits(checkpoint.tensors["first"].read(), random(7))


def test_every_type_that_the_package_decodes_is_read(tmp_path):
    tensors = {}
    for kind in DECODED:
        block, itemsize = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        tensors[kind] = kind, random_bytes(6 * 256 // block * itemsize).reshape(6, -1)
        tensors[f"{kind} vector"] = kind, tensors[kind][1][0]
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", tensors))
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    with np.errstate(all="ignore"):
        for name, tensor in checkpoint.tensors.items():
            assert tensor.shape == tuple(int(length) for length in reader[name].shape)[::-1]
            assert (tensor.start, tensor.stop - tensor.start) == (reader[name].data_offset, reader[name].n_bytes)
            data = np.ascontiguousarray(reader[name].data)
            expected = gguf.quants.dequantize(data, reader[name].tensor_type).reshape(tensor.shape)
            assert_bits(tensor.read(), expected)
            assert_bits(tensor.read(slice(2, 5)), expected[2:5])


def test_gguf_of_large_tensors_is_decoded_in_chunks(tmp_path):
    array = random(1100, 768)  # several chunks, and the last one short
    tensor = open_checkpoint(write_gguf(tmp_path / "m.gguf", {"x": ("Q8_0", array)})).tensors["x"]
    kind = gguf.GGMLQuantizationType.Q8_0
    assert_bits(tensor.read(), gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind))


def test_gguf_types_that_are_not_decoded_are_listed_and_refused_when_read(tmp_path):
    tensors = {"q": ("Q8_K", random_bytes(292).reshape(1, -1)), "i": ("I32", np.zeros((2, 2), np.int32))}
    listed = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors)).tensors
    with pytest.raises(GcjaxError, match="q is quantized as Q8_K, which the gguf package cannot decode"):
        listed["q"].read()
    with pytest.raises(GcjaxError, match="i holds I32, not real numbers"):
        listed["i"].read()
    assert (tmp_path / "m.gguf").stat().st_size < 4096


def test_gguf_float64_is_kept(tmp_path):
    array = random(3, 4).astype(np.float64)
    path = write_gguf(tmp_path / "m.gguf", {"x": ("F64", array)})
    assert_bits(open_checkpoint(path).tensors["x"].read(slice(1, None)), array[1:])


FIELDS = [
    ("string", "general.name", "Grüße"),
    ("float32", "llama.rope.freq_base", 0.5),
    ("bool", "flag", True),
    ("array", "heads", [1, 2, 3]),
    ("array", "tags", ["a", "b"]),
    ("array", "tokenizer.ggml.tokens", [f"token {i}" for i in range(600)]),
    ("array", "tokenizer.ggml.scores", [i / 2 for i in range(600)]),
]


def test_gguf_metadata_is_the_config_but_for_long_arrays_which_are_read_when_asked_for(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"x": ("F32", random(2))}, FIELDS)
    config = open_checkpoint(path).config
    assert config == {"general.architecture": "llama", "llama.block_count": 2} | {
        key: value for _, key, value in FIELDS if "ggml" not in key
    }
    for _, key, value in FIELDS:
        assert gguf_field(path, key) == gguf_field(tmp_path, key) == value
    with pytest.raises(GcjaxError, match=r"no metadata field 'general.nam'; did you mean 'general.name'"):
        gguf_field(path, "general.nam")
    other = write(tmp_path / "other" / "model.safetensors", safetensors.numpy.save({"x": random(2)}))
    with pytest.raises(GcjaxError, match="is no GGUF file"):
        gguf_field(other, "general.name")


def test_a_split_gguf_is_read_whole_from_any_part(tmp_path):
    tensors = {f"x{i}": ("Q8_0", random(2, 32, seed=i)) for i in range(5)}
    whole = open_checkpoint(write_gguf(tmp_path / "whole.gguf", tensors, FIELDS))
    folder = tmp_path / "parts"
    folder.mkdir()
    write_gguf(folder / "m.gguf", tensors, FIELDS, split_max_tensors=2)
    parts = sorted(folder.iterdir())
    assert [part.name for part in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for place in (folder, *parts):
        checkpoint = open_checkpoint(place)
        assert checkpoint.config == whole.config
        assert {name: t.read().tobytes() for name, t in checkpoint.tensors.items()} == {
            name: t.read().tobytes() for name, t in whole.tensors.items()
        }
        assert gguf_field(place, "tokenizer.ggml.tokens") == FIELDS[5][2]
    refused(shutil.copy(parts[1], tmp_path / "renamed.gguf"), "renamed.gguf is one of 3 parts")
    parts[0].unlink()
    refused(folder, "lacks m-00001-of-00003.gguf, parts of m")
    parts[0].write_bytes(parts[1].read_bytes())
    refused(folder, "both hold 'x2'")


def test_several_ggufs_are_refused(tmp_path):
    for name in ("q4.gguf", "q8.gguf"):
        write_gguf(tmp_path / name, {"x": ("F32", random(2))})
    refused(tmp_path, "several models, q4.gguf, q8.gguf")


def text(value):
    return struct.pack("<Q", len(value)) + value


def raw_gguf(*, version=3, tensors=(), fields=(), counts=None, data=b""):
    """{name: (lengths, type, offset)} and {key: bytes of kind and value}, as they are in the file."""
    counts = counts or (len(tensors), len(fields))
    content = b"GGUF" + struct.pack("<IQQ", version, *counts)
    content += b"".join(text(key) + value for key, value in fields)
    for name, lengths, kind, offset in tensors:
        content += text(name) + struct.pack(f"<I{len(lengths)}QIQ", len(lengths), *lengths, kind, offset)
    return content + bytes(-len(content) % 32) + data


HUGE = 2**64 - 1
ARRAY, STRING = struct.pack("<I", 9), struct.pack("<I", 8)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"GGUF", "ends inside its header"),
        (b"GGML\3\0\0\0" + bytes(40), "is not a GGUF file"),
        (raw_gguf(version=3 << 24), "is a big-endian GGUF file"),
        (raw_gguf(version=1), "has version 1 of GGUF"),
        (raw_gguf(), "holds no tensors"),
        (raw_gguf(counts=(HUGE, 0)), "ends inside its header"),
        (raw_gguf(counts=(0, HUGE)), "ends inside its header"),
        (raw_gguf(fields=[(b"k", STRING + struct.pack("<Q", HUGE))]), "ends inside its header"),
        (raw_gguf(fields=[(b"k", ARRAY + STRING + struct.pack("<Q", HUGE))]), "ends inside its header"),
        (raw_gguf(fields=[(b"k", ARRAY + STRING + struct.pack("<Q", 600))], data=b"\xff" * 9000), "ends inside its header"),
        (raw_gguf(fields=[(b"k", ARRAY + struct.pack("<IQ", 10, 2**61 + 1))]), "ends inside its header"),
        (raw_gguf(fields=[(b"k", ARRAY + ARRAY + struct.pack("<Q", 1) + ARRAY)]), "header is damaged"),
        (raw_gguf(fields=[(b"k", struct.pack("<I", 77))]), "header is damaged"),
        (raw_gguf(fields=[(b"\xff", STRING + text(b"v"))]), "header is damaged"),
        (raw_gguf(fields=[(b"k", STRING + text(b"v"))] * 2), "the metadata key 'k' is there twice"),
        (raw_gguf(fields=[(b"general.alignment", struct.pack("<II", 4, 24))]), "general.alignment is 24"),
        (raw_gguf(fields=[(b"general.alignment", STRING + text(b"8"))]), "general.alignment is '8'"),
        (raw_gguf(tensors=[(b"x", (2,), 0, 0)], data=bytes(5)), "is truncated: 3 bytes are missing"),
        (raw_gguf(tensors=[(b"x", (2,), 0, 2**63)], data=bytes(8)), "is truncated"),
        (raw_gguf(tensors=[(b"x", (2,), 0, 4)], data=bytes(32)), "'x' has an impossible shape or offset"),
        (raw_gguf(tensors=[(b"x", (31, 32), 2, 0)], data=bytes(999)), "'x' has an impossible shape or offset"),
        (raw_gguf(tensors=[(b"x", (2**40, 2**40), 0, 0)]), "'x' has an impossible shape"),
        (raw_gguf(tensors=[(b"x", (1,) * 40, 0, 0)]), "'x' is said to have 40 dimensions"),
        (raw_gguf(tensors=[(b"x", (2,), 5, 0)], data=bytes(32)), "knows no type 5, which 'x' has"),
        (raw_gguf(tensors=[(b"x", (2,), 0, 0)] * 2, data=bytes(32)), "two tensors of one name"),
        (raw_gguf(tensors=[(b"x", (9,), 0, 0), (b"y", (9,), 0, 32)], data=bytes(99)), "'x' and 'y' overlap"),
        (raw_gguf(tensors=[(b"x\n", (2,), 0, 0)], data=bytes(32)), "is no name of a tensor"),
    ],
)
def test_a_damaged_gguf_file_is_refused(tmp_path, content, said):
    path = write(tmp_path / "model.gguf", content)
    refused(path, str(path), said)
    refused(tmp_path, said)


def test_a_file_that_shrinks_after_it_was_opened_is_refused(tmp_path):
    path = write(tmp_path / "model.safetensors", safetensors.numpy.save({"x": random(100)}))
    tensor = open_checkpoint(path).tensors["x"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(GcjaxError, match="has become shorter"):
        tensor.read()


def test_reading_takes_the_result_and_a_small_constant(tmp_path):
    weight = np.ones((1 << 13, 1 << 10), ml_dtypes.float8_e4m3fn)
    content = {
        "a": stored("BF16", np.ones((1 << 13, 1 << 10), ml_dtypes.bfloat16)),
        "b.weight": stored("F8_E4M3", weight),
        "b.weight_scale_inv": stored("F32", random(64, 8)),
    }
    tensors = list(open_checkpoint(write(tmp_path / "m.safetensors", safetensors_bytes(content))).tensors.values())
    quantized = {"c": ("Q4_1", random_bytes((1 << 13) * 640).reshape(1 << 13, -1))}
    tensors += open_checkpoint(write_gguf(tmp_path / "m.gguf", quantized)).tensors.values()
    for tensor in tensors:
        for rows, whole in ((None, 1 << 23), (slice(100, 140), 40 << 10)):
            tracemalloc.start()
            try:
                assert tensor.read(rows).size == whole
                assert tracemalloc.get_traced_memory()[1] < 4 * whole + (10 << 20)
            finally:
                tracemalloc.stop()


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="bytes read are counted by /proc")
def test_fetching_reads_the_stored_bytes_and_keeps_none(tmp_path):
    def count():
        return int(Path("/proc/self/io").read_text().split()[1])

    tensors = {"w": ("F8_E5M2", (1500, 2000), bytes(3_000_000)), "w_scale": ("F32", (1500,), bytes(6000))}
    path = write(tmp_path / "model.safetensors", safetensors_bytes(tensors))
    tensor = open_checkpoint(path).tensors["w"]
    tracemalloc.start()
    try:
        before = count()
        tensor.fetch()
        assert 3_006_000 <= count() - before < 3_100_000
        assert tracemalloc.get_traced_memory()[1] < 1.5 * (1 << 20)
    finally:
        tracemalloc.stop()
    os.truncate(path, 1_000_000)
    tensor.fetch()  # it is `read` that complains
    path.unlink()
    tensor.fetch()


def test_the_fingerprint_is_that_of_the_content(tmp_path):
    weight = random(64, 64)
    tensors = {"x": weight, "y": random(3)}
    folder = sharded(tmp_path / "a", {"1.safetensors": tensors, "2.safetensors": {"z": random(2), "extra": random(9)}})
    same = shutil.copytree(folder, tmp_path / "b")
    first = fingerprint(open_checkpoint(folder))
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert fingerprint(open_checkpoint(same)) == first

    content = (same / "1.safetensors").read_bytes()
    start = open_checkpoint(same).tensors["x"].start
    for at in (start, start + 4095, 20):
        changed = bytearray(content)
        changed[at] ^= 1
        (same / "1.safetensors").write_bytes(changed)
        with contextlib.suppress(GcjaxError):  # the header's byte may be one that matters
            assert fingerprint(open_checkpoint(same)) != first
    (same / "1.safetensors").write_bytes(safetensors.numpy.save(tensors, {"comment": "another header"}))
    assert fingerprint(open_checkpoint(same)) != first


def test_the_fingerprint_of_fp8_and_gguf(tmp_path):
    def made(scale, name):
        content = {"w.weight": stored("F8_E4M3", random(3, 4).astype(FP8["F8_E4M3"])), "w.weight_scale": stored("F32", scale)}
        return fingerprint(open_checkpoint(write(tmp_path / name / "model.safetensors", safetensors_bytes(content))))

    assert made(random(3), "a") == made(random(3), "b") != made(random(3, seed=1), "c")
    paths = [write_gguf(tmp_path / f"{i}.gguf", {"x": ("Q8_0", random(2, 32, seed=i))}, FIELDS) for i in (0, 1)]
    prints = [fingerprint(open_checkpoint(path)) for path in paths]
    assert prints[0] == fingerprint(open_checkpoint(shutil.copy(paths[0], tmp_path / "copy.gguf"))) != prints[1]


def test_tensors_cannot_be_changed(tmp_path):
    tensor = open_checkpoint(write(tmp_path / "m.safetensors", safetensors.numpy.save({"x": random(2)}))).tensors["x"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        tensor.start = 0  # pyright: ignore[reportAttributeAccessIssue]


# Fuzzing: whatever is done to a header, everything works or ends in the package's own error, in memory that is bounded.

EXTREMES = (0, 1, 7, 8, 32, 255, 1 << 16, 1 << 20, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, HUGE)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A sound file of each format, as (bytes, end of the header)."""
    folder = tmp_path_factory.mktemp("sound")
    content = safetensors_bytes(
        {name: stored(name, random(2, 3).astype(kind)) for name, kind in FLOATS.items()}
        | {"f.weight": stored("F8_E4M3", random(4, 4).astype(FP8["F8_E4M3"])), "f.weight_scale": stored("F32", random(4, 1))}
        | {"ids": stored("I64", np.arange(3))},
        {"format": "pt"},
    )
    tensors = {kind: (kind, random(2, 256)) for kind in (*QUANTIZED[:6], "F32", "F16")}
    model = write_gguf(folder / "m.gguf", tensors, [*FIELDS[:5], ("array", "long", [0.5] * 600), ("array", "s", ["x"] * 520)])
    start = min(tensor.start for tensor in open_checkpoint(model).tensors.values())
    return {"safetensors": (content, 8 + int.from_bytes(content[:8], "little")), "gguf": (model.read_bytes(), start)}


@st.composite
def damaged(draw, content, end):
    """Bytes flipped, words set to extremes, bytes inserted or left out, all in the header; or cut short."""
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(min(end, len(content)) - 1, 0)))
        match draw(st.sampled_from(["flip", "word", "insert", "delete", "cut"])):
            case "flip":
                content[at : at + 1] = bytes(byte ^ draw(st.integers(1, 255)) for byte in content[at : at + 1])
            case "word":
                word = struct.pack("<Q", draw(st.sampled_from(EXTREMES)))
                size = draw(st.sampled_from([4, 8]))
                content[at : at + size] = word[:size]
            case "insert":
                content[at:at] = draw(st.binary(max_size=40))
            case "delete":
                del content[at : at + draw(st.integers(1, 40))]
            case "cut":
                del content[draw(st.integers(0, len(content))) :]
    return bytes(content)


def exercise(path):
    """Whether the file could be opened and every tensor of floating point read."""
    try:
        checkpoint = open_checkpoint(path)
        fingerprint(checkpoint)
    except GcjaxError:
        return False
    for tensor in checkpoint.tensors.values():
        with contextlib.suppress(GcjaxError):
            assert tensor.read().shape == tensor.shape
            if tensor.shape:
                assert tensor.read(slice(1, 3)).shape == (max(min(tensor.shape[0], 3) - 1, 0), *tensor.shape[1:])
    if checkpoint.format == "gguf":
        with contextlib.suppress(GcjaxError):
            gguf_field(path, "long")
    return True


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_the_sound_files_are_read(tmp_path, sound, form):
    assert exercise(write(tmp_path / f"model.{form}", sound[form][0]))


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
@FUZZ
@given(data=st.data())
def test_a_damaged_header_ends_in_the_package_s_own_error(tmp_path, sound, form, data):
    exercise(write(tmp_path / f"model.{form}", data.draw(damaged(*sound[form]))))


NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 6, 2**31, 2**63, 2**64, 10**400, True, 1.0, math.inf])
JSON = st.recursive(NUMBERS | st.none() | st.text(max_size=5), lambda s: st.lists(s, max_size=4), max_leaves=6)


@FUZZ
@given(st.data())
def test_a_header_of_other_json_ends_in_the_package_s_own_error(tmp_path, sound, data):
    content, end = sound["safetensors"]
    header = json.loads(content[8:end])
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(header)))
        field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "", "drop", "rename"]))
        match field:
            case "":
                header[name] = data.draw(JSON)
            case "drop" | "rename":
                value = header.pop(name)
                if field == "rename" or not header:
                    header[data.draw(st.text(max_size=5) | st.just("f.weight_scale_inv"))] = value
            case _ if isinstance(header[name], dict):
                offsets = st.lists(st.integers(0, len(content)) | NUMBERS, min_size=2, max_size=2)
                dtypes = st.sampled_from(["F32", "F4", "F8_E5M2", "C64", "BOOL"])
                header[name][field] = data.draw(JSON | (dtypes if field == "dtype" else offsets))
    exercise(write(tmp_path / "model.safetensors", with_header(header, content[end:])))


@FUZZ
@given(data=st.data())
def test_a_damaged_index_or_config_ends_in_the_package_s_own_error(tmp_path, sound, data):
    folder = tmp_path / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    write(folder / "a.safetensors", sound["safetensors"][0])
    names = [name for name in open_checkpoint(folder).tensors if name != "ids"]
    weight_map = json.dumps({"weight_map": dict.fromkeys([*names, "f.weight_scale"], "a.safetensors")}).encode()
    config = json.dumps({"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 2]}}).encode()
    write(folder / "model.safetensors.index.json", data.draw(damaged(weight_map, len(weight_map))))
    write(folder / "config.json", data.draw(st.just(config) | damaged(config, len(config))))
    exercise(folder)


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_a_damaged_header_does_not_take_more_memory_than_its_file(tmp_path, sound, form):
    """The parser's objects are some ten times the header; any length that is trusted would be thousands of times."""
    exercise(write(tmp_path / f"model.{form}", sound[form][0]))  # what is imported and cached at first use

    @FUZZ
    @given(damaged(*sound[form]))
    def measured(content):
        path = write(tmp_path / f"model.{form}", content)
        tracemalloc.clear_traces()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        exercise(path)
        assert tracemalloc.get_traced_memory()[1] - before < 40 * len(content) + (1 << 18)

    tracemalloc.start()
    try:
        measured()
    finally:
        tracemalloc.stop()
