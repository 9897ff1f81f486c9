"""The mechanism study's pictures, from studies whose answer is known beforehand."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from matplotlib.patches import Rectangle
from scipy.stats import spearmanr
from synthetic import CHANCE, Point, study

from gcjax.reporting import mechanism, panels, phases
from gcjax.reporting.panels import NoData

ENDS = {"Res+None": 0.3, "Res+Radial": 0.2, "Res+tanh": 0.4, "Res+softsign": 0.6, "Res+ReLU": 0.95}
LAYERS, RANKS = 5, 4


def _study(points, **how):
    return study(points, seeds=4, layers=LAYERS, ranks=RANKS, **how).isel(matrix=0)


def _factorial(follow):
    """A study whose quantity `asymmetry` is `follow(v1 at the end)`; the others are noise."""
    ds, rng = _study([Point(name, end=end, noise=0.001) for name, end in ENDS.items()]), np.random.default_rng(0)
    names = list(mechanism.CANDIDATES)
    activity = rng.random((ds.sizes["run"], ds.sizes["step"], LAYERS, len(names)))
    activity[..., 0] = np.array([follow(ENDS[name]) for name in ds.variant.values])[:, None, None]
    coords = {"quantity": names}
    return ds.assign(activity=xr.DataArray(activity, dims=("run", "step", "layer", "quantity"), coords=coords))


@pytest.mark.parametrize(("follow", "expected"), [(lambda v: v**3, 1.0), (lambda v: -v, -1.0)])
def test_what_goes_with_continuity_has_a_rank_correlation_of_one(follow, expected):
    found = mechanism.spearman(panels.points(_factorial(follow)), "asymmetry", 0.95)
    assert (found.value, found.low, found.high, found.n) == (pytest.approx(expected), *[pytest.approx(expected)] * 2, len(ENDS))


def test_other_correlations_are_scipy_s_and_their_intervals_hold_them():
    ds = _factorial(lambda v: v)
    shown = panels.points(ds)
    for quantity in mechanism.CANDIDATES:
        found = mechanism.spearman(shown, quantity, 0.95)
        means = [float(mechanism.over_training(point.runs, quantity).mean()) for point in shown]
        ends = [float(p.runs.cosine.sel(source="weight", space="input", rank=1).isel(step=-1).mean()) for p in shown]
        assert found.value == pytest.approx(spearmanr(means, ends).statistic)
        assert found.low <= found.value <= found.high


def test_the_mean_over_training_leaves_out_the_start():
    ds = _factorial(lambda v: 0.5)
    ds["activity"][:, 0] = 100
    np.testing.assert_allclose(mechanism.over_training(ds, "asymmetry"), 0.5)


def _contained(ds, at_peak, at_end):
    """Containment of neighbours, by rank, at the snapshot before the last and at the last; of others nothing."""
    dims = ("run", "full_step", "space", "layer", "layer_other", "rank")
    value = np.zeros([ds.sizes.get(dim, LAYERS) for dim in dims[:-2]] + [LAYERS, RANKS])
    near = np.abs(np.subtract.outer(range(LAYERS), range(LAYERS))) == 1
    for snapshot, levels in ((-2, at_peak), (-1, at_end)):
        value[:, snapshot, 0] = np.where(near[..., None], levels, 0)
    return ds.assign(containment=xr.DataArray(value, dims=dims))


def test_where_v1_went_is_read_off_the_neighbours():
    ds = _contained(_study([Point("Res+None"), Point("Res+ReLU")]), [0.9, 0.92, 0.94, 0.95], [0.2, 0.5, 0.6, 0.7])
    for when, levels in (("peak", [0.9, 0.92, 0.94, 0.95]), ("end", [0.2, 0.5, 0.6, 0.7])):
        np.testing.assert_allclose(mechanism.inside(ds, "input", when).mean("run"), levels)
    figure = mechanism.what_is_lost(ds)
    widths = np.reshape([bar.get_width() for bar in figure.axes[0].patches], (4, -1))  # 2 variants, peak and end
    np.testing.assert_allclose(widths.sum(1), 1)
    np.testing.assert_allclose(widths[1], [0.2, 0.3, 0.2, 0.3])  # ranks 1, 2, 4 and outside


def test_doses_are_drawn_in_their_order_one_panel_each():
    leaky = {"model.activation": "leaky_relu"}
    points = [
        Point(f"leaky {slope}", leaky | {"model.negative_slope": slope}, end=0.5 + 0.2 * slope) for slope in (1.0, 0.0, -1.0)
    ]
    ax = mechanism.dose_response(_study(points)).axes[0]
    end = next(one for one in ax.lines if one.get_ls() == "-" and len(one.get_xdata()) == 3)
    np.testing.assert_array_equal(end.get_xdata(), [-1, 0, 1])
    np.testing.assert_allclose(end.get_ydata(), [0.3, 0.5, 0.7], atol=0.02)


@pytest.mark.parametrize("figure", [*mechanism.FIGURES, *phases.FIGURES])
def test_a_study_of_something_else_has_no_such_figure(figure):
    with pytest.raises(NoData):
        figure(_study([Point("Res+None"), Point("Res+ReLU")]))


def _plane(**changes):
    gains, rates = (0.1, 0.3, 1.0), (1e-4, 1e-3, 1e-2)
    points = []
    for g, gain in enumerate(gains):
        for r, rate in enumerate(rates):
            points.append(Point("Res+ReLU", {"model.init_gain": gain, "optim.lr": rate}, end=(1 + g + 3 * r) / 10, noise=0))
    return [replace(point, **changes.get(str(i), {})) for i, point in enumerate(points)]


def test_a_phase_map_has_every_run_in_its_place_and_hatches_those_that_went_wrong():
    points = _plane(**{"5": {"statuses": ["diverged"] * 4}, "3": {"spiked": 1}})
    figure = phases.phase_maps(_study(points))
    end = np.ma.filled(figure.axes[1].images[0].get_array(), np.nan)  # gains upward, rates to the right
    expected = np.array([[(1 + g + 3 * r) / 10 for r in range(3)] for g in range(3)])
    expected[1, 2] = np.nan
    np.testing.assert_allclose(end, expected, atol=0.01)
    hatched = {(round(p.get_y() + 0.5), round(p.get_x() + 0.5)): p.get_hatch() for p in figure.axes[1].patches
               if isinstance(p, Rectangle)}  # fmt: skip
    assert hatched == {(1, 2): "xxxx", (1, 0): "////"}


def test_onset_comes_together_in_the_norm_that_decides_it():
    """Runs of three gains reach their onset at one spectral ratio; in Frobenius norm each has its own."""
    ds = _study([Point("Res+ReLU", {"model.init_gain": gain}, noise=0) for gain in (0.1, 0.3, 1.0)])
    v1 = ds.cosine.sel(source="weight", space="input", rank=1).mean("pair")
    spectral = np.exp(8 * (v1 - CHANCE)) * 1e-3
    factor = xr.DataArray(np.repeat([1.0, 2.0, 4.0], 4), dims="run")
    ratio = xr.concat([spectral * factor, spectral], "norm").expand_dims(layer=LAYERS).transpose("run", "step", "layer", "norm")
    titles = [ax.get_title(loc="left") for ax in phases.onset(ds.assign(update_ratio=(ratio.dims, ratio.values))).axes]
    spreads = {title.split(",")[1].split()[0]: float(title.split("onset ")[1].split()[0]) for title in titles}
    assert spreads["spectral"] == pytest.approx(0, abs=0.01)
    assert spreads["frobenius"] == pytest.approx(np.std(np.log([1, 2, 4]), ddof=1), abs=0.01)
