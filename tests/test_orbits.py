"""A study that keeps its snapshots: its moves measured, taken up, reported; and a report on a study that is not complete."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from gcjax import results
from gcjax.__main__ import run
from gcjax.errors import GcjaxError
from gcjax.training import orbits

CONFIG = str(Path(__file__).parent.parent / "configs" / "mlp_mechanism.py")
SIZE = ("model.depth=3", "model.width=12", "measure.rank=4", "train.steps=40", "train.chunk=10", "measure.every=20",
        "measure.early=(0,5)", "measure.activity=30", "seeds=1", "only=None,ReLU")  # fmt: skip


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    base = tmp_path_factory.mktemp("orbits") / "w"
    overrides = [f"--config.{text}" for text in SIZE]
    run(["train", "--config", f"{CONFIG}:symmetry", "--workdir", str(base), "--formats=", *overrides])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orbits, "DRAWS", 2)
        patch.setattr(orbits, "IMAGES", 40)
        orbits.measure(base)
    return base


def test_the_loss_is_flat_along_what_changes_nothing_and_nowhere_else(workdir):
    ds = results.load(workdir / "symmetry.nc")
    every = ("general", "rotation", "diagonal", "common rotation", "common diagonal", "rotation but one")
    for variant, flat in (("None", every), ("ReLU", ("common diagonal",))):
        one = ds.isel(run=int(np.flatnonzero(ds.variant == variant)[0]))
        assert [str(family) for family in ds.family[(one.exact == 1).values].values] == list(flat)
        for family in ds.family.values:
            values = one.sel(family=family)
            for name in ("slope", "gauss_newton", "curvature", "finite"):
                largest = float(abs(values[name]).max())
                assert largest < 1e-9 if family in flat else largest > 1e-7, (variant, family, name)


def test_the_share_of_motion_is_a_share_and_random_motion_has_about_that_of_the_dimensions(workdir):
    ds = results.load(workdir / "symmetry.nc")
    moved = ds.sel(moment=["peak", "half", "end"])
    assert ((moved.motion_share > 0) & (moved.motion_share < 1)).all()
    assert (moved.motion_unsolved < 0.05).all()
    assert (moved.motion_random.sel(algebra="general") > moved.motion_random.sel(algebra="rotation")).all()
    assert np.isnan(ds.motion_share.sel(moment="start")).all()


def test_gauges_are_undone_for_the_linear_network_alone(workdir):
    ds, study = results.load(workdir / "symmetry.nc"), results.load(workdir)
    none, relu = (ds.isel(run=int(np.flatnonzero(ds.variant == name)[0])) for name in ("None", "ReLU"))
    assert np.isnan(relu.gauge_continuity).all()
    steps = none.moment_step.values.astype(int)
    cosine = study.cosine.sel(source="weight", rank=1, step=steps).isel(run=0, matrix=0).mean("pair")
    np.testing.assert_allclose(none.gauge_continuity.sel(gauge="none"), cosine, atol=2e-3)
    np.testing.assert_allclose(none.gauge_distance.sel(moment="peak", gauge=["none", "identity"]), 0, atol=1e-4)
    assert (none.gauge_distance.sel(gauge="identity") <= none.gauge_distance.sel(gauge="none") + 1e-6).all()


def test_what_is_there_is_taken_up_and_reported(workdir, capsys, monkeypatch):
    monkeypatch.setattr(orbits, "of_run", lambda *_: pytest.fail("measured again"))
    run(["symmetry", str(workdir), "--formats", "html"])
    printed = capsys.readouterr().out
    assert "motion" in printed
    assert "Symmetry" in (workdir / "report.html").read_text(encoding="utf-8")
    assert "## Symmetry" in (workdir / "claims.md").read_text(encoding="utf-8")


def test_what_belongs_to_another_study_is_not_reported(workdir, tmp_path):
    ds = results.load(workdir)
    shutil.copy(workdir / "symmetry.nc", tmp_path)
    results.save(ds.assign_attrs(data="{}"), tmp_path / "results.nc")
    with pytest.raises(GcjaxError, match=r"symmetry\.nc does not belong to the results\.nc beside it"):
        run(["report", str(tmp_path), "--formats="])


def test_a_damaged_snapshot_is_named(workdir, tmp_path):
    shutil.copytree(workdir, tmp_path / "w")
    shutil.rmtree(tmp_path / "w" / "symmetry")
    shutil.rmtree(tmp_path / "w" / "packs" / "000-0000" / "snapshots" / "40")
    with pytest.raises(GcjaxError, match=r"snapshots/40 is missing or damaged"):
        orbits.measure(tmp_path / "w")


def test_a_study_without_snapshots_is_refused(workdir, tmp_path):
    ds = results.load(workdir)
    results.save(ds.assign_attrs(config=ds.attrs["config"].replace('"keep_snapshots": true', '"keep_snapshots": false')),
                 tmp_path / "results.nc")  # fmt: skip
    with pytest.raises(GcjaxError, match=r"kept no snapshots.*keep_snapshots=True"):
        orbits.measure(tmp_path)


def test_an_interrupted_study_is_reported_as_far_as_it_is(workdir, tmp_path, capsys):
    shutil.copytree(workdir, tmp_path / "w")
    (tmp_path / "w" / "results.nc").unlink()
    (tmp_path / "w" / "symmetry.nc").unlink()
    shutil.rmtree(tmp_path / "w" / "packs" / "001-0000")
    run(["report", str(tmp_path / "w"), "--formats="])
    printed = capsys.readouterr().out
    assert "is not complete; this is what it has so far" in printed
    assert "2 runs: 1 finished, 1 unfinished" in printed
    found, whole = results.load(tmp_path / "w" / "partial.nc"), results.load(workdir)
    np.testing.assert_array_equal(found.cosine.isel(run=0), whole.cosine.isel(run=0))
    assert np.isnan(found.cosine.isel(run=1)).all()
    shutil.rmtree(tmp_path / "w" / "packs")
    (tmp_path / "w" / "packs").mkdir()
    with pytest.raises(GcjaxError, match=r"no run in .* has a checkpoint yet"):
        run(["report", str(tmp_path / "w"), "--formats="])
