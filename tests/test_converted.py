"""Converted models on disk: equal to their source, read layer by layer, whole or not at all; and a real one that speaks."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore
import test_convert as made
import xarray as xr
from safetensors.numpy import save_file

from gcjax import __main__ as command
from gcjax import trees
from gcjax.errors import GcjaxError
from gcjax.models import llama
from gcjax.pretrained import convert, converted, files, sources, stored
from gcjax.pretrained.measure import measure
from gcjax.pretrained.options import Options

QUICK = Options(rank=4, draws=2)
UP1 = "model.layers.1.mlp.up_proj.weight"


def _source(folder: Path, family="llama", dtype=np.float32, seed=0, **changes) -> Path:
    """A random checkpoint of safetensors."""
    config = made.SIZES | made.FAMILIES[family] | changes
    folder.mkdir(parents=True)
    save_file({name: value.astype(dtype) for name, value in made._made(config, seed).items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _gguf(path: Path, more=None) -> Path:
    """The same as llama.cpp's converter would write it, rows of q and k permuted."""
    config = made.SIZES | made.FAMILIES["llama"]
    metadata, tensors = made._gguf(config, made._made(config))
    metadata = {key: np.float32(value) if isinstance(value, float) else value for key, value in metadata.items()}
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture"))
    for key, value in metadata.items():
        (writer.add_float32 if isinstance(value, np.float32) else writer.add_uint32)(key, value)
    for name, value in (tensors | (more or {})).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return _source(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def model(source, tmp_path_factory):
    return converted.convert(str(source), tmp_path_factory.mktemp("converted") / "model")


def _values(checkpoint):
    return {name: tensor.read() for name, tensor in checkpoint.tensors.items()}


def _same(one, other):
    assert set(one) == set(other)
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def _main(found):
    return {name: found[name] for name in ("cosine", "sigma", "gram_alignment", "sigma2_alignment", "layer_cosine")}


@pytest.mark.parametrize("family", ["llama", "llama, MHA, tied", "mistral", "qwen2", "qwen3"])
def test_the_tensors_are_those_of_the_source_under_its_names(tmp_path, family):
    source = sources.open_model(_source(tmp_path / "source", family))
    target = converted.convert(str(source.path), tmp_path / "model")
    found = sources.open_model(target)
    _same(_values(found), _values(source))
    for name, tensor in found.tensors.items():
        assert (tensor.shape, tensor.dtype, tensor.stop - tensor.start) == (
            source.tensors[name].shape,
            "F32",
            source.tensors[name].stop - source.tensors[name].start,
        )
        np.testing.assert_array_equal(tensor.read(slice(1, 3)), source.tensors[name].read(slice(1, 3)))
        assert tensor.read().flags.c_contiguous


@pytest.mark.parametrize(("family", "dtype"), [("llama", np.float32), ("llama", ml_dtypes.bfloat16), ("qwen3", np.float16)])
def test_measuring_it_gives_what_measuring_the_source_gives_bit_for_bit(tmp_path, family, dtype):
    source = _source(tmp_path / "source", family, dtype)
    target = converted.convert(str(source), tmp_path / "model")
    one, other = (measure(str(path), tmp_path / f"run-{path.name}", QUICK) for path in (source, target))
    xr.testing.assert_identical(one.drop_attrs(), other.drop_attrs())
    assert (one.attrs["family"], one.attrs["parameters"]) == (other.attrs["family"], other.attrs["parameters"])


def test_measuring_it_gives_what_measuring_a_gguf_with_permuted_rows_gives(tmp_path, source):
    given = _gguf(tmp_path / "model.gguf")
    target = converted.convert(str(given), tmp_path / "model")
    _same(_values(sources.open_model(target)), _values(sources.open_model(source)))
    one, other = (measure(str(path), tmp_path / f"run-{path.name}", QUICK) for path in (given, target))
    for name, value in _main(one).items():
        np.testing.assert_allclose(value, other[name], atol=1e-5, rtol=1e-5, err_msg=name)
    np.testing.assert_array_equal(one.cosine.sel(matrix="v"), other.cosine.sel(matrix="v"))


def test_what_is_loaded_is_what_the_converter_gives(source, model):
    checkpoint = sources.open_model(source)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    expected = convert.model_config(checkpoint.config, shapes, made._nothing)
    section, params = stored.load(model)
    assert section.to_dict() == expected.model.to_dict()
    _same(params, convert.convert(shapes, lambda name: checkpoint.tensors[name].read(), expected.model))
    assert {value.dtype for value in params.values()} == {jnp.dtype("float32")}
    logits = llama.build(section).apply(params, jnp.arange(8)[None])
    assert logits.shape == (1, 8, 61)
    order = []
    stored.load(model, lambda name, value: order.append((name, type(value))))
    assert order == [(name, np.ndarray) for name in params]


def test_rotary_factors_come_back_as_they_were(tmp_path):
    factors = np.linspace(1, 8, 3, dtype=np.float32)
    given = _gguf(tmp_path / "model.gguf", {"rope_freqs.weight": factors})
    section, _ = stored.load(converted.convert(str(given), tmp_path / "model"))
    assert section.rope_scaling.factors == tuple(factors.tolist())


def test_bfloat16_rounds_and_measuring_sees_the_rounded_values(tmp_path, source):
    target = converted.convert(str(source), tmp_path / "half", "bfloat16")
    found = sources.open_model(target)
    expected = _values(sources.open_model(source))
    _same(_values(found), {n: v.astype(ml_dtypes.bfloat16).astype(np.float32) for n, v in expected.items()})
    assert {tensor.dtype for tensor in found.tensors.values()} == {"BF16"}
    assert {value.dtype for value in stored.load(target)[1].values()} == {jnp.dtype("bfloat16")}


def test_the_dtype_is_that_of_the_source_where_it_is_coarser(tmp_path):
    half = _source(tmp_path / "half", dtype=np.float16)
    for dtype, expected in (("float32", "F16"), ("bfloat16", "BF16")):
        found = sources.open_model(converted.convert(str(half), tmp_path / dtype, dtype))
        assert {tensor.dtype for tensor in found.tensors.values()} == {expected}


def test_a_layer_is_stored_and_read_by_itself(model, monkeypatch):
    for name, depth in (("q", 3), ("down", 3), ("mlp_norm", 3)):
        at = f"file://{model / 'params' / name}/"
        spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": at, "path": f"{name}/"}}
        store = tensorstore.open(spec, open=True, read=True).result()
        assert store.shape[0] == depth
        assert store.chunk_layout.read_chunk.shape == (1, *store.shape[1:])
    tensor = sources.open_model(model).tensors[UP1]
    read = []
    monkeypatch.setattr(trees, "read", made._nothing)
    monkeypatch.setattr(trees, "entry", lambda *given, entry=trees.entry: read.append(given) or entry(*given))
    tensor.read()
    assert [given[1:] for given in read] == [("up", 1)]


def test_a_copy_has_the_same_fingerprint_and_another_conversion_has_not(tmp_path, source, model):
    mark = files.fingerprint(sources.open_model(model))
    shutil.copytree(model, tmp_path / "copy")
    assert files.fingerprint(sources.open_model(tmp_path / "copy")) == mark
    other = converted.convert(str(_source(tmp_path / "other", seed=1)), tmp_path / "model")
    assert files.fingerprint(sources.open_model(other)) != mark
    assert json.loads((model / "model.json").read_text())["source_fingerprint"] == files.fingerprint(sources.open_model(source))


def test_only_a_converted_model_is_replaced_and_only_when_told(tmp_path, source):
    target = tmp_path / "model"
    target.mkdir()
    converted.convert(str(source), target)
    before = (target / "model.json").stat().st_ino
    with pytest.raises(GcjaxError, match="holds a converted model already; give another --out, or --overwrite"):
        converted.convert(str(source), target)
    assert (target / "model.json").stat().st_ino == before
    converted.convert(str(source), target, "bfloat16", overwrite=True)
    assert json.loads((target / "model.json").read_text())["dtype"] == "bfloat16"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (target / "notes.txt").touch()
    with pytest.raises(GcjaxError, match="holds files that gcjax convert did not write"):
        converted.convert(str(source), target, overwrite=True)
    with pytest.raises(GcjaxError, match="holds files that gcjax convert did not write"):
        converted.convert(str(source), source, overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(GcjaxError, match="file cannot be written"):
        converted.convert(str(source), tmp_path / "file", overwrite=True)


def test_a_stopped_conversion_leaves_what_was_there(tmp_path, source, model, monkeypatch):
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / ".model.partial" / "params").mkdir(parents=True)  # of one that was killed
    writes = []

    def stop(path, *given, write=trees.write, **more):
        writes.append(path)
        if len(writes) == 3:
            raise KeyboardInterrupt
        write(path, *given, **more)

    monkeypatch.setattr(trees, "write", stop)
    for target, kept in ((tmp_path / "model", True), (tmp_path / "new", False)):
        writes.clear()
        with pytest.raises(KeyboardInterrupt):
            converted.convert(str(source), target, overwrite=True)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        assert target.exists() == kept
    _same(stored.load(tmp_path / "model")[1], stored.load(model)[1])


def test_what_cannot_be_converted_leaves_nothing(tmp_path, source, model):
    with pytest.raises(GcjaxError, match="is converted already; give the checkpoint that it was made from"):
        converted.convert(str(model), tmp_path / "again")
    with pytest.raises(GcjaxError, match="float32 or bfloat16, not 'float16'"):
        converted.convert(str(source), tmp_path / "half", "float16")
    gemma = _source(tmp_path / "gemma")
    (gemma / "config.json").write_text(json.dumps(made.SIZES | {"model_type": "gemma3_text"}))
    with pytest.raises(GcjaxError, match="model_type='gemma3_text' is not a model that gcjax converts"):
        converted.convert(str(gemma), tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"gemma"}


def _edit(folder, change):
    file = folder / "model.json"
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda at: (at / "model.json").write_text("{"), "model.json"),
        (
            lambda at: (at / "model.json").write_text("{}"),
            "model.json was not written by gcjax convert .*no gcjax, model, dtype",
        ),
        (lambda at: _edit(at, lambda record: record.pop("model")), "it has no model"),
        (lambda at: _edit(at, lambda record: record["model"].pop("width")), "model.json does not describe a model"),
        (lambda at: _edit(at, lambda record: record["model"].update(activation="silly")), "activation='silly' does not exist"),
        (lambda at: _edit(at, lambda record: record["storage"].pop("q")), "model.json does not describe a model"),
        (lambda at: _edit(at, lambda record: record["storage"]["q"].pop()), "storage has another number of layers"),
        (
            lambda at: _edit(at, lambda record: record["model"].update(mlp_width=41)),
            r"down is float32\[3, 40, 24\] where its model.json makes it \[3, 41, 24\]; convert the model again",
        ),
        (lambda at: shutil.rmtree(at / "params" / "gate"), "is damaged .*; convert the model again"),
        (lambda at: (at / "params" / "gate" / "manifest.ocdbt").write_bytes(b"\0" * 99), "is damaged .*; convert"),
    ],
)
def test_a_directory_that_is_not_whole_is_refused(tmp_path, model, damage, message):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    damage(folder)
    for use in (stored.load, sources.open_model):
        with pytest.raises(GcjaxError, match=message):
            use(folder)


def test_damaged_values_are_found_when_they_are_read(tmp_path, model):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    largest = max((folder / "params" / "up").rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-5000])
    checkpoint = sources.open_model(folder)
    with pytest.raises(GcjaxError, match="is damaged"):
        [checkpoint.tensors[UP1.replace(".1.", f".{layer}.")].read() for layer in range(3)]
    with pytest.raises(GcjaxError, match="is damaged"):
        stored.load(folder)


def test_the_command_says_what_it_wrote(tmp_path, source, capsys):
    command.run(["convert", str(source), "--out", str(tmp_path / "model"), "--dtype", "bfloat16"])
    said = capsys.readouterr().err
    assert re.search(r"^q \[3, 24, 24\], 0.0 MB$", said, re.MULTILINE)
    assert re.search(r"^embedding +1,464$", said, re.MULTILINE)
    assert re.search(rf"^total +{sum(v.size for v in made._made(made.SIZES | made.FAMILIES['llama']).values()):,}$", said, re.M)
    assert stored.load(tmp_path / "model")[1]["q"].dtype == jnp.bfloat16


MEMORY = """
import sys
from gcjax.pretrained import converted, sources

def peak():  # ru_maxrss would be that of the parent, before exec
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

converted.convert(sys.argv[1], sys.argv[2])
start = peak()
converted.convert(sys.argv[3], sys.argv[4])
written = peak()
for tensor in sources.open_model(converted.Path(sys.argv[4])).tensors.values():
    tensor.read()
print(written - start, peak() - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
def test_the_whole_model_is_never_in_memory(tmp_path, source):
    """The peak grows by a few times the largest stack, 52 MB here, not by the 358 MB of all."""
    sizes = {"vocab_size": 100, "hidden_size": 1024, "intermediate_size": 1056, "num_hidden_layers": 12}
    big = _source(tmp_path / "big", **sizes, num_attention_heads=16, num_key_value_heads=16)
    given = [source, tmp_path / "small", big, tmp_path / "large"]
    done = subprocess.run([sys.executable, "-c", MEMORY, *given], capture_output=True, text=True, check=True, timeout=300)
    written, read = map(int, done.stdout.split())
    whole = sum(path.stat().st_size for path in big.iterdir())
    print(f"{whole / 1e6:.0f} MB: peak grew by {written / 1e6:.0f} MB in writing, {read / 1e6:.0f} MB with reading")
    assert max(written, read) < 0.8 * whole
