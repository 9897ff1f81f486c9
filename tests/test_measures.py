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
    np.testing.assert_allclose(numbers.weight_v1_end, 0.9, atol=0.01)
    np.testing.assert_allclose(numbers.weight_u1_end, 0.2, atol=0.01)


def test_measures_read_their_own_source_and_snapshot():
    point = Point("Res+None", peak=0.97, end=0.5, others=0.2, gradient_start=0.8, gradient=0.7, noise=0)
    numbers = _numbers(study([point])).isel(run=0)
    expected = {
        "weight_v1_start": synthetic.CHANCE,
        "weight_v1_peak": 0.97,
        "weight_v1_end": 0.5,
        "weight_v1_drop": 0.47,
        "gradient_v1_start": 0.8,
        "cumulative_v1_end": 0.7,
        "dominance_end": 0.3,
        "gram_end": 0.4,
        "sigma2_end": 0.35,
        "transfer_end": 0.9,
        "accuracy_end": 0.95,
        "accuracy_end_chance": 0.1,
        "gap_end_chance": 1.05,
        "overlap_end_chance": 4 / synthetic.WIDTH,
        "weight_v1_end_chance": synthetic.CHANCE,
    }
    assert {name: float(numbers[name]) for name in expected} == pytest.approx(expected, abs=0.02)


def test_every_number_has_its_chance_level():
    numbers = _numbers(study([Point("Res+ReLU")]))
    bare = {str(name) for name in numbers if not str(name).endswith("_chance") and f"{name}_chance" not in numbers}
    without = {"weight_v1_drop", "flagged_end", "spiked"}
    without |= {f"{name}_{norm}" for name in ("crossing", "censored") for norm in ("frobenius", "spectral")}
    assert bare == without | {f"ratio_{norm}_end" for norm in ("frobenius", "spectral")}


def test_a_shorter_run_ends_at_its_own_last_snapshot():
    ds = study([Point("Res+None", end=0.5)], seeds=2)
    shorter = ds.copy(deep=True)
    for name in ("loss", "cosine"):
        shorter[name][1, 11:] = np.nan  # padded after step 750, where v1 has not fallen yet
    ends = _numbers(shorter).weight_v1_end
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
