"""The report writes all its files whole, prints within 100 columns, needs no JAX, and explains what it cannot read."""

import csv
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import PROJECTIONS, SPEED, TRANSFORMER_CLAIMS, Point, ablated, at_chance, paper, study, transformer

from gcjax import results
from gcjax.__main__ import run
from gcjax.errors import GcjaxError
from gcjax.reporting.claims import evaluate
from gcjax.reporting.report import report
from gcjax.reporting.summary import summary
from gcjax.reporting.tables import SUMMARY_WIDTHS, free, summary_cells

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
        "report.html",
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


@pytest.fixture(scope="module")
def transformers(tmp_path_factory):
    """A short study of a transformer's seven matrices, in the alphabetical order that a file may have them in."""
    points = [transformer("SiLU"), replace(ablated(), statuses=["diverged"])]
    names = sorted(PROJECTIONS)
    ds = study(points, seeds=4, layers=3, matrices=names, claims=TRANSFORMER_CLAIMS, language=True)
    ds["spectrum"][:, :, names.index("gate"), :, 20:] = float("nan")  # a matrix with fewer singular values than another
    return results.save(ds, tmp_path_factory.mktemp("transformers") / "results.nc")


def test_a_study_of_transformers_is_reported(transformers, capsys):
    report(transformers, formats=(), echo=True)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert "…" not in printed
    for text in (
        "8 runs: 7 finished, 1 diverged",
        "2,560 tokens a second and run, 41.3% of the device's",
        "projections",
        "gate-ablation",
        "SiLU - None: Gate weight v1 at end",
        "within ±0.1",
        "at step 500",
        "\nDown u1\n",
        "3/4",
    ):
        assert text in printed
    assert "ppl: perplexity of held-out text" in " ".join(printed.split())
    assert "test accuracy" not in printed
    assert "no-residual" not in printed
    rows = _rows(transformers.parent / "summary.csv")
    assert [(row["matrix"], row["space"], row["variant"]) for row in rows[6:8]] == [
        ("o", "output", "SiLU"),
        ("o", "output", "None"),
    ]
    assert float(rows[6]["weight_end"]) > 0.7 > 0.1 > float(rows[6]["weight_other_end"])
    assert {row["verdict"] for row in _rows(transformers.parent / "claims.csv")} == {"reproduced"}


def test_a_table_of_transformers_has_a_line_for_each_matrix_s_chance_and_variants(transformers):
    rows = summary(results.load(transformers))
    cells = summary_cells(rows, 2)
    assert [row[0] for row in cells[1:5]] == ["Q v1", "chance", "SiLU", "None"]
    assert len(cells) == 1 + 7 * 4
    assert all(len(row) == len(SUMMARY_WIDTHS) for row in cells)
    for row in cells[1:]:
        assert all(len(cell) <= width for cell, width in zip(row[1:], SUMMARY_WIDTHS[1:])), row


@pytest.mark.parametrize(
    ("value", "two", "three"),
    [
        (1.049, "1.05", "1.049"),
        (9.996, "10.0", "10.00"),
        (99.96, "100", "100.0"),
        (4210.2, "4210", "4210.2"),
        (16384.0, "16k", "16k"),
    ],
)
def test_numbers_without_an_end_stay_narrow(value, two, three):
    assert (free(value, 2), free(value, 3)) == (two, three)
    assert free(None, 2) == free(float("nan"), 2) == "-"


def test_a_speed_that_is_not_known_is_left_out(transformers, tmp_path):
    ds = results.load(transformers)
    without_peak = SPEED | {"model_flops_utilisation": None}
    for speed, said in ((without_peak, "2,560 tokens a second and run."), ({"steps_per_second": None}, "")):
        results.save(ds.assign_attrs(throughput=json.dumps(speed)), tmp_path / "results.nc")
        report(tmp_path, formats=(), echo=False)
        text = (tmp_path / "claims.md").read_text(encoding="utf-8")
        assert said in text
        assert ("tokens" in text) == bool(said)
        assert "FLOP" not in text


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
    rows = _rows(saved.parent / "summary.csv")
    assert [row["variant"] for row in rows] == [point.variant for point in QUICK]
    assert {(row["matrix"], row["space"]) for row in rows} == {("", "input")}
    assert float(rows[3]["positive_activation_baseline"]) == pytest.approx(0.3183, abs=1e-4)
    assert float(rows[0]["weight_end_chance"]) == pytest.approx(0.0499, abs=1e-4)


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


@pytest.mark.parametrize("command", [("train", "--config", "study.py"), ("measure", "model")])
def test_before_a_long_command_begins_its_formats_are_looked_at(command, tmp_path):
    with pytest.raises(GcjaxError, match="cannot be written as bmpx"):
        run([*command, "--workdir", str(tmp_path / "w"), "--formats", "png,bmpx"])
    assert not (tmp_path / "w").exists()


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
