"""The rotation-free products of a measured checkpoint's attention heads (`circuits.nc`), as a table and a figure."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from gcjax import results
from gcjax.errors import GcjaxError
from gcjax.reporting import panels
from gcjax.reporting.panels import CHANCE, line
from gcjax.reporting.portraits import COLOURS
from gcjax.reporting.projections import continuous
from gcjax.reporting.tables import number

FILE = "circuits.nc"
LEGEND = (
    "|cos| of the leading singular vectors of raw products that no change of frame inside a head moves, means over pairs of "
    "adjacent layers; in brackets chance and the 95% interval of such a mean. OV: W_O W_V, v1 what heads read, u1 what they "
    "write; QK: W_Q^T W_K at position difference 0 (no rotary embedding), v1 the keys' side, u1 the queries'. Heads of "
    "adjacent layers are matched one to one for the largest sum of both spaces' |cos|; their chance is that of the same heads "
    "in random relative frames, matched likewise. flag: pairs, of layers or of matched heads, too close to a tie to trust."
)
HEAD = ["", "", "v1", "u1", "flag", "continuous in"]


class Product(NamedTuple):
    """One row of the table, one panel of the figure; spaces are (input, output)."""

    name: str
    how: str
    cosine: xr.DataArray  # (space, pair), means over heads
    chance: xr.DataArray  # (space)
    one_pair: xr.DataArray  # (space, quantile)
    mean: xr.DataArray  # (space, quantile), of the mean over pairs
    flagged: xr.DataArray  # of pairs of layers or matched heads

    @property
    def continuous(self) -> str:
        """As `projections.continuous` says."""
        means = [float(self.cosine.sel(space=space).mean()) for space in self.cosine.space]
        chance = [float(self.chance.sel(space=space)) for space in self.cosine.space]
        return continuous(self.cosine.space.values.tolist(), means, chance)


def beside(ds: xr.Dataset, folder: Path) -> xr.Dataset | None:
    """The circuits that were measured beside results `ds`, if any.

    Raises `GcjaxError` for circuits in place of results, and for those of another checkpoint.
    """
    if ds.attrs["kind"] == "circuits":
        raise GcjaxError(f"{FILE} is reported on with the results.nc beside it: give their directory")
    if ds.attrs["kind"] != "measurement" or not (folder / FILE).exists():
        return None
    found = results.load(folder / FILE)
    if found.attrs["kind"] != "circuits" or found.attrs["fingerprint"] != ds.attrs["fingerprint"]:
        raise GcjaxError(f"{folder / FILE} does not belong to the results.nc beside it; delete it and measure --circuits again")
    return found


def products(ds: xr.Dataset) -> list[Product]:
    """OV summed over heads, then OV and QK head by head."""
    summed = Product("OV", "summed", ds.cosine.sel(rank=1), ds.cosine_null, ds.cosine_null_quantile,
                     ds.cosine_mean_null_quantile, ds.flagged)  # fmt: skip
    return [summed, *(_per_head(ds.sel(circuit=circuit), str(circuit).upper()) for circuit in ds.circuit.values)]


def _per_head(one: xr.Dataset, name: str) -> Product:
    return Product(name, "per head", one.head_cosine.mean("head"), one.head_null, one.head_null_quantile,
                   one.head_mean_null_quantile, one.head_flagged)  # fmt: skip


def cells(ds: xr.Dataset) -> list[list[str]]:
    """Head and body of the table."""
    body = []
    for one in products(ds):
        shown = []
        for space in one.cosine.space.values:
            low, _, high = (number(float(value), 3) for value in one.mean.sel(space=space))
            mean, level = float(one.cosine.sel(space=space).mean()), float(one.chance.sel(space=space))
            shown.append(f"{number(mean, 3)} ({number(level, 3)}, {low} to {high})")
        flag = f"{int(one.flagged.sum())}/{one.flagged.size}"
        body.append([one.name, one.how, *shown, flag, one.continuous])
    return [HEAD, *body]


@panels.styled
def figure(ds: xr.Dataset) -> Figure:
    """Continuity of each product along depth, with the band in which 95 % of unrelated pairs lie (of both spaces)."""
    drawn = Figure(figsize=(7.2, 2.5))
    listed = products(ds)
    axes = drawn.subplots(1, len(listed), sharey=True)
    for ax, one in zip(axes, listed):
        ax.axhspan(float(one.one_pair.min()), float(one.one_pair.max()), color=CHANCE, lw=0, alpha=0.6, zorder=0)
        for space, marker in zip(one.cosine.space.values, ("o", "s")):
            value = one.cosine.sel(space=space)
            look = {"color": COLOURS[str(space)]}
            ax.plot(ds.pair, value, marker=marker, ms=2.5, lw=0.9, **look)
            ax.axhline(float(value.mean()), ls="--", lw=0.9, **look)
        ax.axhline(float(np.mean(one.chance)), color="black", lw=0.8, zorder=1)
        ax.set_title(f"{one.name}, {'summed over heads' if one.how == 'summed' else 'matched heads'}", loc="left")
    axes[0].set(ylim=(0, 1.02), ylabel="|cos| of adjacent layers")
    drawn.supxlabel("layer (of the pair's second)", size=8)
    entries = [line("input space, v₁ (keys' side of QK)", color=COLOURS["input"], marker="o", ms=3),
               line("output space, u₁ (queries' side)", color=COLOURS["output"], marker="s", ms=3),
               line("mean over pairs", color="black", lw=0.9, ls="--"), line("chance", color="black", lw=0.8),
               Patch(color=CHANCE, alpha=0.6, lw=0, label="95 % of pairs by chance")]  # fmt: skip
    panels.legend(drawn, entries, 3)
    return drawn
