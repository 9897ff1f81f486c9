"""How the figures look: one style, one colour and dash a variant, one small panel a point of the study."""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator
from numpy.typing import ArrayLike

from gcjax.errors import GcjaxError
from gcjax.reporting import measures, spaces
from gcjax.reporting.statistics import mean_interval

Look = dict[str, Any]

GREY = "0.45"
CHANCE = "0.75"
COLOURS = {  # Okabe & Ito (2008): told apart with every colour vision
    "None": "#000000",
    "ReLU": "#0072B2",
    "GELU": "#56B4E9",
    "SiLU": "#009E73",
    "tanh": "#D55E00",
    "Radial": "#E69F00",
}
OTHER_COLOUR = "#CC79A7"
DASHES = {"Res": "-", "NoRes": ":", "Res+LN": "--", "Res+LNa": "-."}
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "svg.hashsalt": "gcjax",
    "figure.constrained_layout.use": True,
}
TICK: Look = {"color": GREY, "marker": "|", "ls": "", "ms": 8, "mew": 1.5}
NOT_FINISHED: Look = {"marker": "x", "ls": "", "ms": 4, "mew": 1}
styled = mpl.rc_context(STYLE)


class NoData(GcjaxError):
    """The results hold nothing for this figure; the message says what is missing."""


@dataclass(frozen=True)
class Point:
    """One point of the study: a variant in a setting, and all its runs."""

    setting: str
    variant: str
    every: xr.Dataset

    @cached_property
    def runs(self) -> xr.Dataset:
        """The finished runs; means are taken over these."""
        return measures.finished(self.every)

    @property
    def title(self) -> str:
        """The variant, how many runs finished where not all did, and the setting where there are several."""
        done, total = self.runs.sizes["run"], self.every.sizes["run"]
        name = self.variant if done == total else f"{self.variant} ({done}/{total} runs)"
        return name if self.setting == measures.AS_CONFIGURED else f"{name}\n{textwrap.fill(self.setting, 23)}"


def points(ds: xr.Dataset, keep: Callable[[str], bool] = measures.outside_variant) -> list[Point]:
    """The study's points in the order of the results; runs that differ in a swept path outside `keep` share a point."""
    labels, variants = np.array(measures.settings(ds, keep)), ds.variant.values
    found = dict.fromkeys(zip(labels.tolist(), variants.tolist()))
    return [Point(s, v, ds.isel(run=np.flatnonzero((labels == s) & (variants == v)))) for s, v in found]


def finished_somewhere(ds: xr.Dataset) -> list[Point]:
    """The study's points; raises `NoData` when no run of any has finished."""
    if not (ds.status == "finished").any():
        raise NoData("no run has finished")
    return points(ds)


def colour(variant: str) -> str:
    """The variant's colour, that of its activation."""
    activation = variant.rpartition("+")[2]
    return COLOURS.get(activation, OTHER_COLOUR)


def palette(variants: Iterable[str]) -> dict[str, str]:
    """A colour for each variant: its activation's, and to others the colours that are left, in order."""
    names = list(variants)
    found = {name: COLOURS[name] for name in names if name in COLOURS}
    left = [tint for tint in (OTHER_COLOUR, *COLOURS.values(), GREY) if tint not in found.values()]
    others = [name for name in names if name not in found]
    return found | dict(zip(others, left * len(names)))


def dash(variant: str) -> str:
    """The variant's line style, that of its family (residual, LayerNorm)."""
    family = variant.rpartition("+")[0]
    return DASHES.get(family, "-")


def places(shown: Sequence[Point]) -> list[tuple[int, int]]:
    """Row and column of each point: variants by settings where (nearly) all combinations ran, else wrapped."""
    variants, settings = (list(dict.fromkeys(names)) for names in zip(*((p.variant, p.setting) for p in shown)))
    if len(variants) > 1 and len(settings) > 1 and len(shown) >= 0.75 * len(variants) * len(settings):
        where = [(variants.index(point.variant), settings.index(point.setting)) for point in shown]
        return where if len(settings) <= 6 else [(column, row) for row, column in where]
    columns = len(shown) if len(shown) <= 5 else min((5, 4, 3), key=lambda width: -len(shown) % width)
    return [divmod(i, columns) for i in range(len(shown))]


def grid(shown: Sequence[Point], xlabel: str, ylabel: str, *, height: float = 1.3) -> tuple[Figure, list[Axes]]:
    """A figure with a titled panel for every point, all on the same scales."""
    where = places(shown)
    rows, columns = (max(indices) + 1 for indices in zip(*where))
    figure = Figure(figsize=(max(1.55 * columns + 0.4, 4.2), height * rows + 1.1))
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    used = [axes[place] for place in where]
    for ax in axes.ravel():
        ax.set_visible(ax in used)
    for point, ax, (row, column) in zip(shown, used, where):
        ax.set_title(point.title, loc="left")
        ax.tick_params(labelbottom=(row + 1, column) not in where)
    figure.supxlabel(xlabel, size=8)
    figure.supylabel(ylabel, size=8)
    return figure, used


def say_no_run(ax: Axes) -> None:
    """Why a panel is empty."""
    ax.text(0.5, 0.5, "no finished run", ha="center", va="center", color=GREY, transform=ax.transAxes)


def legend(figure: Figure, handles: Sequence[Artist], columns: int) -> None:
    """One legend above all panels."""
    figure.legend(handles=list(handles), loc="outside upper center", ncols=columns, handlelength=2.2)


def line(label: str, **look: Any) -> Line2D:
    """A legend entry for a line or marker."""
    return Line2D([], [], label=label, **look)


def continuity_label(ds: xr.Dataset, when: str = "") -> str:
    """What an axis of one matrix's continuity is called."""
    space = measures.space(ds)
    return f"continuity {spaces.LABELS[space]}{when}, {space} space"


def chance_band(ax: Axes, ds: xr.Dataset) -> None:
    """Where 95 % of runs without any continuity would lie: the null of the mean over all pairs, the matrix's own space."""
    low, high = ds.cosine_mean_null_quantile.sel(space=measures.space(ds)).isel(quantile=[0, -1]).values
    ax.axhspan(low, high, color=CHANCE, lw=0, zorder=0)


def step_axis(ax: Axes, last: float) -> None:
    """Training steps from 0 to `last`, logarithmic beyond the first."""
    powers = [10**k for k in range(1, 12) if 10**k <= last]
    ax.set_xscale("symlog", linthresh=1, linscale=0.4)
    ax.set_xlim(0, last)
    ax.set_xticks([0, *powers], ["0", *(f"{power:,}" for power in powers)])
    ax.xaxis.set_minor_locator(NullLocator())


def band_entry() -> Patch:
    """The legend entry of `chance_band`."""
    return Patch(color=CHANCE, lw=0, label="chance, 95 %")


def not_finished_entry(figure: Figure) -> list[Line2D]:
    """The legend entry of `dot`'s cross, where the figure has one."""
    crossed = any(drawn.get_marker() == NOT_FINISHED["marker"] for ax in figure.axes for drawn in ax.lines)
    return [line("no finished run", color="black", **NOT_FINISHED)] * crossed


def dot(ax: Axes, at: float, values: ArrayLike, confidence: float, *, sideways: bool = False, **look: Any) -> None:
    """A mean at `at` with its interval, the runs behind it small; a cross where no run finished."""
    runs, found = np.asarray(values), mean_interval(values, confidence)

    def draw(x: ArrayLike, y: ArrayLike, **how: Any) -> None:
        ax.plot(*((y, x) if sideways else (x, y)), **(look | how))

    if not found.n:
        return draw([at], [0.1], **NOT_FINISHED)
    draw(np.full(runs.shape, at), runs, marker="o", ms=2, ls="", alpha=0.4, mec="none")
    if np.isfinite(found.low):
        draw([at, at], [found.low, found.high], lw=1.2)
    return draw([at], [found.value], marker="o", ms=4, ls="")


def beside(
    rows: Sequence[tuple[str, xr.Dataset, str]], columns: Mapping[str, str], rules: Mapping[str, Any]
) -> tuple[Figure, np.ndarray]:
    """A figure with a row for each (title, finished runs of one matrix, colour) and a panel for each measure at the end."""
    titles = [title for title, _, _ in rows]
    figure = Figure(figsize=(5.6 + 0.06 * max(map(len, titles)), 0.2 * len(rows) + 1.3))
    axes = figure.subplots(1, len(columns), sharex=True, sharey=True)
    for row, (_, runs, tint) in enumerate(rows):
        numbers = measures.per_run(runs, rules)
        for ax, name in zip(axes, columns):
            power = -1 if name == "gap_end" else 1  # s_1/s_2 has no upper end, its inverse shares the axis 0..1
            ax.plot((numbers[f"{name}_chance"] ** power).mean(), row, **TICK)
            dot(ax, row, numbers[name] ** power, rules["confidence"], sideways=True, color=tint)
    for ax, label in zip(axes, columns.values()):
        ax.set_xlabel(label)
        ax.grid(axis="y", lw=0.3)
        ax.tick_params(axis="y", length=0)
    axes[0].set(xlim=(-0.05, 1.05), xticks=[0, 0.5, 1], ylim=(len(rows) - 0.5, -0.5))
    axes[0].set_yticks(range(len(rows)), titles)
    return figure, axes


def beside_entries(chance: str) -> list[Line2D]:
    """The legend entries of `beside`."""
    return [
        line("mean and interval", color="black", marker="o", ms=4),
        line("a run", color="black", marker="o", ms=2, ls="", alpha=0.4),
        line(chance, **TICK),
    ]
