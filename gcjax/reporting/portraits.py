"""Pictures of a measured checkpoint: each function takes its dataset and returns a Figure."""

from collections.abc import Callable, Iterator, Sequence

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from gcjax.reporting import panels
from gcjax.reporting.panels import CHANCE, line

COLOURS = {"input": "#0072B2", "output": "#E69F00"}
LABELS = {"input": "input space, v₁", "output": "output space, u₁"}


def _names(ds: xr.Dataset) -> list[str]:
    return [str(name).capitalize() for name in ds.matrix.values]


@panels.styled
def projections(ds: xr.Dataset) -> Figure:
    """Mean continuity of every projection in both spaces and forms, with its chance level and 95 % band."""
    figure = Figure(figsize=(7.2, 2.7))
    axes = figure.subplots(1, 2, sharey=True)
    at = np.arange(ds.sizes["matrix"])
    for ax, form in zip(axes, ds.form.values):
        for shift, space in zip((-0.2, 0.2), ds.space.values):
            one = ds.sel(form=form, space=space)
            cosine = one.cosine.sel(rank=1)
            ax.bar(at + shift, cosine.mean("pair"), 0.36, color=COLOURS[str(space)])
            low, _, high = one.cosine_mean_null_quantile.transpose("quantile", "matrix").values
            ax.bar(at + shift, high - low, 0.4, bottom=low, color="black", alpha=0.35, lw=0, zorder=3)
            ax.hlines(one.cosine_null, at + shift - 0.2, at + shift + 0.2, color="black", lw=1.2, zorder=4)
        ax.set_title(f"{form} weights", loc="left")
        ax.set_xticks(at, _names(ds))
        ax.tick_params(axis="x", length=0)
    axes[0].set(ylim=(0, 1), ylabel="mean |cos| of adjacent layers")
    entries = [Patch(color=COLOURS[space], label=label) for space, label in LABELS.items()]
    entries += [line("chance and its 95 % band", color="black", lw=1.2)]
    panels.legend(figure, entries, 3)
    return figure


def _grid(ds: xr.Dataset, xlabel: str, ylabel: str, height: float = 1.35) -> tuple[Figure, np.ndarray]:
    return grid(_names(ds), xlabel, ylabel, height)


def grid(names: Sequence[str], xlabel: str, ylabel: str, height: float, sharey: bool = True) -> tuple[Figure, np.ndarray]:
    """A figure with a titled panel for every projection."""
    count = len(names)
    columns = min(count, 4)
    rows = -(-count // columns)
    figure = Figure(figsize=(7.2, height * rows + 0.6))
    axes = figure.subplots(rows, columns, sharex=True, sharey=sharey, squeeze=False).ravel()
    for ax in axes[count:]:
        ax.set_visible(False)
    for ax, below, name in zip(axes, (*axes[columns:], *axes), names):
        ax.set_title(name, loc="left")
        ax.tick_params(labelbottom=not below.get_visible() or below in axes[:columns])
    figure.supxlabel(xlabel, size=8)
    figure.supylabel(ylabel, size=8)
    return figure, axes


def _in_both_spaces(ds: xr.Dataset, axes: np.ndarray) -> Iterator[tuple[Axes, xr.Dataset, str]]:
    """Each projection's panel, twice: with its raw measures in the input space, then in the output space, and the colour."""
    for ax, matrix in zip(axes, ds.matrix.values):
        for space in ds.space.values:
            yield ax, ds.sel(matrix=matrix, form="raw", space=space), COLOURS[str(space)]


@panels.styled
def depth(ds: xr.Dataset) -> Figure:
    """Continuity of each pair along depth, raw; flagged pairs hollow."""
    figure, axes = _grid(ds, "layer (of the pair's second matrix)", "|cos| of adjacent layers")
    for ax, one, colour in _in_both_spaces(ds, axes):
        value = one.cosine.sel(rank=1)
        ax.plot(ds.pair, value, lw=0.9, color=colour)
        ax.plot(ds.pair, value.where(one.flagged == 0), "o", ms=2.5, color=colour)
        ax.plot(ds.pair, value.where(one.flagged == 1), "o", ms=2.5, mfc="white", color=colour)
        ax.axhline(float(one.cosine_null), color=CHANCE, lw=1.5, zorder=0)
    axes[0].set_ylim(0, 1.02)
    entries = [line(label, color=COLOURS[space]) for space, label in LABELS.items()]
    entries += [line("flagged", color="black", marker="o", ms=3, mfc="white", ls=""), line("chance", color=CHANCE, lw=1.5)]
    panels.legend(figure, entries, 4)
    return figure


@panels.styled
def layer_cosines(ds: xr.Dataset) -> Figure:
    """|cos| of the leading vectors of any two layers, raw: input space above the diagonal, output space below."""
    figure, axes = _grid(ds, "layer", "layer", height=1.9)
    upper = np.triu(np.ones((ds.sizes["layer"],) * 2, bool))
    first, last = float(ds.layer.values[0]) - 0.5, float(ds.layer.values[-1]) + 0.5
    for ax, matrix in zip(axes, ds.matrix.values):
        cosine = ds.layer_cosine.sel(matrix=matrix, form="raw")
        both = np.where(upper, cosine.sel(space="input"), cosine.sel(space="output"))
        image = ax.imshow(both, vmin=0, vmax=1, cmap="viridis", extent=(first, last, last, first))
        ax.plot([first, last], [first, last], color="white", lw=0.8)
    label = "|cos| of leading vectors; above diagonal: input space (v₁), below: output space (u₁)"
    figure.colorbar(image, ax=list(axes), label=label, location="top", shrink=0.6, aspect=40)
    return figure


@panels.styled
def spectra(ds: xr.Dataset) -> Figure:
    """Leading singular values of every layer, raw, relative to the first: how much v1 is the matrix, and how open its gap."""
    figure, axes = _grid(ds, "singular rank k", "s_k / s_1")
    colours = mpl.colormaps["viridis"](np.linspace(0, 1, ds.sizes["layer"]))
    for ax, matrix in zip(axes, ds.matrix.values):
        sigma = ds.sigma.sel(matrix=matrix, form="raw").transpose("layer", "rank").values
        for tint, s_K in zip(colours, sigma / sigma[:, :1]):
            ax.plot(ds["rank"], s_K, color=tint, lw=0.8)
    axes[0].set(ylim=(0, 1.03), xlim=(1, ds.sizes["rank"]), xticks=[1, *range(4, ds.sizes["rank"] + 1, 4)])
    scale = ScalarMappable(Normalize(float(ds.layer.values[0]), float(ds.layer.values[-1])), "viridis")
    figure.colorbar(scale, ax=list(axes), label="layer", location="right", aspect=40)
    return figure


FIGURES: tuple[Callable[[xr.Dataset], Figure], ...] = (projections, depth, layer_cosines, spectra)


def latest(ds: xr.Dataset) -> xr.Dataset:
    """The last checkpoint of a series; a measurement as it is."""
    return ds.isel(step=-1) if "step" in ds.dims else ds


@panels.styled
def over_training(ds: xr.Dataset) -> Figure:
    """Mean continuity of every projection against the training step of a series of checkpoints, raw, in both spaces."""
    figure, axes = _grid(ds, "training step", "mean |cos| of adjacent layers")
    for ax, one, colour in _in_both_spaces(ds, axes):
        level = one.cosine_mean_null_quantile.isel(step=0)
        ax.axhspan(float(level[0]), float(level[-1]), color=CHANCE, lw=0, zorder=0)
        ax.plot(ds.step, one.cosine.sel(rank=1).mean("pair"), "o-", ms=2.5, lw=1.2, color=colour)
    positive = ds.step.values[ds.step.values > 0]
    if len(positive) > 1 and positive.max() > 100 * positive.min():
        axes[0].set_xscale("symlog", linthresh=float(positive.min()))
    axes[0].set_ylim(0, 1.02)
    entries = [line(label, color=COLOURS[space]) for space, label in LABELS.items()]
    panels.legend(figure, [*entries, Patch(color=CHANCE, lw=0, label="chance, 95 %")], 3)
    return figure


def draw(ds: xr.Dataset) -> tuple[dict[str, Figure], dict[str, str]]:
    """Every figure by name; none is ever skipped."""
    of_series = {"over_training": over_training(ds)} if "step" in ds.dims else {}
    return {figure.__name__: figure(latest(ds)) for figure in FIGURES} | of_series, {}
