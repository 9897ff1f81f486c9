"""Pictures of what sharing and pruning cost: each function takes a dataset of kind compression and returns a Figure."""

from collections.abc import Callable

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from gcjax.reporting import compression, panels
from gcjax.reporting.panels import CHANCE, GREY, NoData, line
from gcjax.reporting.portraits import COLOURS as SPACES
from gcjax.reporting.portraits import grid
from gcjax.results import CHOICES

COLOURS = {"own": "#000000", **SPACES}
LABELS = {"own": "each layer its own basis", "input": "shared in the input space", "output": "shared in the output space"}
SCHEMES = {"own": "#000000", "predicted": "#0072B2", "opposite": "#D55E00", "advised": "#009E73"}
ORDERS = {"continuity": "#0072B2", "depth": "#E69F00", "influence": "#CC79A7", "measured": "#009E73"}


def _names(ds: xr.Dataset) -> list[str]:
    return [matrix.capitalize() for matrix in ds.matrix.values.tolist()]


@panels.styled
def sharing(ds: xr.Dataset) -> Figure:
    """Relative error of weights against the share of parameters kept, in windows of the smallest size: below its dashed twin,
    a shared basis gains from what layers have in common; below black, it beats no sharing."""
    return _errors(ds, "frobenius", "relative error of weights", with_null=True)


@panels.styled
def sharing_outputs(ds: xr.Dataset) -> Figure:
    """Relative error of outputs on real inputs against the share of parameters kept, in windows of the smallest size."""
    if "activations" not in ds.objective.values:
        raise NoData("the model was not run")
    return _errors(ds, "activations", "relative error of outputs", with_null=False)


def _errors(ds: xr.Dataset, objective: str, label: str, with_null: bool) -> Figure:
    figure, axes = grid(_names(ds), "share of the parameters kept", label, 1.5)
    for ax, matrix in zip(axes, ds.matrix.values):
        one = ds.sel(matrix=matrix, objective=objective).isel(size=0)
        for choice in CHOICES:
            ax.plot(ds.ratio, one.error.sel(choice=choice).mean("window"), color=COLOURS[choice], lw=1.2)
            if with_null:
                null = one.null_error.sel(choice=choice).mean("window")
                ax.plot(ds.ratio, null, color=COLOURS[choice], lw=0.9, ls=(0, (2, 1.5)))
    axes[0].set(xlim=(0, 1), ylim=(0, None), xticks=[0, 0.5, 1])
    entries = [line(LABELS[choice], color=COLOURS[choice], lw=1.2) for choice in CHOICES]
    entries += [line("same spectra, random frames", color=GREY, lw=0.9, ls=(0, (2, 1.5)))] * with_null
    panels.legend(figure, entries, 2)
    return figure


@panels.styled
def perplexity(ds: xr.Dataset) -> Figure:
    """Perplexity on held-out text against the share of parameters kept: one projection compressed, and all of them."""
    if not compression.has_perplexity(ds):
        raise NoData("the model was not run")
    named = [*ds.matrix.values.tolist(), "all"]
    figure, axes = grid([*_names(ds), "All"], "share of the parameters kept", "perplexity", 1.5, sharey=False)
    dense = compression.perplexity(ds.nll_dense)
    for ax, name in zip(axes, named):
        found = ds.nll_all if name == "all" else ds.nll.sel(matrix=name)
        axis, colours = ("scheme", SCHEMES) if name == "all" else ("choice", COLOURS)
        for value in found[axis].values.tolist():
            ax.plot(ds.tested, np.exp(found.sel({axis: value}).mean("sequence")), "o-", ms=3, lw=1.2, color=colours[value])
        ax.axhline(dense, color=CHANCE, lw=1.2, zorder=0)
        ax.set_yscale("log")
        ax.minorticks_off()
    axes[0].set_xlim(0, 1)
    entries = [line(LABELS[choice], color=COLOURS[choice], marker="o", ms=3) for choice in CHOICES]
    entries += [line(f"all: {name}", color=SCHEMES[name], marker="o", ms=3) for name in ("predicted", "opposite", "advised")]
    panels.legend(figure, [*entries, line("uncompressed", color=CHANCE, lw=1.2)], 3)
    return figure


@panels.styled
def pruning(ds: xr.Dataset) -> Figure:
    """Left: perplexity against the number of layers left out, by each order and at random (grey: every draw). Right: what
    leaving out one layer costs, along depth."""
    if not compression.has_perplexity(ds):
        raise NoData("the model was not run")
    figure = Figure(figsize=(7.2, 2.8))
    left, right = figure.subplots(1, 2)
    dense = compression.perplexity(ds.nll_dense)
    counts = [0, *ds.pruned.values.tolist()]
    for draw in np.exp(ds.nll_random.mean("sequence")).transpose("draw", "pruned").values:
        left.plot(counts, [dense, *draw], color=CHANCE, lw=0.9, zorder=0)
    for order, tint in ORDERS.items():
        curve = np.exp(ds.nll_pruned.sel(order=order).mean("sequence")).values
        left.plot(counts, [dense, *curve], "o-", ms=3, lw=1.2, color=tint)
    left.set_yscale("log")
    left.set(xlabel="layers left out", ylabel="perplexity", xticks=counts)
    rise = (ds.nll_without - ds.nll_dense).mean("sequence")
    right.bar(ds.layer, rise, color=GREY, width=0.8)
    right.set_yscale("symlog", linthresh=0.1)
    right.set(xlabel="layer left out", ylabel="rise of the loss, nats a token")
    entries = [line(compression.ORDERS[order], color=tint, marker="o", ms=3) for order, tint in ORDERS.items()]
    panels.legend(figure, [*entries, line("at random", color=CHANCE, lw=0.9)], 5)
    return figure


FIGURES: tuple[Callable[[xr.Dataset], Figure], ...] = (sharing, sharing_outputs, perplexity, pruning)


def draw(ds: xr.Dataset) -> tuple[dict[str, Figure], dict[str, str]]:
    """Every figure by name, and why those that are missing could not be drawn."""
    drawn, skipped = {}, {}
    for figure in FIGURES:
        try:
            drawn[figure.__name__] = figure(ds)
        except NoData as reason:
            skipped[figure.__name__] = str(reason)
    return drawn, skipped
