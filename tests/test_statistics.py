"""Intervals cover what they should, switch method at thirty runs, and seeds pair."""

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from gcjax.reporting.statistics import BOOTSTRAP_FROM, Interval, mean_interval, paired

FINITE = st.integers(-(10**6), 10**6).map(lambda i: i / 1e5)


def _coverage(n, draws):
    rng = np.random.default_rng(n)
    found = [mean_interval(rng.normal(0.5, 0.1, n), 0.95) for _ in range(draws)]
    return np.mean([one.low <= 0.5 <= one.high for one in found])


@pytest.mark.parametrize("n", [5, 10])
def test_student_interval_covers_as_often_as_it_says(n):
    assert _coverage(n, 1000) == pytest.approx(0.95, abs=3 * np.sqrt(0.95 * 0.05 / 1000))


def test_bootstrap_interval_covers_as_its_docstring_says():
    assert _coverage(BOOTSTRAP_FROM, 400) == pytest.approx(0.93, abs=3 * np.sqrt(0.93 * 0.07 / 400))


def test_student_for_few_runs_bootstrap_for_many():
    skewed = np.random.default_rng(0).exponential(size=BOOTSTRAP_FROM)
    few, many = mean_interval(skewed[:-1], 0.9), mean_interval(skewed, 0.9)
    np.testing.assert_allclose(
        (few.low, few.high), stats.t.interval(0.9, BOOTSTRAP_FROM - 2, few.value, stats.sem(skewed[:-1]))
    )
    assert few.high - few.value == pytest.approx(few.value - few.low)
    assert many.high - many.value > 1.05 * (many.value - many.low)  # the bootstrap follows the skew


@given(hnp.arrays(np.float64, st.integers(2, 12), elements=FINITE), FINITE)
def test_interval_holds_its_mean_and_moves_with_it(values, shift):
    here, there = mean_interval(values, 0.95), mean_interval(values + shift, 0.95)
    assert here.low <= here.value + 1e-12
    assert here.high >= here.value - 1e-12
    assert there.value == pytest.approx(here.value + shift, abs=1e-9)


def test_interval_is_the_same_every_time():
    values = np.random.default_rng(1).normal(size=20)
    assert mean_interval(values, 0.95) == mean_interval(values, 0.95)


@pytest.mark.parametrize("n", [3, 40])
def test_runs_that_agree_exactly_leave_no_width(n):
    found = mean_interval([0.7] * n, 0.95)
    assert (found.value, found.low, found.high, found.n) == pytest.approx((0.7, 0.7, 0.7, n))


def test_one_run_or_none_says_nothing():
    assert mean_interval([0.5], 0.95) == Interval(0.5, -np.inf, np.inf, 1)
    none = mean_interval([np.nan], 0.95)
    assert (none.n, none.low, none.high) == (0, -np.inf, np.inf)


def test_undefined_values_are_not_counted():
    assert mean_interval([0.1, np.nan, 0.3, np.inf], 0.95).n == 2


def _runs(seeds, values):
    return xr.DataArray(values, dims="run", coords={"seed": ("run", seeds)})


def test_differences_are_taken_seed_by_seed():
    np.testing.assert_allclose(paired(_runs([0, 1, 2], [1.0, 2.0, 4.0]), _runs([2, 3, 0], [1.0, 9.0, 0.5])), [0.5, 3.0])


def test_pairing_cancels_what_seeds_share():
    rng = np.random.default_rng(0)
    shared, own = rng.normal(size=8), 0.01 * rng.normal(size=8)
    difference = mean_interval(paired(_runs(range(8), shared + 1 + own), _runs(range(8), shared)), 0.95)
    assert difference.low > 0.95
    assert difference.high < 1.05


def test_a_seed_that_occurs_twice_is_refused():
    with pytest.raises(ValueError, match="duplicate"):
        paired(_runs([0, 0, 1], [1.0, 2.0, 3.0]), _runs([0, 1, 2], [0.0, 0.0, 0.0]))
