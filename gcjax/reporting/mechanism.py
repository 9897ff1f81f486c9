"""Why continuity is kept or lost: what predicts it, where the lost part went, and how it depends on doses of an activation.

Each function takes a study's dataset of one matrix and returns a Figure; it raises `NoData` where the results lack it.
"""

from collections.abc import Mapping

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter
from numpy.typing import NDArray

from gcjax.reporting import measures, panels
from gcjax.reporting.doses import PEAK_AND_END
from gcjax.reporting.panels import GREY, NoData, Point, line
from gcjax.reporting.statistics import Interval, mean_interval

CANDIDATES: Mapping[str, str] = {  # quantity of `activity` -> what the axis is called
    "asymmetry": "broken rotation symmetry",
    "nonlinear": "share that is not linear",
    "even": "even part",
    "mean": "mean of the activation",
    "input_mean": "mean of the hidden state",
    "u1_mean": "|cos| of u₁ and mean activation",
    "v1_mean": "|cos| of v₁ and mean hidden state",
    "gradient_mean": "gradient along mean hidden state",
}
LEADING = (1, 2, 4, 8, 16)
INSIDE = ("#08306b", "#2171b5", "#4292c6", "#9ecae1", "#deebf7")  # v1 itself, then mixed ever further inside
LEFT = "#D55E00"
DRAWS = 2000  # of the bootstrap
DOSES: Mapping[str, tuple[str, str]] = {  # swept field -> axis, and the activation that it is a dose of
    "model.negative_slope": ("slope of leaky ReLU below 0  (1 linear, 0 ReLU, -1 |x|)", "leaky_relu"),
    "model.activation_shift": ("c of tanh(x) + c", "tanh"),
    "model.activation_scale": ("a of tanh(a x) / a", "tanh"),
}


def over_training(ds: xr.Dataset, quantity: str) -> xr.DataArray:
    """A measure of `activity`, over `run`: mean over layers and over the snapshots after the first step."""
    return ds.activity.sel(quantity=quantity).isel(step=slice(1, None)).mean(["step", "layer"])


def spearman(shown: list[Point], quantity: str, confidence: float) -> Interval:
    """Rank correlation, over the variants' means, of a quantity with the v1 at the end; bootstrap over each variant's runs."""
    from scipy.stats import rankdata  # slow to import

    pairs = []
    for point in shown:
        end = measures.continuity(measures.at_end(point.runs), "weight", measures.space(point.runs)).values
        pairs.append((over_training(point.runs, quantity).values, end))

    def correlate(means: NDArray[np.float64]) -> float:
        x, y = rankdata(means[:, 0]), rankdata(means[:, 1])
        return float(np.corrcoef(x, y)[0, 1]) if np.ptp(x) and np.ptp(y) else np.nan

    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(DRAWS):
        rows = [rng.integers(0, len(x), len(x)) for x, _ in pairs]
        drawn.append(correlate(np.array([(x[row].mean(), y[row].mean()) for (x, y), row in zip(pairs, rows)])))
    low, high = np.nanquantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    value = correlate(np.array([(x.mean(), y.mean()) for x, y in pairs]))
    return Interval(value, float(low), float(high), len(pairs))


def _cells(ds: xr.Dataset) -> list[Point]:
    if "activity" not in ds:
        raise NoData("what activations do was not measured (config.measure.activity)")
    shown = [point for point in panels.finished_somewhere(ds) if point.runs.sizes["run"]]
    if len(shown) < 4:
        raise NoData("fewer than four variants finished")
    return shown


@panels.styled
def predictors(ds: xr.Dataset) -> Figure:
    """v1 at the end against what each explanation would have it depend on, a point a variant, with rank correlations."""
    shown, confidence = _cells(ds), measures.thresholds(ds)["confidence"]
    figure = Figure(figsize=(7.2, 4.6))
    axes = figure.subplots(2, 4, sharey=True).ravel()
    tints = panels.palette(point.variant for point in shown)
    markers = dict(zip(tints, "osD^vP*X<>hpd8" * len(shown)))
    for ax, (quantity, label) in zip(axes, CANDIDATES.items()):
        for point in shown:
            end = measures.continuity(measures.at_end(point.runs), "weight", measures.space(ds))
            x, y = (mean_interval(values, confidence) for values in (over_training(point.runs, quantity), end))
            look = {"color": tints[point.variant], "marker": markers[point.variant]}
            ax.errorbar(x.value, y.value, [[y.value - y.low], [y.high - y.value]], ms=4, mew=0, elinewidth=0.7, **look)
        found = spearman(shown, quantity, confidence)
        ax.set_title(f"rank corr. {found.value:.2f} [{found.low:.2f}, {found.high:.2f}]", loc="left", size=7)
        ax.set_xlabel(label, size=7)
        panels.chance_band(ax, ds)
    axes[0].set(ylim=(0, 1.02))
    figure.supylabel(panels.continuity_label(ds, " at end"), size=8)
    entries = [line(name, color=tints[name], marker=markers[name], ls="", ms=4, mew=0) for name in tints]
    panels.legend(figure, [*entries, panels.band_entry()], 5)
    return figure


def inside(runs: xr.Dataset, space: str, when: str) -> xr.DataArray:
    """How much of v1 is in the next layer's leading k-dimensional subspace, over run and `rank`, at the peak or the end.

    The peak is the kept snapshot of highest mean containment at k = 1.
    """
    layers = runs.sizes["layer"]
    contained = runs.containment.sel(space=space).transpose("run", "full_step", "rank", "layer", "layer_other")
    pairs = (contained.values.diagonal(1, 3, 4) + contained.values.diagonal(-1, 3, 4)) / 2
    assert pairs.shape[-1] == layers - 1
    mean = xr.DataArray(pairs.mean(-1), dims=("run", "full_step", "rank"), coords={"rank": runs["rank"]})
    if when == "end":
        return mean.isel(full_step=-1)
    return mean.isel(full_step=mean.sel(rank=1, drop=True).fillna(-1).argmax("full_step"))


@panels.styled
def what_is_lost(ds: xr.Dataset) -> Figure:
    """Where the next layer has v1, at the peak and at the end: along its own v1, inside its leading subspaces, outside them."""
    if "containment" not in ds:
        raise NoData("the results hold no subspaces of several layers; train again")
    shown = [point for point in panels.finished_somewhere(ds) if point.runs.sizes["run"]]
    ranks = [k for k in LEADING if k <= ds.sizes["rank"]]
    figure = Figure(figsize=(7.2, 0.34 * len(shown) + 1.3))
    axes = figure.subplots(1, 2, sharey=True, width_ratios=(4, 1))
    for row, point in enumerate(shown):
        for offset, when in ((-0.2, "peak"), (0.2, "end")):
            found = inside(point.runs, measures.space(ds), when).mean("run")
            levels = [0.0, *(float(found.sel(rank=k)) for k in ranks), 1.0]
            for low, high, tint in zip(levels, levels[1:], [*INSIDE[: len(ranks)], LEFT]):
                axes[0].barh(row + offset, high - low, 0.36, low, color=tint, lw=0)
            axes[0].text(-0.005, row + offset, when, ha="right", va="center", size=5.5, color=GREY)
        gap = 1 / measures.at_end(point.runs).gap.sel(source="weight").median("layer")
        panels.dot(axes[1], row, gap, measures.thresholds(ds)["confidence"], sideways=True, color="black")
    axes[0].set_yticks(range(len(shown)), [point.title.replace("\n", "  ") for point in shown])
    axes[0].tick_params(axis="y", length=0, pad=20)
    axes[0].set(xlim=(0, 1), ylim=(len(shown) - 0.5, -0.5), xlabel="share of v₁ (squared cosines), mean over adjacent layers")
    axes[1].set(xlim=(0, 1.02), xlabel="near-tie s₂/s₁ at end")
    names = ["along v₁", *(f"mixed within {k}" for k in ranks[1:]), f"outside the leading {ranks[-1]}"]
    chance = f"chance within {ranks[-1]}: {float(ds.overlap_null.sel(space=measures.space(ds)).isel(rank=-1)):.2f}"
    entries = [Patch(color=tint, lw=0, label=name) for name, tint in zip(names, [*INSIDE[: len(ranks)], LEFT])]
    panels.legend(figure, [*entries, Patch(color="none", label=chance)], 4)
    return figure


@panels.styled
def dose_response(ds: xr.Dataset) -> Figure:
    """Peak and end of v1 against doses of nonlinearity, of even part and of mean."""
    used = [path for path in DOSES if path in ds.coords and len(measures.distinct(_dosed(ds, path)[path])) > 2]
    if not used:
        raise NoData("the study sweeps no dose of an activation")
    confidence = measures.thresholds(ds)["confidence"]
    figure = Figure(figsize=(2.5 * len(used) + 0.6, 3.0))
    axes = figure.subplots(1, len(used), sharey=True, squeeze=False)[0]
    for ax, path in zip(axes, used):
        runs = measures.finished(_dosed(ds, path))
        numbers = measures.per_run(runs, measures.thresholds(ds))
        doses = sorted(measures.distinct(runs[path]))
        for name, look in PEAK_AND_END.items():
            values = [numbers[name].values[(numbers[path] == dose).values] for dose in doses]
            ax.plot(doses, [one.mean() for one in values], color="black", ls=look["ls"], lw=1)
            for dose, one in zip(doses, values):
                panels.dot(ax, dose, one, confidence, color="black", **look)
        panels.chance_band(ax, ds)
        ax.set_xlabel(DOSES[path][0], size=7)
        if min(doses) >= 0 and max(doses) / max(min(d for d in doses if d > 0), 1e-9) > 20:
            ax.set_xscale("symlog", linthresh=min(d for d in doses if d > 0))
            ax.set_xticks(doses, [f"{dose:g}" for dose in doses])
            ax.xaxis.set_minor_formatter(NullFormatter())
    axes[0].set(ylim=(0, 1.02), ylabel=panels.continuity_label(ds))
    entries = [
        line("peak", color="black", ls="--", marker="o", mfc="white", ms=4),
        line("end", color="black", marker="o", ms=4),
    ]
    panels.legend(figure, [*entries, panels.band_entry()], 3)
    return figure


def _dosed(ds: xr.Dataset, path: str) -> xr.Dataset:
    """The runs of a dose's activation whose other doses are as configured."""
    activation = ds["model.activation"] if "model.activation" in ds.coords else None
    keep = np.ones(ds.sizes["run"], bool) if activation is None else (activation == DOSES[path][1]).values
    for other in DOSES:
        if other != path and other in ds.coords:
            keep &= (ds[other] == (1.0 if other.endswith("scale") else 0.0)).values
    return ds.isel(run=keep)


FIGURES = (predictors, what_is_lost, dose_response)
