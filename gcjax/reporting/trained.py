"""Pictures of a study whose layers have several matrices: each function takes the whole dataset and returns a Figure.

Up to `TOGETHER` points of the study share panels, told apart by line style or fill; more have a row of panels each. Means
are over finished runs.
"""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

from gcjax.reporting import measures, panels, spaces
from gcjax.reporting.panels import CHANCE, GREY, Look, NoData, Point, line
from gcjax.reporting.portraits import COLOURS, LABELS

TOGETHER = 3
DASHES = ("-", (0, (3, 1.5)), (0, (1, 1)))
WEIGHT: Look = {"ls": "-"}
GRADIENT: Look = {"ls": (0, (3, 1.5)), "lw": 1}
MEAN_OF_PAIRS = "mean |cos| of adjacent layers"


def _groups(ds: xr.Dataset) -> list[list[Point]]:
    shown = panels.finished_somewhere(ds)
    return [shown] if len(shown) <= TOGETHER else [[point] for point in shown]


def _tints(shown: Sequence[Point]) -> dict[str, str]:
    """A colour for each point, by its title: its variant's, as long as no two have the same."""
    found = panels.palette(point.variant for point in shown)
    if len(found) < len(shown):
        return panels.palette(point.title for point in shown)
    return {point.title: found[point.variant] for point in shown}


def _title(point: Point) -> str:
    return point.title.replace("\n", ", ")


def _grid(
    ds: xr.Dataset, groups: Sequence[Sequence[Point]], head: Callable[[Axes, str], None]
) -> tuple[Figure, Iterator[tuple[Axes, str, Point]]]:
    """A figure with a panel for every projection, against the training step; then each panel with each of its points.

    `head` titles a projection's panel, the topmost where there are several.
    """
    names = spaces.ordered(ds.matrix.values.tolist())
    together = len(groups) == 1
    columns = min(len(names), 4) if together else len(names)
    rows = -(-len(names) // columns) if together else len(groups)
    figure = Figure(figsize=(max(1.35 * columns + 0.5, 7.2), (1.45 if together else 1.1) * rows + 0.8))
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    _step_axis(axes[0, 0], ds)
    axes[0, 0].set(ylim=(0, 1.02), yticks=[0, 0.5, 1])
    used = axes.ravel()[: len(names) * len(groups)]
    for ax in axes.ravel()[len(used) :]:
        ax.set_visible(False)
    for ax in used[-columns:]:
        ax.tick_params(labelbottom=True)
    for ax, name in zip(used, names):
        head(ax, name)
    if not together:
        for row, (point,) in zip(axes, groups):
            row[0].set_ylabel(textwrap.fill(_title(point), 17), size=7)
            if not point.runs.sizes["run"]:
                panels.say_no_run(row[0])
    figure.supxlabel("training step", size=8)
    figure.supylabel(MEAN_OF_PAIRS, size=8)
    owners = [group for group in groups for _ in names]
    return figure, ((ax, name, point) for ax, name, group in zip(used, names * len(groups), owners) for point in group)


def _step_axis(ax: Axes, ds: xr.Dataset) -> None:
    last = float(ds.step.max())
    panels.step_axis(ax, last)
    ax.xaxis.set_minor_locator(
        FixedLocator([k * 10**power for power in range(12) for k in range(1, 10) if k * 10**power <= last])
    )


def _curve(ax: Axes, value: xr.DataArray, colour: str, **look: Any) -> None:
    """The mean over runs, and where all of them lie."""
    known = value.transpose("run", "step").dropna("step", how="all")
    if not known.size:
        return
    ax.plot(known.step, known.mean("run"), color=colour, **look)
    if known.sizes["run"] > 1:
        ax.fill_between(known.step, known.min("run"), known.max("run"), color=colour, alpha=0.18, lw=0)


@panels.styled
def projections_over_training(ds: xr.Dataset) -> Figure:
    """Weight continuity of every projection in both spaces against the training step."""
    groups = _groups(ds)
    shared = groups[0] if len(groups) == 1 else []
    dashes = {point.title: dash for point, dash in zip(shared, DASHES)}
    figure, drawn = _grid(ds, groups, _predicted)
    for ax, name, point in drawn:
        one = point.runs.sel(matrix=name)
        levels = one.cosine_mean_null_quantile
        ax.axhspan(float(levels.min()), float(levels.max()), color=CHANCE, lw=0, zorder=0)
        for space in spaces.LABELS:
            _curve(ax, measures.continuity(one, "weight", space), COLOURS[space], ls=dashes.get(point.title, "-"))
    entries = [line(label, color=COLOURS[space]) for space, label in LABELS.items()]
    entries += [line(_title(point), color="black", ls=dashes[point.title]) for point in shared]
    entries += [Patch(color=CHANCE, lw=0, label="chance, 95 %, both spaces")]
    panels.legend(figure, entries, 3)
    return figure


def _predicted(ax: Axes, name: str) -> None:
    """The projection, and on the right where the paper predicts its continuity."""
    ax.set_title(name.capitalize(), loc="left")
    predicted = spaces.PREDICTED.get(name)
    if predicted:
        ax.set_title(f"paper: {predicted}", loc="right", size=7, color=COLOURS.get(predicted, GREY))


@panels.styled
def gradients(ds: xr.Dataset) -> Figure:
    """Continuity of cumulative gradients beside that of weights, every projection in its own space, against the step."""
    groups = _groups(ds)
    shared = groups[0] if len(groups) == 1 else []
    tints = _tints(shared)
    figure, drawn = _grid(ds, groups, _own)
    for ax, name, point in drawn:
        one = point.runs.sel(matrix=name)
        panels.chance_band(ax, one)
        for source, look in (("weight", WEIGHT), ("cumulative_gradient", GRADIENT)):
            _curve(ax, measures.continuity(one, source, spaces.own(name)), tints.get(point.title, "black"), **look)
    entries = [line("weights", color="black", **WEIGHT), line("cumulative gradients", color="black", **GRADIENT)]
    entries += [line(_title(point), color=tints[point.title]) for point in shared]
    panels.legend(figure, [*entries, panels.band_entry()], 3)
    return figure


def _own(ax: Axes, name: str) -> None:
    """The projection and the vectors that its numbers are of."""
    ax.set_title(f"{name.capitalize()}, {spaces.SYMBOLS[spaces.own(name)]}", loc="left")


@panels.styled
def projections_end(ds: xr.Dataset) -> Figure:
    """Weight continuity of every projection at the end, in both spaces, run by run, with its chance level."""
    groups, names = _groups(ds), spaces.ordered(ds.matrix.values.tolist())
    figure = Figure(figsize=(7.2, (2.4 if len(groups) == 1 else 1.15 * len(groups)) + 0.6))
    axes = figure.subplots(len(groups), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for ax, group in zip(axes, groups):
        width = 0.84 / len(group)
        for i, point in enumerate(group):
            end = measures.at_end(point.runs) if point.runs.sizes["run"] else None
            for at, name in enumerate(names):
                for side, space in enumerate(spaces.LABELS):
                    x = at - 0.42 + width * (i + (0.28 if side == 0 else 0.72))
                    _bar(ax, x, 0.4 * width, ds, end, name, space, i)
        if len(groups) > 1:
            ax.set_title(_title(group[0]), loc="left")
        ax.set_xticks(range(len(names)), [name.capitalize() for name in names])
        ax.tick_params(axis="x", length=0)
        ax.set(ylim=(0, 1.02), xlim=(-0.55, len(names) - 0.45))
    figure.supylabel(f"{MEAN_OF_PAIRS}, at end", size=8)
    entries = [Patch(color=COLOURS[space], label=label) for space, label in LABELS.items()]
    if len(groups) == 1 and len(groups[0]) > 1:
        entries += [Patch(**_fill("0.35", i), label=_title(point)) for i, point in enumerate(groups[0])]
    entries += [line("a run", color="black", marker="o", ms=2.5, ls=""), line("chance", color="black", lw=1.2)]
    panels.legend(figure, entries, 4)
    return figure


def _fill(colour: str, i: int) -> Look:
    """The first variant's bars full, the second's pale, the third's hatched."""
    pale = tuple(0.3 * part + 0.7 for part in to_rgb(colour))
    return {"facecolor": pale if i else colour, "edgecolor": colour, "lw": 0.7, "hatch": "/////" if i == 2 else ""}


def _bar(ax: Axes, x: float, width: float, ds: xr.Dataset, end: xr.Dataset | None, name: str, space: str, i: int) -> None:
    level = float(ds.cosine_null.sel(matrix=name, space=space))
    if end is not None:
        runs = measures.continuity(end.sel(matrix=name), "weight", space).values
        ax.bar(x, runs.mean(), width, **_fill(COLOURS[space], i))
        ax.plot(x + np.linspace(-0.2, 0.2, len(runs)) * width * (len(runs) > 1), runs, "o", ms=1.8, color="black", mew=0)
    ax.hlines(level, x - width / 2, x + width / 2, color="black", lw=1.1, zorder=4)


@panels.styled
def perplexity(ds: xr.Dataset) -> Figure:
    """Perplexity of held-out text against the training step, every run thin, means thick."""
    if not measures.is_language(ds):
        raise NoData("the models are no language models")
    shown = panels.finished_somewhere(ds)
    tints = _tints(shown)
    figure = Figure(figsize=(4.6, 2.9))
    ax = figure.subplots()
    entries = []
    for point, dash in zip(shown, cycle(DASHES)):
        look: Look = {"color": tints[point.title]}
        ax.plot(point.every.step, measures.perplexity(point.every).transpose("step", "run"), lw=0.5, alpha=0.5, **look)
        end = ""
        if point.runs.sizes["run"]:
            mean = np.exp(point.runs.test_loss.mean("run"))
            ax.plot(point.runs.step, mean, ls=dash, **look)
            end = f": {np.exp(float(measures.at_end(point.runs).test_loss.mean())):.4g} at end"
        entries.append(line(_title(point) + end, ls=dash, **look))
    _step_axis(ax, ds)
    ax.set(yscale="log", xlabel="training step", ylabel="validation perplexity")
    ax.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    panels.legend(figure, entries, 2)
    return figure


@panels.styled
def beside_continuity(ds: xr.Dataset) -> Figure:
    """Continuity of every projection at the end beside what qualifies it, each with its chance level."""
    columns = {
        "weight_end": "own space,\nv₁ or u₁",
        "weight_other_end": "other space",
        "overlap_end": f"overlap of the\nleading {ds.sizes['rank']}, own",
        "gram_end": "Gram alignment,\nown",
        "gap_end": "near-tie s₂/s₁",
    }
    shown = panels.finished_somewhere(ds)
    tints = _tints(shown)
    rows = []
    for name in spaces.ordered(ds.matrix.values.tolist()):
        for i, point in enumerate(shown):
            first = f"{name.capitalize()} {spaces.SYMBOLS[spaces.own(name)]}   " if i == 0 else ""
            rows.append((first + _title(point), point.runs.sel(matrix=name), tints[point.title]))
    figure, axes = panels.beside(rows, columns, measures.thresholds(ds))
    for ax in axes:
        for edge in range(len(shown), len(rows), len(shown)):
            ax.axhline(edge - 0.5, color=CHANCE, lw=0.6)
    entries = [*panels.beside_entries("chance (s₂/s₁: before training)"), *panels.not_finished_entry(figure)]
    panels.legend(figure, entries, 3)
    return figure


FIGURES: tuple[Callable[[xr.Dataset], Figure], ...] = (
    projections_over_training,
    projections_end,
    gradients,
    perplexity,
    beside_continuity,
)
