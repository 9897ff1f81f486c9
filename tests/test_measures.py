"""What is read from results: ends, spikes, crossings, settings, chance levels; input and output space never swapped."""

import json

import numpy as np
import pytest
import synthetic
from synthetic import Point, study

from gcjax.errors import GcjaxError
from gcjax.reporting import measures


def _numbers(ds):
    return measures.per_run(measures.matrices(ds)[""], measures.thresholds(ds))


def test_v1_is_the_input_space_and_u1_the_output_space():
    numbers = _numbers(study([Point("Res+ReLU", end=0.9, output=0.2, noise=0)]))
    np.testing.assert_allclose(numbers.weight_end, 0.9, atol=0.01)
    np.testing.assert_allclose(numbers.weight_other_end, 0.2, atol=0.01)


def test_measures_read_their_own_source_and_snapshot():
    point = Point("Res+None", peak=0.97, end=0.5, others=0.2, gradient_start=0.8, gradient=0.7, noise=0)
    numbers = _numbers(study([point])).isel(run=0)
    expected = {
        "weight_start": synthetic.CHANCE,
        "weight_peak": 0.97,
        "weight_end": 0.5,
        "weight_drop": 0.47,
        "gradient_start": 0.8,
        "cumulative_end": 0.7,
        "dominance_end": 0.3,
        "gram_end": 0.4,
        "sigma2_end": 0.35,
        "transfer_end": 0.9,
        "accuracy_end": 0.95,
        "accuracy_end_chance": 0.1,
        "gap_end_chance": 1.05,
        "overlap_end_chance": 4 / synthetic.WIDTH,
        "weight_end_chance": synthetic.CHANCE,
    }
    assert {name: float(numbers[name]) for name in expected} == pytest.approx(expected, abs=0.02)


def test_every_number_has_its_chance_level():
    numbers = _numbers(study([Point("Res+ReLU")]))
    bare = {str(name) for name in numbers if not str(name).endswith("_chance") and f"{name}_chance" not in numbers}
    without = {"weight_drop", "weight_peak_step", "weight_other_peak_step", "flagged_end", "spiked"}
    without |= {f"{name}_{norm}" for name in ("crossing", "censored") for norm in ("frobenius", "spectral")}
    assert bare == without | {f"ratio_{norm}_end" for norm in ("frobenius", "spectral")}


def test_a_shorter_run_ends_at_its_own_last_snapshot():
    ds = study([Point("Res+None", end=0.5)], seeds=2)
    shorter = ds.copy(deep=True)
    for name in ("loss", "cosine"):
        shorter[name][1, 11:] = np.nan  # padded after step 750, where v1 has not fallen yet
    ends = _numbers(shorter).weight_end
    assert ends[0] < 0.6
    assert ends[1] > 0.9


def test_spikes_are_late_high_and_far_above_what_was_reached():
    ds = study([Point("Res+Radial", spiked=1)], seeds=3)
    assert _numbers(ds).spiked.values.tolist() == [True, False, False]
    early, small, unlearned = ds.copy(deep=True), ds.copy(deep=True), ds.copy(deep=True)
    early["loss_max"][:] = np.where(ds.step < 900, 9.0, 0.1)
    small["loss_max"][:] = 0.9
    unlearned["loss"][:], unlearned["loss_max"][:] = 2.3, 9.0
    for one in (early, small, unlearned):
        assert not _numbers(one).spiked.any()


def test_a_language_model_spikes_where_it_falls_back_behind_what_it_had_learned():
    ds = study([synthetic.transformer("SiLU")], seeds=2, matrices=synthetic.PROJECTIONS, language=True)
    assert not measures.spikes(ds, 8.0).any()
    ds["loss_max"][1, -3] = 9.0
    assert measures.spikes(ds, 8.0).any("step").values.tolist() == [False, True]
    ds["loss"][:] = np.where(ds.step < 3000, 8.3, 5.0)  # falls late, within the interval whose first losses are high
    ds["loss_max"][:] = np.where(ds.step <= 3000, 8.4, 6.0)
    assert not measures.spikes(ds, 8.0).any()
    ds["loss"][:], ds["loss_max"][:] = 8.3, 9.0  # those of a run that never learned
    assert not measures.spikes(ds, 8.0).any()


def test_perplexity_is_of_language_models_alone():
    text = study([synthetic.transformer("SiLU")], seeds=2, matrices=synthetic.PROJECTIONS, language=True)
    numbers = measures.per_run(measures.matrices(text)["gate"], measures.thresholds(text))
    np.testing.assert_allclose(numbers.perplexity_end, np.exp(text.test_loss[:, -1]), rtol=1e-6)
    np.testing.assert_allclose(numbers.perplexity_end_chance, np.exp(text.test_loss[:, 0]), rtol=1e-6)
    assert "perplexity_end" not in _numbers(study([Point("Res+ReLU")]))


OWN = {
    "weight_start": 0.2,
    "weight_peak": 0.9,
    "weight_end": 0.85,
    "gradient_start": 0.7,
    "cumulative_end": 0.8,
    "transfer_end": 0.95,
    "gram_end": 0.8 * 0.85,
    "sigma2_end": 0.7 * 0.85,
    "dominance_end": 0.85 - 0.4,
    "overlap_end": (0.85**2 + 3 * 0.4**2) / 4,
}


@pytest.mark.parametrize("planted", ["input", "output"])
@pytest.mark.parametrize("matrix", synthetic.PROJECTIONS)
def test_every_number_is_of_the_space_that_is_the_matrix_s_own(matrix, planted):
    curve = {"start": 0.2, "peak": 0.9, "end": 0.85, "output": synthetic.CHANCE, "others": 0.4, "gradient_start": 0.7}
    curve |= {"gradient": 0.8, "transfer": 0.95, "noise": 0.0, "space": planted}
    blind = {"peak": synthetic.CHANCE, "end": synthetic.CHANCE, "output": synthetic.CHANCE, "others": synthetic.CHANCE}
    everywhere = dict.fromkeys(synthetic.PROJECTIONS, blind | {"noise": 0.0})
    ds = study([Point("SiLU", matrices=everywhere | {matrix: curve})], seeds=1, matrices=synthetic.PROJECTIONS)
    numbers = measures.per_run(measures.matrices(ds)[matrix], measures.thresholds(ds)).isel(run=0)
    own = "output" if matrix in ("o", "down") else "input"
    assert numbers.attrs["space"] == own
    found = {name: float(numbers[name]) for name in OWN}
    if planted == own:
        assert found == pytest.approx(OWN, abs=0.02)
        assert float(numbers.weight_other_end) == pytest.approx(synthetic.CHANCE, abs=0.02)
    else:
        assert max(found.values()) < 0.1
        assert float(numbers.weight_other_end) == pytest.approx(0.85, abs=0.02)
        assert float(numbers.weight_other_peak) == pytest.approx(0.9, abs=0.02)


def test_chance_levels_are_of_the_same_space_as_their_numbers():
    ds = study([Point("SiLU")], seeds=1, matrices=synthetic.PROJECTIONS)
    wide, narrow = synthetic.chance(synthetic.MLP_WIDTH), synthetic.CHANCE
    for matrix, levels in {"q": (narrow, narrow), "gate": (narrow, wide), "down": (narrow, wide)}.items():
        numbers = measures.per_run(measures.matrices(ds)[matrix], measures.thresholds(ds)).isel(run=0)
        found = (float(numbers.weight_end_chance), float(numbers.weight_other_end_chance))
        assert found == pytest.approx(levels), matrix
        assert float(numbers.overlap_end_chance) == pytest.approx(4 / synthetic.WIDTH)


def test_projections_come_in_the_order_of_their_use():
    ds = study([Point("SiLU")], seeds=1, matrices=sorted(synthetic.PROJECTIONS))
    assert tuple(measures.matrices(ds)) == synthetic.PROJECTIONS


def test_crossing_interpolates_the_ratio_geometrically():
    assert measures.crossing(np.array([np.nan, 0.2, 0.4, 0.6]), np.array([0, 0.1, 1.0, 4.0]), 0.5) == (
        pytest.approx(2.0),
        0,
    )


@pytest.mark.parametrize(
    ("transfer", "expected"), [([np.nan, 0.1, 0.2], (3.0, 1)), ([np.nan, 0.7, 0.2], (2.0, -1)), ([np.nan] * 3, None)]
)
def test_a_crossing_that_was_not_seen_is_censored(transfer, expected):
    value, side = measures.crossing(np.array(transfer), np.array([0.0, 2.0, 3.0]), 0.5)
    if expected is None:
        assert np.isnan(value)
    else:
        assert (value, side) == (pytest.approx(expected[0]), expected[1])


def test_a_setting_is_what_was_swept_beside_variant_and_seed():
    swept = [("adam", 1e-3, 0.999), ("adam", 3e-4, 0.0), ("sgd", 0.1, 0.999)]
    points = [Point("Res+ReLU", {"optim.name": name, "optim.lr": lr, "optim.b2": b2}) for name, lr, b2 in swept]
    ds = study(points, seeds=1)
    ds.attrs["sweep"] = json.dumps([*json.loads(ds.attrs["sweep"]), "seed"])
    assert measures.settings(ds) == ["adam", "adam, lr=0.0003, b2=0", "sgd, lr=0.1"]
    assert measures.settings(ds, lambda path: path == "optim.b2") == ["b2=0.999", "b2=0", "b2=0.999"]
    assert measures.settings(ds.isel(run=[0])) == [measures.AS_CONFIGURED]


def test_paths_with_the_same_last_part_are_told_apart():
    points = [Point("Res+ReLU", {"optim.name": optim, "data.name": data}) for optim, data in (("a", "x"), ("b", "y"))]
    assert measures.settings(study(points, seeds=1)) == ["optim.name=a", "optim.name=b, data.name=y"]


def test_results_without_thresholds_are_refused():
    with pytest.raises(GcjaxError, match="no 'claims'"):
        measures.thresholds(study([Point("Res+ReLU")], claims=None))
