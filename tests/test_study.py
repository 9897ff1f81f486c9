"""The study end to end at toy size: resume, kill, refusal, and one run against many."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from gcjax import config as configs
from gcjax import results
from gcjax.errors import GcjaxError
from gcjax.training import checkpoint, problem, study, sweep
from gcjax.training.train import programs

CONFIG = str(Path(__file__).parent.parent / "configs" / "mlp_ablation.py") + ":quick"
TOY = ("model.depth=3", "model.width=24", "measure.rank=4", "train.steps=120", "train.chunk=20", "measure.every=40", "seeds=2",
       "only=Res+None,Res+ReLU", "measure.early=(0,5)", "checkpoint.seconds=0.0")  # fmt: skip


def toy(*overrides: str):
    return configs.load(CONFIG, (*TOY, *overrides))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, xr.Dataset]:
    workdir = tmp_path_factory.mktemp("study") / "toy"
    return workdir, study.train(toy(), workdir)


def test_a_study_follows_the_schema_and_learns(uninterrupted: tuple[Path, xr.Dataset]) -> None:
    workdir, ds = uninterrupted
    assert ds.point.values.tolist() == ["Res+None"] * 2 + ["Res+ReLU"] * 2
    assert ds.seed.values.tolist() == [0, 1, 0, 1]
    assert set(ds.status.values.tolist()) == {"finished"}
    assert ds.step.values.tolist() == [0, 5, 40, 80, 120]
    assert bool((ds.test_loss.isel(step=-1) < ds.test_loss.isel(step=0)).all())
    cosine = ds.cosine.sel(source=["weight", "gradient"])
    assert bool(((cosine >= 0) & (cosine <= 1 + 1e-5)).all())
    assert bool(ds.cosine.sel(source="update", step=0).isnull().all())  # W_0 - W_0 is the zero matrix
    assert bool(ds.drift.min("step").max() < 1e-3)  # every vector meets itself at its own peak
    xr.testing.assert_identical(ds, results.load(workdir))


def test_the_whole_spectrum_is_kept_at_evenly_chosen_snapshots_and_the_rest_is_that_of_more_workers(
    uninterrupted: tuple[Path, xr.Dataset], tmp_path: Path
) -> None:
    few, all_ = study.train(toy("measure.full=3", "executor.workers=1"), tmp_path / "few"), uninterrupted[1]
    assert few.full_step.values.tolist() == [0, 40, 120]
    assert all_.full_step.values.tolist() == all_.step.values.tolist()
    for name in ("gram_alignment", "sigma2_alignment", "layer_cosine"):
        assert bool(few[name].sel(source="weight").notnull().all())
    xr.testing.assert_equal(few, all_.sel(full_step=few.full_step))


def test_a_study_that_was_killed_resumes_to_the_same_bits(uninterrupted: tuple[Path, xr.Dataset], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gcjax", "train", "--config", CONFIG, "--workdir", str(tmp_path / "killed"), "--formats="]
    command += [f"--config.{override}" for override in TOY]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not list((tmp_path / "killed").glob("packs/*/running/*[0-9]")):
            assert process.poll() is None, "the study ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "killed" / "results.nc").exists()
    xr.testing.assert_equal(study.train(toy(), tmp_path / "killed"), uninterrupted[1])


def test_a_workdir_of_another_config_is_refused_until_overwritten(tmp_path: Path) -> None:
    first = toy("only=Res+None", "seeds=1", "train.steps=20")
    study.train(first, tmp_path / "w")
    other = toy("only=Res+None", "seeds=1", "train.steps=20", "optim.lr=0.5")
    with pytest.raises(GcjaxError, match=r"optim\.lr: 0\.001 -> 0\.5"):
        study.train(other, tmp_path / "w")
    assert study.train(other, tmp_path / "w", overwrite=True).attrs["config"] == configs.to_json(other)


def test_a_directory_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(GcjaxError, match="gcjax did not write"):
            study.train(toy(), tmp_path, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_that_diverges_is_marked_and_the_others_go_on(tmp_path: Path) -> None:
    config = toy("seeds=1", "train.steps=60")
    with config.unlocked():
        config.points = (
            {"point": "calm", "variant": "Res+ReLU"},
            {"point": "wild", "variant": "Res+ReLU", "optim": {"name": "sgd", "lr": 1e6}},
        )
        config.only = ()
    ds = study.train(config, tmp_path / "w")
    assert ds.status.values.tolist() == ["finished", "diverged"]
    assert not bool(ds.cosine.sel(source="weight").isel(run=0).isnull().any())
    assert bool(ds.cosine.sel(source="weight").isel(run=1, step=-1).isnull().all())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=-5", r"train\.steps=-5 is too small"),
        ("measure.rank=25", r"measure\.rank: rank 25 is outside 1\.\.24, the ranks of a 24 x 24 matrix, as hidden"),
        ("only=Res+Nne", r"did you mean 'Res\+None'"),
        ("optim.name=adm", "did you mean 'adam'"),
        ("measure.solver=svdd", "did you mean 'svd'"),
        ("seeds=0", "seeds=0"),
        ("optim.weight_decay=0.1", r"weight_decay=0\.1 does nothing under optim\.name='adam'; .* adamw, muon"),
    ],
)
def test_a_config_that_cannot_run_is_refused_before_anything_is_written(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(GcjaxError, match=message):
        study.train(toy(override), tmp_path / "w")
    assert not (tmp_path / "w").exists()


def test_runs_side_by_side_equal_each_alone_and_nothing_compiles_twice() -> None:
    listed = [run for run in sweep.runs(toy("seeds=3")) if run.variant == "Res+ReLU"]
    arrays, _ = problem.load_data(listed[0].config)
    data = jax.device_put(arrays)

    def after(width: int, runs: list[sweep.Run]) -> tuple[jax.Array, jax.Array]:
        pack = sweep.Pack("p", sweep.static(runs[0].config), tuple(runs))
        compiled = programs(pack.static, width, jax.devices()[0])
        traced = {path: jnp.asarray(values, jnp.float32) for path, values in pack.traced().items()}
        state, initial = compiled.init(jnp.asarray([run.seed for run in runs], jnp.uint32), traced)
        first = jnp.copy(state.params["hidden"])
        for steps, whole in ((7, True), (13, False)):
            state, _ = compiled.chunk(state, traced, data, np.int32(steps))
            compiled.snapshot(state, initial, traced, data, np.bool_(whole))
        assert compiled.chunk._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess]
        assert compiled.snapshot._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess]
        return first, state.params["hidden"]

    first, last = after(3, listed)
    for i, run in enumerate(listed):
        first_alone, last_alone = after(1, [run])
        np.testing.assert_allclose(first[i], first_alone[0], rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(last[i], last_alone[0], rtol=1e-4, atol=1e-4)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": jnp.arange(6.0), "key": jax.random.key(3)}
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, step, state, {"loss": np.full(4, step)})
    assert sorted(path.name for path in (tmp_path / "running").iterdir()) == ["20", "30"]
    for path in (tmp_path / "running" / "30").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    restored = checkpoint.restore(tmp_path, state)
    assert restored is not None
    step, again, history = restored
    assert step == 20
    assert "running/30 is damaged" in caplog.text
    assert jnp.array_equal(jax.random.key_data(again["key"]), jax.random.key_data(state["key"]))
    assert jnp.array_equal(again["w"], state["w"])
    assert history["loss"].tolist() == [20] * 4
