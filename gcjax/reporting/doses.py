"""Dose and response: continuity against the init gain and against the optimizer, everything else equal."""

from collections.abc import Mapping

import xarray as xr
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from gcjax.reporting import measures, panels
from gcjax.reporting.panels import CHANCE, Look, NoData, colour, line
from gcjax.reporting.statistics import mean_interval

GAIN = "model.init_gain"
PEAK_AND_END: Mapping[str, Look] = {"weight_peak": {"ls": "--", "mfc": "white"}, "weight_end": {"ls": "-"}}


@panels.styled
def init_scale(ds: xr.Dataset) -> Figure:
    """Peak and end of v1 against the init gain, for every variant that ran at several."""
    if GAIN not in ds.coords:
        raise NoData("the study has one initial scale")
    rest = panels.points(ds, lambda path: path != GAIN)
    shown = [point for point in rest if len(measures.distinct(point.runs[GAIN])) > 1]
    if not shown:
        raise NoData("no variant has finished runs at two initial scales")
    rules = measures.thresholds(ds)
    figure, axes = panels.grid(shown, "init gain g, W ~ N(0, g²/d)", panels.continuity_label(ds), height=1.6)
    for point, ax in zip(shown, axes):
        panels.chance_band(ax, ds)
        numbers = measures.per_run(point.runs, rules)
        gains = sorted(measures.distinct(point.every[GAIN]))
        doses = [numbers.isel(run=(numbers[GAIN] == gain).values) for gain in gains]
        for name, look in PEAK_AND_END.items():
            means = [mean_interval(runs[name], rules["confidence"]).value for runs in doses]
            ax.plot(gains, means, color=colour(point.variant), ls=look["ls"], lw=1)
            for gain, runs in zip(gains, doses):
                panels.dot(ax, gain, runs[name], rules["confidence"], color=colour(point.variant), **look)
    every = sorted({gain for point in shown for gain in measures.distinct(point.every[GAIN])})
    axes[0].set(xscale="log", ylim=(0, 1.02))
    axes[0].set_xticks(every, [f"{gain:.3g}" for gain in every])
    axes[0].xaxis.set_minor_locator(NullLocator())
    lines = [line(name.split("_")[-1], color="black", marker="o", ms=4, **look) for name, look in PEAK_AND_END.items()]
    panels.legend(figure, [*lines, panels.band_entry(), *panels.not_finished_entry(figure)], 4)
    return figure


@panels.styled
def optimizers(ds: xr.Dataset) -> Figure:
    """v1 at the end for every variant under every optimizer; one row a setting of everything else."""
    ds = ds.assign_coords(optimizer=("run", measures.settings(ds, _optimizes)))
    rest = panels.points(ds, lambda path: not _optimizes(path))
    shown = [point for point in rest if len(measures.distinct(point.runs.optimizer)) > 1]
    if not shown:
        raise NoData("no variant has finished runs under two optimizers")
    rules, variants = measures.thresholds(ds), list(dict.fromkeys(point.variant for point in shown))
    settings = list(dict.fromkeys(point.setting for point in shown))
    names = list(dict.fromkeys(name for point in shown for name in measures.distinct(point.every.optimizer)))
    figure = Figure(figsize=(max(0.75 * len(names) + 0.8, 4.2), 2 * len(settings) + 1.2))
    axes = figure.subplots(len(settings), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for point in shown:
        v1, ax = measures.per_run(point.runs, rules).weight_end, axes[settings.index(point.setting)]
        offset = 0.7 * ((variants.index(point.variant) + 0.5) / len(variants) - 0.5)
        for name in measures.distinct(point.every.optimizer):
            values = v1.values[(v1.optimizer == name).values]
            panels.dot(ax, names.index(name) + offset, values, rules["confidence"], **_look(point.variant))
    for setting, ax in zip(settings, axes):
        panels.chance_band(ax, ds)
        ax.set_title("" if setting == measures.AS_CONFIGURED else setting, loc="left")
        for edge in range(1, len(names)):
            ax.axvline(edge - 0.5, color=CHANCE, lw=0.4)
    axes[0].set(ylim=(0, 1.02), xlim=(-0.5, len(names) - 0.5))
    axes[0].set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names])
    figure.supylabel(panels.continuity_label(ds, " at end"), size=8)
    figure.supxlabel("optimizer", size=8)
    entries = [line(name, marker="o", ms=4, ls="", **_look(name)) for name in variants]
    panels.legend(figure, [*entries, panels.band_entry(), *panels.not_finished_entry(figure)], 4)
    return figure


def _optimizes(path: str) -> bool:
    return path.startswith("optim.")


def _look(variant: str) -> Look:
    return {"color": colour(variant), "mfc": colour(variant) if panels.dash(variant) == "-" else "white"}
