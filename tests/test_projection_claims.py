"""A trained transformer's projections: the claims about them from planted patterns, matrix by matrix in its own space."""

from dataclasses import replace

import numpy as np
import pytest
from synthetic import CHANCE, PROJECTIONS, TRANSFORMER_CLAIMS, Point, ablated, study, transformer

from gcjax.reporting.claims import Claim, evaluate
from gcjax.reporting.summary import headings, legend, summary

SILU, NONE = transformer("SiLU"), ablated()


def _study(points, **how):
    return study(points, **{"matrices": PROJECTIONS, "claims": TRANSFORMER_CLAIMS, "language": True} | how)


def _claim(points, name, **how) -> Claim:
    (found,) = [claim for claim in evaluate(_study(points, **how)) if claim.id == name]
    return found


def test_a_transformer_is_judged_by_its_own_claims_matrix_by_matrix():
    found = evaluate(_study([SILU, NONE]))
    assert list(dict.fromkeys(claim.id for claim in found)) == ["gradient-first", "transfer", "projections", "gate-ablation"]
    labels = ["Q v1", "K v1", "V v1", "O u1", "Gate v1", "Up v1", "Down u1"]
    for name in ("gradient-first", "transfer"):
        assert [claim.setting for claim in found if claim.id == name] == labels
    assert {claim.verdict for claim in found} == {"reproduced"}


def test_check_names_say_in_which_space():
    for claim in evaluate(_study([SILU, NONE])):
        if claim.id == "gradient-first":
            vector = claim.setting.split()[1]
            assert all(f" {vector} " in one.name for one in claim.checks)
    names = [one.name for one in _claim([SILU, NONE], "gate-ablation").checks if one.decides]
    assert names == [
        "SiLU - None: Gate weight v1 at end",
        "SiLU - None: Up weight v1 at end",
        "SiLU - None: Q weight v1 at end",
        "SiLU - None: K weight v1 at end",
        "SiLU - None: O weight u1 at end",
        "SiLU - None: Down weight u1 at end",
    ]


@pytest.mark.parametrize("seeds", [3, 10])
def test_the_pattern_is_reproduced_with_every_projection_judged(seeds):
    claim = _claim([SILU], "projections", seeds=seeds)
    assert claim.verdict == "reproduced"
    deciding = [one for one in claim.checks if one.decides]
    assert len(deciding) == 14
    assert all(one.passed and one.n == seeds for one in deciding)
    (v1,) = [one for one in deciding if one.name == "SiLU: V weight v1"]
    assert v1.value == pytest.approx(CHANCE, abs=0.01)


@pytest.mark.parametrize("matrix", PROJECTIONS)
def test_a_projection_in_the_wrong_space_is_found(matrix):
    swapped = {"v": {"end": 0.3, "peak": 0.3}, "o": {"space": "input"}, "down": {"space": "input"}}
    claim = _claim([transformer("SiLU", {matrix: swapped.get(matrix, {"space": "output"})})], "projections")
    assert claim.verdict == "not reproduced"
    failed = {one.name.split()[1] for one in claim.checks if one.decides and not one.passed}
    assert failed == {matrix.capitalize()}


def test_v_must_be_at_chance_in_both_spaces():
    claim = _claim([transformer("SiLU", {"v": {"output": 0.4}})], "projections")
    assert [one.name for one in claim.checks if one.decides and not one.passed] == ["SiLU: V weight u1"]


def test_a_second_weaker_space_does_not_contradict_the_pattern():
    assert _claim([transformer("SiLU", {"gate": {"output": 0.4}})], "projections").verdict == "reproduced"
    assert _claim([transformer("SiLU", {"gate": {"output": 0.9}})], "projections").verdict == "not reproduced"


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({"gate": {"end": 0.75}}, "Gate"),
        ({"up": {"end": 0.75}}, "Up"),
        ({"q": {"end": 0.6}}, "Q"),
        ({"k": {"peak": 0.95, "end": 0.95}}, "K"),
        ({"o": {"space": "output", "end": 0.6}}, "O"),
        ({"down": {"space": "input"}}, "Down"),
    ],
)
def test_gate_ablation_fails_on_a_gate_that_stays_and_on_others_that_move(changes, failing):
    claim = _claim([SILU, ablated(**changes)], "gate-ablation")
    assert claim.verdict == "not reproduced"
    assert [one.name.split()[3] for one in claim.checks if one.decides and not one.passed] == [failing]


def test_v_and_its_gradients_come_out_as_measured():
    """Where the paper says nothing of a matrix's gradients: coherent in V's input space, and never in its output space."""
    found = {claim.setting: claim for claim in evaluate(_study([SILU])) if claim.id == "gradient-first"}
    assert found["V v1"].verdict == "reproduced"
    assert any("of V in neither space" in note for note in found["V v1"].notes)
    assert not any("of V" in note for note in found["Q v1"].notes)
    weak = transformer("SiLU", {"k": {"gradient_start": 0.24}})
    found = {claim.setting: claim for claim in evaluate(_study([weak])) if claim.id == "gradient-first"}
    assert [name for name, claim in found.items() if claim.verdict == "not reproduced"] == ["K v1"]


def test_the_whole_interval_must_stay_within():
    noisy = {"end": 0.74, "noise": 0.06}
    claim = _claim([SILU, ablated(q=noisy)], "gate-ablation", seeds=4)
    (moved,) = [one for one in claim.checks if one.name == "SiLU - None: Q weight v1 at end"]
    assert abs(moved.value) < 0.1 < max(abs(moved.low), abs(moved.high))
    assert moved.detail.startswith("undecided")
    assert moved.threshold == "within ±0.1"
    assert claim.verdict == "not reproduced"


def test_pairs_of_seeds_are_needed():
    lost = replace(NONE, statuses=["diverged", "diverged"])
    late = replace(SILU, statuses=["finished", "finished", "finished", "diverged", "diverged"])
    claim = _claim([late, lost], "gate-ablation")
    assert claim.verdict == "not tested"
    assert "SiLU - None: Gate weight v1 at end: 1 runs, 3 needed" in claim.notes


@pytest.mark.parametrize(
    ("points", "how", "note"),
    [
        ([SILU], {}, "no run of None"),
        ([SILU, NONE], {"seeds": 2}, "SiLU: 2 runs finished, 3 needed"),
        ([SILU, NONE], {"matrices": ("q", "k", "v", "o", "up", "down")}, "no projection gate"),
    ],
)
def test_gate_ablation_is_not_tested(points, how, note):
    claim = _claim(points, "gate-ablation", **how)
    assert (claim.verdict, claim.checks) == ("not tested", ())
    assert note in claim.notes


def test_projections_of_a_net_that_has_none_are_not_tested():
    claim = _claim([Point("SiLU")], "projections", matrices=("hidden",), language=False)
    assert (claim.verdict, claim.notes) == ("not tested", ("no projection q, k, v, o, gate, up, down",))


def test_the_way_to_the_end_is_shown_and_decides_nothing():
    passing = transformer("SiLU", {"v": {"peak": 0.6, "end": CHANCE, "others": CHANCE, "output": CHANCE}})
    claim = _claim([passing], "projections")
    assert claim.verdict == "reproduced"
    shown = {one.name: one for one in claim.checks if not one.decides}
    assert set(shown) == {
        "SiLU: Gate weight v1, peak",
        "SiLU: Up weight v1, peak",
        "SiLU: V weight v1, peak",
        "SiLU: V weight u1, peak",
    }
    peak = shown["SiLU: V weight v1, peak"]
    assert peak.value == pytest.approx(0.6, abs=0.03)
    assert (peak.threshold, peak.detail) == ("", "at step 500")
    ablation = [one.name for one in _claim([passing, NONE], "gate-ablation").checks if not one.decides]
    assert ablation == [f"{variant}: {name} weight v1, peak" for name in ("Gate", "Up") for variant in ("SiLU", "None")]


def test_settings_are_judged_one_by_one_and_variants_of_the_architecture_are_none():
    points = [replace(one, swept={"optim.lr": rate}) for rate in (1e-3, 3e-3) for one in (SILU, NONE)]
    found = [claim for claim in evaluate(_study(points)) if claim.id == "gate-ablation"]
    assert [claim.setting for claim in found] == ["lr=0.001", "lr=0.003"]
    linear = replace(transformer("linear attention"), swept={"model.attention": "linear", "model.rope": False})
    usual = replace(SILU, swept={"model.attention": "softmax", "model.rope": True})
    (claim,) = [claim for claim in evaluate(_study([usual, linear])) if claim.id == "projections"]
    assert claim.setting == "as configured"


def test_the_summary_has_a_row_a_matrix_and_variant_in_its_own_space():
    rows = summary(_study([SILU, NONE], seeds=3))
    assert [(row.matrix, row.variant) for row in rows] == [(m, v) for m in PROJECTIONS for v in ("SiLU", "None")]
    assert [row.space for row in rows[::2]] == ["input", "input", "input", "output", "input", "input", "output"]
    down = rows[-2]
    assert down.setting == "Down u1"
    assert down.cells["weight_end"].found.value == pytest.approx(0.8, abs=0.02)
    assert down.cells["weight_other_end"].found.value < 0.1
    assert "accuracy_end" not in down.cells
    assert down.cells["perplexity_end"].found.value == pytest.approx(np.exp(3.5 + 0.05 * (np.log(4096) - 3.5) / 2.3), rel=0.01)
    assert list(headings(rows).values())[:4] == ["own peak", "own end", "grad own", "other"]
    assert "V, of which it" in legend(rows, 4)


def test_headings_of_one_matrix_name_its_vectors():
    rows = summary(study([Point("Res+ReLU")], seeds=3))
    assert list(headings(rows).values())[:4] == ["v1 peak", "v1 end", "grad v1", "u1"]
    assert "own:" not in legend(rows, 4)
