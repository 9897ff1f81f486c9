"""The report writes all its files whole, prints within 100 columns, needs no JAX, and explains what it cannot read."""

import csv
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import Point, at_chance, paper, study

from gcjax import results
from gcjax.errors import GcjaxError
from gcjax.reporting.claims import evaluate
from gcjax.reporting.report import report

QUICK = [
    Point("Res+None", end=0.5),
    Point("Res+Radial", end=0.4, spiked=1),
    Point("Res+ReLU"),
    at_chance("NoRes+ReLU", 0.4),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return results.save(study(QUICK, seeds=3), tmp_path_factory.mktemp("study") / "results.nc")


@pytest.fixture
def quick(saved, tmp_path):
    shutil.copy(saved, tmp_path)
    return tmp_path


@pytest.fixture
def small(tmp_path):
    """A study that is drawn quickly."""
    results.save(study([Point("Res+ReLU")], seeds=2, layers=3), tmp_path / "results.nc")
    return tmp_path


@pytest.fixture(scope="module")
def reported(saved):
    return report(saved, echo=False)


def _rows(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_all_files_are_written(saved, reported):
    drawn = ["continuity_over_training", "beside_v1", "rank_profile", "layer_cosines", "lags", "transfer"]
    names = {f"figures/{name}.{kind}" for name in drawn for kind in ("svg", "png")}
    assert {str(path.relative_to(saved.parent)) for path in reported} == {
        "claims.md",
        "claims.csv",
        "summary.csv",
    } | names
    assert all(path.stat().st_size > 500 for path in reported)
    assert {path for path in saved.parent.rglob("*") if path.is_file()} == {*reported, saved}


def test_the_same_results_give_the_same_files(saved, reported, quick):
    again = [path for path in report(quick, formats=("svg",), echo=False) if path.suffix != ".md"]
    assert len(again) == 8
    for path in again:
        assert path.read_bytes() == (saved.parent / path.relative_to(quick)).read_bytes(), path


def test_netcdf_changes_no_verdict(tmp_path):
    ds = study(paper(), seeds=3)
    assert evaluate(results.load(results.save(ds, tmp_path / "results.nc"))) == evaluate(ds)


def test_tables_fit_the_terminal_and_show_every_claim(tmp_path, capsys):
    points = [replace(one, statuses=["diverged", "unfinished"]) if one.variant == "Res+SiLU" else one for one in paper()]
    results.save(study(points), tmp_path / "results.nc")
    report(tmp_path, formats=(), echo=True)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert "…" not in printed
    for text in (
        "residual-linear",
        "reproduced",
        "not tested",
        "70 runs: 68 finished, 1 diverged, 1 unfinished",
        "3/5",
    ):
        assert text in printed
    assert "near 1/pi = 0.318" in printed


def test_echo_off_prints_nothing(small, capsys):
    report(small, formats=(), echo=False)
    assert capsys.readouterr().out == ""


def test_markdown_has_claims_checks_summary_and_figures(saved, reported):
    text = (saved.parent / "claims.md").read_text(encoding="utf-8")
    assert "| residual-linear | With residuals alone" in text
    assert "| Res+None: weight v1, peak | 0.9" in text
    assert "NoRes+ReLU †" in text
    assert "- lags: [svg](figures/lags.svg) [png](figures/lags.png)" in text
    assert "- optimizers: not drawn, no variant has finished runs under two optimizers" in text


def test_csv_holds_full_numbers(saved, reported):
    checks = _rows(saved.parent / "claims.csv")
    (peak,) = [row for row in checks if row["name"] == "Res+None: weight v1, peak"]
    assert float(peak["low"]) < float(peak["value"]) < float(peak["high"])
    assert (peak["verdict"], peak["passed"], peak["n"]) == ("reproduced", "True", "3")
    summary = _rows(saved.parent / "summary.csv")
    assert [row["variant"] for row in summary] == [point.variant for point in QUICK]
    assert float(summary[3]["positive_activation_baseline"]) == pytest.approx(0.3183, abs=1e-4)
    assert float(summary[0]["weight_v1_end_chance"]) == pytest.approx(0.0499, abs=1e-4)


def test_a_figure_of_an_earlier_report_does_not_outlive_its_results(small):
    stale = small / "figures" / "optimizers.svg"
    stale.parent.mkdir()
    stale.write_text("old")
    report(small, formats=("svg",), echo=False)
    assert not stale.exists()


def test_a_study_without_finished_runs_is_reported(tmp_path):
    results.save(study([Point("Res+ReLU", statuses=["unfinished"] * 5)]), tmp_path / "results.nc")
    report(tmp_path, formats=(), echo=False)
    assert "5 runs: 5 unfinished" in (tmp_path / "claims.md").read_text(encoding="utf-8")


def test_reporting_never_imports_jax(small):
    code = "import sys; from gcjax.reporting.report import report as f; f(sys.argv[1]); assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code, small], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_empty_directory_is_explained(tmp_path):
    with pytest.raises(GcjaxError, match=r"results\.nc does not exist; 'gcjax train' and 'gcjax measure' write it"):
        report(tmp_path)


@pytest.mark.parametrize("keep", [0, 100, 20_000])
def test_a_damaged_file_is_explained(quick, keep):
    path = quick / "results.nc"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(GcjaxError, match="cannot be read as netCDF"):
        report(quick)


def test_a_foreign_file_is_explained(quick):
    ds = results.load(quick)
    del ds.attrs["format"]
    ds.to_netcdf(quick / "results.nc", engine="h5netcdf")
    with pytest.raises(GcjaxError, match="not a gcjax result"):
        report(quick)


def test_an_unknown_format_is_refused_before_anything_is_written(small):
    with pytest.raises(GcjaxError, match=r"figures cannot be written as bmpx; choose from .*svg"):
        report(small, formats=("png", "bmpx"))
    assert os.listdir(small) == ["results.nc"]


def test_a_file_that_cannot_be_written_is_named(small):
    (small / "figures").write_text("in the way")
    with pytest.raises(GcjaxError, match=r"cannot write .*figures"):
        report(small, formats=("svg",), echo=False)


def test_a_disk_that_fills_up_leaves_the_old_file_and_no_scraps(small, monkeypatch):
    report(small, formats=(), echo=False)
    before = (small / "claims.md").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(GcjaxError, match=r"cannot write .*claims\.md: No space left on device"):
        report(small, formats=(), echo=False)
    assert (small / "claims.md").read_bytes() == before
    assert not [path for path in Path(small).iterdir() if path.name.startswith(".")]
