"""The loss and the motion of training along moves of the weights (`symmetry.nc`), as a table and a figure."""

from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from gcjax import results
from gcjax.errors import GcjaxError
from gcjax.reporting import measures, panels
from gcjax.reporting.panels import GREY, line
from gcjax.reporting.tables import number

FILE = "symmetry.nc"
LEGEND = (
    "Along a move of the weights (general: an invertible matrix at every boundary between two layers; rotation: an orthogonal "
    "one), as moves of the linear network, and along random straight lines of the same length. slope: mean |dL/dt|; GN: "
    "Gauss-Newton curvature; d2L: second derivative along the curve of moves, t in units of the weights' norm, nats; = 0: the "
    "move leaves the function as it is. motion: share of the weights' change since the snapshot before along such moves, in "
    "brackets that of a random change. v1 (distance to the weights at the peak, over their norm) as it is, and undone: after "
    "the orthogonal matrices that bring the weights nearest to the peak's, sought from the identity and from random ones."
)
FAMILIES = ("general", "rotation", "random")
HEAD = ["", "moment", "step", *(f"{name} {what}" for name in FAMILIES for what in ("slope", "GN", "d2L")),
        "motion general", "motion rotation", "v1", "v1 undone", "v1 undone, random"]  # fmt: skip
COLOURS = {"general": "#0072B2", "rotation": "#D55E00", "random": GREY}


def beside(ds: xr.Dataset, folder: Path) -> xr.Dataset | None:
    """What `gcjax symmetry` measured of results `ds`, if anything.

    Raises `GcjaxError` for such measures in place of results, and for those of another study.
    """
    if ds.attrs["kind"] == "symmetry":
        raise GcjaxError(f"{FILE} is reported on with the results.nc beside it: give their directory")
    if ds.attrs["kind"] != "study" or not (folder / FILE).exists():
        return None
    found = results.load(folder / FILE)
    if found.attrs["kind"] != "symmetry" or any(found.attrs[name] != ds.attrs[name] for name in ("config", "data")):
        raise GcjaxError(f"{folder / FILE} does not belong to the results.nc beside it; delete it and run gcjax symmetry again")
    return found


def cells(ds: xr.Dataset) -> list[list[str]]:
    """Head and body of the table: means over finished runs."""
    body = []
    for variant in measures.distinct(ds.variant):
        runs = ds.isel(run=((ds.variant == variant) & (ds.status == "finished")).values)
        if not runs.sizes["run"]:
            continue
        for moment in ds.moment.values.tolist():
            one = runs.sel(moment=moment)
            along = []
            for family in FAMILIES:
                if family != "random" and int(one.exact.sel(family=family).min()):
                    along += ["= 0"] * 3
                    continue
                of = one.sel(family=family)
                along += [_short(abs(of.slope)), _short(of.gauss_newton), _short(of.curvature)]
            moved = [
                f"{number(float(one.motion_share.sel(algebra=a).mean()), 3)} "
                f"({number(float(one.motion_random.sel(algebra=a).mean()), 3)})" if moment != "start" else "-"
                for a in ds.algebra.values
            ]  # fmt: skip
            undone = [_undone(one, gauge) for gauge in ds.gauge.values.tolist()]
            step = "/".join(f"{step:.0f}" for step in sorted(set(one.moment_step.values.tolist())))
            body.append([variant, moment, step, *along, *moved, *undone])
    return [HEAD, *body]


def _short(values: xr.DataArray) -> str:
    return f"{float(values.mean()):.2g}"


def _undone(one: xr.Dataset, gauge: str) -> str:
    v1, apart = one.gauge_continuity.sel(gauge=gauge, space="input"), one.gauge_distance.sel(gauge=gauge)
    return f"{float(v1.mean()):.3f} ({float(apart.mean()):.2f})" if np.isfinite(v1).any() else "-"


@panels.styled
def figure(ds: xr.Dataset) -> Figure:
    """How the loss bends along moves of the linear network, beside random directions of the same length, at four moments of
    training: second derivative along the curve (full) and Gauss-Newton part (open). Where a move is a symmetry both are 0."""
    variants = [v for v in measures.distinct(ds.variant) if ((ds.variant == v) & (ds.status == "finished")).any()]
    drawn = Figure(figsize=(1.75 * len(variants) + 0.6, 2.6))
    axes = drawn.subplots(1, max(len(variants), 1), sharey=True, squeeze=False)[0]
    for ax, variant in zip(axes, variants):
        runs = ds.isel(run=((ds.variant == variant) & (ds.status == "finished")).values)
        for shift, family in enumerate(FAMILIES):
            for name, look in (("curvature", {}), ("gauss_newton", {"mfc": "white"})):
                values = runs[name].sel(family=family).mean("draw").transpose("moment", "run").values
                x = np.arange(len(values)) + 0.22 * (shift - 1)
                ax.plot(np.repeat(x, values.shape[1]), values.ravel(), "o", ms=3, color=COLOURS[family], **look)
        ax.axhline(0, color=GREY, lw=0.6)
        ax.set_title(variant, loc="left")
        ax.set_xticks(range(ds.sizes["moment"]), ds.moment.values.tolist())
    axes[0].set_yscale("symlog", linthresh=1e-3)
    axes[0].set_ylabel("nats, t in units of ‖W‖")
    entries = [line(name, color=tint, marker="o", ms=3, ls="") for name, tint in COLOURS.items()]
    entries += [line("second derivative", color="black", marker="o", ms=3, ls=""),
                line("Gauss-Newton part", color="black", marker="o", ms=3, ls="", mfc="white")]  # fmt: skip
    panels.legend(drawn, entries, 5)
    return drawn
