"""The paper's pictures, drawn from results: each function takes a study's dataset of one matrix and returns a Figure.
`trained` has those of a study of several matrices together.

A function raises `NoData`, saying why, where the results lack what it draws. Means are over finished runs.
"""

from collections.abc import Callable, Mapping

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gcjax.reporting import doses, measures, mechanism, panels, phases, spaces, trained
from gcjax.reporting.panels import CHANCE, GREY, Look, NoData, Point, colour, grid, line
from gcjax.reporting.statistics import mean_interval

EVENT = "#D55E00"
SPIKE: Look = {"color": EVENT, "marker": "v", "ls": "", "ms": 4, "mec": "none"}
DIVERGED: Look = {"color": EVENT, "marker": "x", "ls": "", "ms": 5, "mew": 1.2}
THIN: Look = {"lw": 0.5, "alpha": 0.4}
DOTTED: Look = {"color": GREY, "lw": 0.9, "ls": (0, (1, 1))}
DIAMOND: Look = {"mec": GREY, "mfc": "white", "marker": "D", "ls": "", "ms": 4}
BASELINE = "1/π: positive activations alone"
BY_SPACE: Mapping[str, Look] = {
    "input": {"ls": "-", "marker": "o", "ms": 3},
    "output": {"ls": "--", "marker": "o", "ms": 3, "mfc": "white"},
}


@panels.styled
def continuity_over_training(ds: xr.Dataset) -> Figure:
    """v1 of weights and of cumulative gradients against the training step: the paper's main figure, for every point."""
    shown, nats = panels.points(ds), measures.thresholds(ds)["spike"]
    figure, axes = grid(shown, "training step", panels.continuity_label(ds))
    space = measures.space(ds)
    for point, ax in zip(shown, axes):
        panels.chance_band(ax, ds)
        for source, look in _by_source(colour(point.variant)).items():
            ax.plot(ds.step, measures.continuity(point.every, source, space).T, **(look | THIN))
            ax.plot(ds.step, measures.continuity(point.runs, source, space).mean("run"), **look)
        if point.variant == measures.POSITIVE:
            ax.axhline(measures.POSITIVE_BASELINE, **DOTTED)
        _mark_events(ax, point, nats)
    panels.step_axis(axes[0], float(ds.step.max()))
    axes[0].set(ylim=(0, 1.12), yticks=[0, 0.5, 1])
    weights, gradients = _by_source("black").values()
    entries = [line("weights", **weights), line("cumulative gradients", **gradients), panels.band_entry()]
    entries += [line("loss spike", **SPIKE)] * bool(measures.spikes(ds, nats).any())
    entries += [line("diverged", **DIVERGED)] * bool((ds.status == "diverged").any())
    entries += [line(BASELINE, **DOTTED)] * bool((ds.variant == measures.POSITIVE).any())
    panels.legend(figure, entries, 3)
    return figure


def _by_source(tint: str) -> dict[str, Look]:
    return {
        "weight": {"color": tint, "zorder": 3},
        "cumulative_gradient": {"color": GREY, "ls": (0, (3, 1.5)), "zorder": 2},
    }


def _mark_events(ax: Axes, point: Point, nats: float) -> None:
    spiked = measures.spikes(point.every, nats).any("run").values
    ax.plot(point.every.step[spiked], np.full(spiked.sum(), 1.06), **SPIKE)
    lost = point.every.isel(run=(point.every.status == "diverged").values)
    if lost.sizes["run"]:
        last = measures.end_index(lost)
        ax.plot(
            lost.step[last], measures.continuity(lost, "weight", measures.space(lost)).isel(step=last), **DIVERGED, zorder=4
        )


@panels.styled
def beside_v1(ds: xr.Dataset) -> Figure:
    """v1 at the end beside what qualifies it: overlap, Gram alignment, gap, accuracy; each with its chance level."""
    shown, rules = panels.finished_somewhere(ds), measures.thresholds(ds)
    columns = {
        "weight_end": "v1",
        "overlap_end": f"overlap of the\nleading {ds.sizes['rank']}",
        "gram_end": "Gram alignment",
        "gap_end": "near-tie s₂/s₁",
        "accuracy_end": "test accuracy",
    }
    rows = [(point.title.replace("\n", "  "), point.runs, colour(point.variant)) for point in shown]
    figure, axes = panels.beside(rows, columns, rules)
    for row, point in enumerate(shown):
        if point.variant == measures.POSITIVE:
            axes[0].plot(measures.POSITIVE_BASELINE, row, **DIAMOND)
    entries = panels.beside_entries("chance (s₂/s₁, accuracy: before training)")
    entries += [line(BASELINE, **DIAMOND)] * bool((ds.variant == measures.POSITIVE).any())
    panels.legend(figure, [*entries, *panels.not_finished_entry(figure)], 3)
    return figure


@panels.styled
def rank_profile(ds: xr.Dataset) -> Figure:
    """Cosine against the singular rank at the end: concentrated in v1 or spread over many directions."""
    if ds.sizes["rank"] < 2:
        raise NoData("only the leading singular vectors were measured")

    def profile(end: xr.Dataset, space: str) -> xr.DataArray:
        return measures.over_pairs(end, "cosine", "weight", space)

    return _over_spaces(ds, ds["rank"].values, profile, "singular rank k")


@panels.styled
def lags(ds: xr.Dataset) -> Figure:
    """Continuity against the distance of two layers at the end: a basis shared by all layers, or one that drifts."""
    layers = ds.sizes["layer"]
    if layers < 3:
        raise NoData("lags need at least three layers")

    def diagonals(end: xr.Dataset, space: str) -> xr.DataArray:
        cosine = end.layer_cosine.sel(source="weight", space=space)
        means = [cosine.values.diagonal(lag, 1, 2).mean(1) for lag in range(1, layers)]
        return xr.DataArray(np.stack(means, 1), dims=("run", "lag"))

    return _over_spaces(ds, np.arange(1, layers), diagonals, "distance between layers")


def _over_spaces(ds: xr.Dataset, x: np.ndarray, profile: Callable[[xr.Dataset, str], xr.DataArray], xlabel: str) -> Figure:
    """`profile`, over run and `x`, of every point at the end in both spaces, with its interval and chance."""
    shown, confidence = panels.finished_somewhere(ds), measures.thresholds(ds)["confidence"]
    figure, axes = grid(shown, xlabel, "mean |cos| of singular vectors")
    for point, ax in zip(shown, axes):
        if not point.runs.sizes["run"]:
            panels.say_no_run(ax)
            continue
        end = measures.at_end(point.runs)
        for space, look in BY_SPACE.items():
            ax.axhline(float(ds.cosine_null.sel(space=space)), color=CHANCE, lw=2, zorder=0)
            found = [mean_interval(column, confidence) for column in profile(end, space).values.T]
            ax.plot(x, [one.value for one in found], color=colour(point.variant), **look)
            low, high = np.clip([[one.low for one in found], [one.high for one in found]], 0, 1)
            ax.fill_between(x, low, high, color=colour(point.variant), alpha=0.15, lw=0)
    axes[0].set(ylim=(0, 1.02), xticks=x if len(x) <= 8 else x[:: len(x) // 5])
    entries = [line(f"{space} space", color="black", **look) for space, look in BY_SPACE.items()]
    panels.legend(figure, [*entries, line("chance", color=CHANCE, lw=2)], 3)
    return figure


@panels.styled
def layer_cosines(ds: xr.Dataset) -> Figure:
    """|cos| of the leading vectors of any two layers at the end: input space above the diagonal, output space below."""
    shown, layers = panels.finished_somewhere(ds), ds.sizes["layer"]
    figure, axes = grid(shown, "layer", "layer", height=1.75)
    upper = np.triu(np.ones((layers, layers), bool))
    first, last = 0.5, layers + 0.5
    for point, ax in zip(shown, axes):
        ax.set_box_aspect(1)
        if not point.runs.sizes["run"]:
            panels.say_no_run(ax)
            continue
        cosine = measures.at_end(point.runs).layer_cosine.sel(source="weight").mean("run")
        both = np.where(upper, cosine.sel(space="input"), cosine.sel(space="output"))
        ax.imshow(both, vmin=0, vmax=1, cmap="viridis", extent=(first, last, last, first))
        ax.plot([first, last], [first, last], color="white", lw=1)
    axes[0].set(xticks=[1, layers], yticks=[1, layers])
    label = "|cos| of leading vectors; above diagonal: input space (v1), below: output space (u1)"
    image = next(ax.images[0] for ax in axes if ax.images)
    figure.colorbar(image, ax=axes, label=label, location="top", shrink=0.6, aspect=40)
    return figure


@panels.styled
def transfer(ds: xr.Dataset) -> Figure:
    """Transfer of the cumulative gradient's leading vector to the weight, against the update ratio in two norms."""
    shown, rules, space = panels.finished_somewhere(ds), measures.thresholds(ds), measures.space(ds)
    if "transfer" not in rules:
        raise NoData("the config sets no thresholds for transfer")
    level, vector = rules["transfer"]["crossing"], spaces.SYMBOLS[space]
    settings, norms = list(dict.fromkeys(point.setting for point in shown)), ds.norm.values.tolist()
    figure = Figure(figsize=(7.2, (2.3 if len(settings) < 3 else 1.5) * len(settings) + 0.3))
    axes = figure.subplots(len(settings), len(norms), sharex=True, sharey=True, squeeze=False)
    for point in shown:
        look = {"color": colour(point.variant), "ls": panels.dash(point.variant)}
        moved = point.runs.update_ratio.where(
            point.runs.update_ratio > 0
        )  # W = W_0 at step 0, and under a learning rate of zero
        taken = point.runs.transfer.sel(space=space).mean("layer")
        for norm, ax in zip(norms, axes[settings.index(point.setting)]):
            ratio = moved.sel(norm=norm).mean("layer")
            ax.plot(ratio.T, taken.T, **(look | THIN))
            ax.plot(np.exp(np.log(ratio).mean("run")), taken.mean("run"), **look)
    for setting, row in zip(settings, axes):
        for norm, ax in zip(norms, row):
            ax.axvline(1, color=GREY, lw=0.8)
            ax.axhline(level, **DOTTED)
            ax.axhline(float(ds.cosine_null.sel(space=space)), color=CHANCE, lw=2, zorder=0)
            where = "" if setting == measures.AS_CONFIGURED else f", {setting}"
            ax.set_title(f"{norm.capitalize()} norm{where}", loc="left")
    axes[0, 0].set(xscale="log", ylim=(0, 1.02))
    figure.supxlabel("update ratio ‖W - W₀‖ / ‖W₀‖, mean over layers", size=8)
    figure.supylabel(f"transfer |⟨{vector}(W), {vector}(C)⟩|, mean over layers", size=8)
    entries = [line(name, color=colour(name), ls=panels.dash(name)) for name in dict.fromkeys(p.variant for p in shown)]
    entries += [line("chance", color=CHANCE, lw=2), line("ratio 1", color=GREY, lw=0.8)]
    entries += [line(f"transfer {level:.3g}", **DOTTED)]
    figure.legend(handles=entries, loc="outside right upper", handlelength=2.6)
    return figure


FIGURES: tuple[Callable[[xr.Dataset], Figure], ...] = (
    continuity_over_training,
    beside_v1,
    rank_profile,
    layer_cosines,
    lags,
    transfer,
    doses.init_scale,
    doses.optimizers,
    *mechanism.FIGURES,
    *phases.FIGURES,
)


TOGETHER = {  # in a study of several matrices: what takes the place of a figure that each would have
    "continuity_over_training": "projections_over_training and gradients show it for every matrix",
    "beside_v1": "beside_continuity shows it for every matrix",
}


def draw(ds: xr.Dataset) -> tuple[dict[str, Figure], dict[str, str]]:
    """Every figure by name, and the reason for each that the results cannot fill; one set a matrix of the layer."""
    of_each = measures.matrices(ds)
    wanted: dict[str, tuple[Callable[[xr.Dataset], Figure], xr.Dataset]] = {}
    if "" not in of_each:
        wanted |= {figure.__name__: (figure, ds) for figure in trained.FIGURES}
    for matrix, of_matrix in of_each.items():
        for figure in FIGURES:
            if not matrix:
                wanted[figure.__name__] = (figure, of_matrix)
            elif figure.__name__ not in TOGETHER:
                wanted[f"{figure.__name__}-{matrix}"] = (figure, of_matrix)
    drawn, skipped = {}, {} if "" in of_each else dict(TOGETHER)
    for name, (figure, of_matrix) in wanted.items():
        try:
            drawn[name] = figure(of_matrix)
        except NoData as reason:
            skipped[name] = str(reason)
    return drawn, skipped
