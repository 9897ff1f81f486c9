"""Every claim comes out reproduced, not reproduced and not tested, each from results that say so."""

from dataclasses import replace

import numpy as np
import pytest
from synthetic import CHANCE, CLAIMS, TRANSFORMER_CLAIMS, Point, at_chance, paper, study

from gcjax.errors import GcjaxError
from gcjax.reporting.checks import check
from gcjax.reporting.claims import CLAIMS as DEFINED
from gcjax.reporting.claims import GENERAL, Claim, evaluate
from gcjax.reporting.statistics import Interval
from gcjax.reporting.summary import COLUMNS, summary

RELU, NONE = Point("Res+ReLU"), Point("Res+None", end=0.5, gradient=0.94)
RADIAL = Point("Res+Radial", end=0.4, gradient=0.4)
GELU = Point("Res+GELU", peak=0.97, end=0.97)
LN_NONE, LN_RELU = Point("Res+LN+None", end=0.8, others=0.7), Point("Res+LN+ReLU", others=0.35)
NO_RES, TWIN = at_chance("NoRes+tanh"), Point("Res+tanh", end=0.4, gradient=0.6)


def _at(points, **swept):
    return [replace(point, swept={path.replace("__", "."): value for path, value in swept.items()}) for point in points]


SGD, ADAM = {"optim__name": "sgd"}, {"optim__name": "adam"}
# claim -> points that reproduce it; (points, part of the failing check's name); (points, part of the note)
CASES = {
    "no-residual": (
        [NO_RES, TWIN],
        [
            ([replace(NO_RES, gradient=0.4)], "NoRes+tanh: cumulative-gradient v1"),
            ([replace(NO_RES, end=0.3)], "NoRes+tanh: weight v1"),
            ([NO_RES, replace(TWIN, gradient=0.3)], "Res+tanh: cumulative-gradient v1"),
        ],
        ([RELU], "no run of NoRes+tanh, NoRes+None"),
    ),
    "residual-linear": (
        [NONE, RELU],
        [
            ([replace(NONE, peak=0.8), RELU], "peak"),
            ([replace(NONE, end=0.85), RELU], "peak - end"),
            ([NONE, replace(RELU, end=0.55)], "Res+ReLU - Res+None"),
            ([replace(NONE, gradient=0.6), RELU], "cumulative-gradient"),
        ],
        ([NONE], "no run of Res+ReLU"),
    ),
    "residual-radial": (
        [RADIAL, RELU],
        [
            ([replace(RADIAL, peak=0.8), RELU], "peak"),
            ([replace(RADIAL, end=0.9), RELU], "peak - end"),
            ([RADIAL, replace(RELU, end=0.3)], "Res+ReLU - Res+Radial"),
        ],
        ([replace(RADIAL, statuses=["diverged"] * 3), RELU], "2 of 5 runs finished, 3 diverged"),
    ),
    "residual-elementwise": (
        [RELU, GELU],
        [([RELU, replace(GELU, end=0.8)], "Res+GELU: weight v1 at end"), ([replace(RELU, end=0.86)], "peak - end")],
        ([RELU, replace(GELU, statuses=["unfinished"] * 3)], "2 of 5 runs finished, 3 unfinished"),
    ),
    "concentration": (
        [RELU, LN_NONE, LN_RELU],
        [
            ([replace(RELU, others=0.9), LN_NONE, LN_RELU], "Res+ReLU: lead"),
            ([RELU, replace(LN_NONE, others=0.3), LN_RELU], "Res+LN+None: lead"),
            ([RELU, LN_NONE, replace(LN_RELU, others=0.8)], "Res+LN+ReLU: lead"),
        ],
        ([RELU, LN_NONE], "no run of Res+LN+ReLU"),
    ),
    "gradient-first": (
        [NONE, RELU],
        [
            ([replace(NONE, gradient_start=0.3), RELU], "Res+None: gradient v1"),
            ([NONE, replace(RELU, start=0.3)], "Res+ReLU: weight v1"),
        ],
        ([NO_RES], "no run of Res+None, Res+Radial, Res+ReLU, Res+GELU, Res+SiLU"),
    ),
    "transfer": (
        [RELU, replace(GELU, ratio=0.8)],
        [
            ([replace(RELU, transfer=0.45)], "transfer at end"),
            ([replace(RELU, ratio=0.2)], "Frobenius ratio"),
            ([replace(RELU, ratio=1.7)], "Spectral ratio"),
            ([replace(RELU, transfer_start=0.7)], "ratio"),
        ],
        ([replace(RELU, statuses=["diverged"] * 4)], "1 of 5 runs finished, 4 diverged"),
    ),
    "optimizer-free": (
        [*_at([RELU, NONE], **ADAM), *_at([RELU, RADIAL], **SGD)],
        [([*_at([RELU, NONE], **ADAM), *_at([RELU, replace(NONE, end=0.93)], **SGD)], "sgd: Res+ReLU - Res+None")],
        ([*_at([RELU, NONE], **ADAM), *_at([RELU], **SGD)], "settings that differ in optimizer or init gain: 1"),
    ),
    "symmetry-breaking": (
        [NONE, RELU, GELU],
        [
            ([NONE, RELU, replace(GELU, end=0.6)], "Res+GELU - Res+None"),
            ([replace(NONE, end=0.9), RELU], "Res+ReLU - Res+None"),
        ],
        ([RELU], "no run of Res+None"),
    ),
}


TOGETHER = ("projections", "gate-ablation")  # of all matrices of a transformer: test_projection_claims.py


def _claim(points, name, **how) -> Claim:
    (found,) = [claim for claim in evaluate(study(points, **how)) if claim.id == name]
    return found


def test_cases_cover_every_claim():
    assert [*CASES, *TOGETHER] == [claim.id for claim in DEFINED]
    assert {claim.section for claim in DEFINED} == (set(CLAIMS) | set(TRANSFORMER_CLAIMS)) - set(GENERAL)


@pytest.mark.parametrize("seeds", [5, 10])  # Student's t and bootstrap
@pytest.mark.parametrize("name", CASES)
def test_reproduced(name, seeds):
    claim = _claim(CASES[name][0], name, seeds=seeds)
    assert claim.verdict == "reproduced", claim
    assert all(one.passed and one.low <= one.value <= one.high and one.n == seeds for one in claim.checks)


@pytest.mark.parametrize(("name", "points", "failing"), [(name, *case) for name in CASES for case in CASES[name][1]])
def test_not_reproduced(name, points, failing):
    claim = _claim(points, name)
    assert claim.verdict == "not reproduced", claim
    assert any(failing in one.name and not one.passed for one in claim.checks)


@pytest.mark.parametrize("name", CASES)
def test_not_tested(name):
    points, note = CASES[name][2]
    claim = _claim(points, name)
    assert claim.verdict == "not tested", claim
    assert any(note in text for text in claim.notes)


def test_the_paper_is_judged_in_its_two_settings():
    verdicts = {(claim.id, claim.setting): claim.verdict for claim in evaluate(study(paper()))}
    assert verdicts.pop(("optimizer-free", "all settings")) == "not tested"
    assert ("no-residual", "init_gain=1") in verdicts
    assert set(verdicts.values()) == {"reproduced"}


def test_each_setting_gets_its_own_verdict():
    points = [*_at([RELU, NONE], model__init_gain=0.1), *_at([RELU, replace(NONE, peak=0.5)], model__init_gain=1.0)]
    found = {claim.setting: claim.verdict for claim in evaluate(study(points)) if claim.id == "residual-linear"}
    assert found == {"init_gain=0.1": "reproduced", "init_gain=1": "not reproduced"}


def test_each_matrix_gets_its_own_verdict():
    found = [c for c in evaluate(study([RELU, NONE], matrices=("gate", "up"))) if c.id == "residual-linear"]
    assert [claim.setting for claim in found] == ["Gate v1", "Up v1"]
    swept = study(_at([RELU, NONE], optim__lr=0.1) + _at([RELU, NONE], optim__lr=0.2), matrices=("gate", "down"))
    found = [c.setting for c in evaluate(swept) if c.id == "residual-linear"]
    assert found == ["Gate v1, lr=0.1", "Gate v1, lr=0.2", "Down u1, lr=0.1", "Down u1, lr=0.2"]


def test_few_noisy_seeds_prove_nothing():
    noisy = replace(RELU, peak=0.97, end=0.95, noise=0.08)
    claim = _claim([noisy], "residual-elementwise", seeds=3)
    end = claim.checks[0]
    assert end.value > 0.9 > end.low
    assert claim.verdict == "not reproduced"
    assert end.detail.startswith("undecided")


def test_a_failed_check_settles_a_claim_that_lacks_a_variant():
    points = [replace(RELU, end=0.5), replace(GELU, statuses=["diverged"] * 5)]
    claim = _claim(points, "residual-elementwise")
    assert claim.verdict == "not reproduced"
    assert any("5 diverged" in note for note in claim.notes)


def test_runs_that_did_not_finish_are_counted_and_left_out():
    claim = _claim([replace(RELU, statuses=["diverged", "unfinished"])], "residual-elementwise")
    assert claim.verdict == "reproduced"
    assert claim.checks[0].n == 3
    assert "Res+ReLU: 3 of 5 runs finished, 1 diverged, 1 unfinished" in claim.notes


def test_differences_pair_seeds_and_need_enough_of_them():
    points = [replace(NONE, statuses=["diverged"] * 2), replace(RELU, statuses=["finished"] * 3 + ["diverged"] * 2)]
    claim = _claim(points, "residual-linear")
    assert claim.verdict == "not tested"
    assert "Res+ReLU - Res+None: weight v1 at end: 1 runs, 3 needed" in claim.notes


def test_radial_is_shown_again_without_spiked_runs():
    claim = _claim([replace(RADIAL, spiked=2), RELU], "residual-radial")
    shown = [one for one in claim.checks if not one.decides]
    assert [one.n for one in shown] == [3, 3, 3]
    assert all("unspiked" in one.name for one in shown)
    assert any("2 with a loss spike" in note for note in claim.notes)
    all_spiked = _claim([replace(RADIAL, spiked=5), RELU], "residual-radial")
    assert all_spiked.verdict == "reproduced"  # what is shown for information decides nothing


def test_a_missing_twin_is_noted():
    claim = _claim([NO_RES], "no-residual")
    assert claim.verdict == "reproduced"
    assert any("no finished run of its residual twin Res+tanh" in one.detail for one in claim.checks)


def test_a_censored_crossing_is_counted_and_cannot_pass():
    claim = _claim([replace(RELU, transfer=0.45)], "transfer")
    ratio = claim.checks[1]
    assert ratio.detail.endswith("5 of 5 runs never cross")
    assert (ratio.passed, ratio.high) == (False, np.inf)


def test_optimizer_free_lists_every_setting_and_what_it_lacks():
    diverged = replace(RADIAL, statuses=["diverged"] * 5)
    points = [point for name in ("adam", "sgd", "muon") for point in _at([RELU, NONE, diverged], optim__name=name)]
    claim = _claim(points, "optimizer-free")
    assert claim.verdict == "reproduced"
    assert [one.name.split(":")[0] for one in claim.checks] == ["adam", "sgd", "muon"]
    assert "sgd: Res+Radial: 0 of 5 runs finished, 5 diverged" in claim.notes


def test_settings_that_differ_in_other_things_do_not_count_as_optimizers():
    points = [*_at([RELU, NONE], data__name="mnist"), *_at([RELU, NONE], data__name="kmnist")]
    assert _claim(points, "optimizer-free").verdict == "not tested"


@pytest.mark.parametrize(
    ("low", "high", "passed", "undecided"),
    [(0.6, 0.7, True, False), (0.4, 0.6, False, True), (0.1, 0.3, False, False), (0.1, 2.0, False, True)],
)
def test_a_check_passes_with_its_whole_interval_only(low, high, passed, undecided):
    found = check("", Interval(0.5, low, high, 5), at_least=0.5, at_most=1.0)
    assert (found.passed, found.detail.startswith("undecided")) == (passed, undecided)
    assert found.threshold == "in [0.5, 1]"


def test_thresholds_come_from_the_results():
    strict = CLAIMS | {"residual_elementwise": CLAIMS["residual_elementwise"] | {"end_min": 0.99}}
    assert _claim([RELU], "residual-elementwise", claims=strict).verdict == "not reproduced"
    many = CLAIMS | {"min_seeds": 6}
    claim = _claim([RELU], "residual-elementwise", claims=many)
    assert claim.verdict == "not tested"
    assert "Res+ReLU: 5 runs finished, 6 needed" in claim.notes


def test_only_claims_with_thresholds_are_judged():
    some = {name: rule for name, rule in CLAIMS.items() if name in (*GENERAL, "residual_elementwise", "concentration")}
    assert [claim.id for claim in evaluate(study([RELU], claims=some))] == ["residual-elementwise", "concentration"]


def test_thresholds_of_no_claim_and_of_unknown_claims_are_refused():
    with pytest.raises(GcjaxError, match="thresholds for no claim"):
        evaluate(study([RELU], claims={name: CLAIMS[name] for name in GENERAL}))
    with pytest.raises(GcjaxError, match="claims that are not known: gate_ablations"):
        evaluate(study([RELU], claims=CLAIMS | {"gate_ablations": {"with": "SiLU"}}))


def test_summary_has_a_row_a_point_with_counts_and_chance():
    rows = summary(study([at_chance("NoRes+ReLU", 0.45), replace(RADIAL, statuses=["diverged"], spiked=2)]))
    positive, radial = rows
    assert positive.baseline == pytest.approx(1 / np.pi)
    assert (radial.finished, radial.diverged, radial.unfinished, radial.spiked) == (4, 1, 0, 1)
    assert radial.baseline is None
    assert set(radial.cells) == set(COLUMNS) - {"perplexity_end"}
    assert radial.cells["weight_end"].null == pytest.approx(CHANCE)
    assert radial.cells["weight_end"].found.n == 4
    without = {name for name, cell in radial.cells.items() if cell.null is None}
    assert without == {"flagged_end", "ratio_frobenius_end", "ratio_spectral_end"}


def test_summary_keeps_the_order_of_the_results_and_shows_points_without_finished_runs():
    rows = summary(study([*paper(), replace(RELU, variant="Res+X", swept={"model.init_gain": 1.0}, statuses=["diverged"] * 5)]))
    assert [row.variant for row in rows][:6] == [
        "NoRes+tanh",
        "NoRes+None",
        "NoRes+ReLU",
        "Res+tanh",
        "Res+X",
        "Res+None",
    ]
    assert rows[4].finished == 0
    assert np.isnan(rows[4].cells["weight_end"].found.value)
