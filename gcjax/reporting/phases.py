"""Maps over init gain and learning rate, and how far onset of continuity is a matter of how far the weights have moved.

Each function takes a study's dataset of one matrix and returns a Figure; it raises `NoData` where the results lack it.
"""

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from gcjax.reporting import measures, panels
from gcjax.reporting.doses import GAIN
from gcjax.reporting.panels import GREY, NoData, colour, line

RATE = "optim.lr"
MAPS = {"weight_peak": "v₁, peak", "weight_end": "v₁, end", "overlap_end": "overlap, end", "gram_end": "Gram, end"}
ONSET = 0.5
DRAWS = 2000  # of the bootstrap


@panels.styled
def phase_maps(ds: xr.Dataset) -> Figure:
    """Continuity over init gain and learning rate for every variant: peak and end of v1, and what qualifies them at the end."""
    if GAIN not in ds.coords or RATE not in ds.coords:
        raise NoData("the study does not sweep both init gain and learning rate")
    gains, rates = (sorted(measures.distinct(ds[path])) for path in (GAIN, RATE))
    if len(gains) < 3 or len(rates) < 3:
        raise NoData("the study has fewer than three init gains or learning rates")
    variants, rules = measures.distinct(ds.variant), measures.thresholds(ds)
    figure = Figure(figsize=(7.2, 1.55 * len(variants) + 1.0))
    axes = figure.subplots(len(variants), len(MAPS), sharex=True, sharey=True, squeeze=False)
    image = None
    for row, variant in zip(axes, variants):
        every = ds.isel(run=(ds.variant == variant).values)
        numbers = measures.per_run(every, rules)
        place = [(gains.index(gain), rates.index(rate)) for gain, rate in zip(every[GAIN].values, every[RATE].values)]
        odd = np.zeros((len(gains), len(rates)))
        for (g, r), status, spiked in zip(place, every.status.values, numbers.spiked.values):
            odd[g, r] = max(odd[g, r], 2 if status != "finished" else int(spiked))
        for ax, name in zip(row, MAPS):
            cells = np.full((len(gains), len(rates), every.sizes["run"]), np.nan)
            for i, (g, r) in enumerate(place):
                cells[g, r, i] = numbers[name].values[i] if every.status.values[i] == "finished" else np.nan
            known = np.isfinite(cells).sum(-1)
            mean = np.where(known > 0, np.nansum(cells, -1) / np.maximum(known, 1), np.nan)
            image = ax.imshow(mean, vmin=0, vmax=1, cmap="viridis", origin="lower", aspect="auto")
            for (g, r), kind in np.ndenumerate(odd):
                if kind:
                    hatch = "xxxx" if kind == 2 else "////"
                    ax.add_patch(Rectangle((r - 0.5, g - 0.5), 1, 1, fill=False, lw=0, ec="white", hatch=hatch))
        row[0].set_ylabel(f"{variant}\ninit gain", size=7)
    for ax, label in zip(axes[0], MAPS.values()):
        ax.set_title(label, loc="left")
    axes[0, 0].set_yticks(range(len(gains)), [f"{gain:.3g}" for gain in gains])
    axes[0, 0].set_xticks(range(len(rates)), [f"{rate:.0e}".replace("e-0", "e-") for rate in rates], size=6)
    figure.supxlabel("learning rate", size=8)
    assert image is not None
    figure.colorbar(image, ax=axes, label="mean over pairs of adjacent layers, and over runs", shrink=0.7, aspect=40)
    marks = {"////": "a loss spike", "xxxx": "a run diverged"}
    entries = [Patch(fc="white", ec=GREY, hatch=hatch, label=label) for hatch, label in marks.items()]
    panels.legend(figure, entries, 2)
    return figure


@panels.styled
def onset(ds: xr.Dataset) -> Figure:
    """Weight continuity against the update ratio in both norms over init gains: which one brings the curves together?

    Onset is where v1 first reaches ONSET. The number in each title is the standard deviation over gains of its mean log ratio,
    with a bootstrap interval over runs; runs that never get there, or were there when first seen, are left out and counted.
    """
    if GAIN not in ds.coords:
        raise NoData("the study has one initial scale")
    rest = panels.points(ds, lambda path: path != GAIN)
    shown = [point for point in rest if len(measures.distinct(point.runs[GAIN])) > 2]
    if not shown:
        raise NoData("no variant has finished runs at three initial scales")
    confidence, norms = measures.thresholds(ds)["confidence"], ds.norm.values.tolist()
    gains = sorted(measures.distinct(ds[GAIN]))
    figure = Figure(figsize=(6.4, 2.1 * len(shown) + 0.8))
    axes = figure.subplots(len(shown), len(norms), sharex=True, sharey=True, squeeze=False)
    dashes = dict(
        zip(gains, ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2)), (0, (3, 5))) * len(gains))
    )
    for row, point in zip(axes, shown):
        v1 = measures.continuity(point.runs, "weight", measures.space(ds))
        for ax, norm in zip(row, norms):
            ratio = point.runs.update_ratio.sel(norm=norm).mean("layer")
            found = [measures.crossing(v1.values[i], ratio.values[i], ONSET) for i in range(point.runs.sizes["run"])]
            by_gain = []
            for gain in gains:
                own = np.flatnonzero((point.runs[GAIN] == gain).values)
                moved = ratio.isel(run=own).where(ratio.isel(run=own) > 0)
                ax.plot(
                    np.exp(np.log(moved).mean("run")),
                    v1.isel(run=own).mean("run"),
                    color=colour(point.variant),
                    ls=dashes[gain],
                    lw=1,
                )
                crossed = [np.log(found[i][0]) for i in own if found[i][1] == 0 and np.isfinite(found[i][0])]
                by_gain += [np.asarray(crossed)] * bool(crossed)
            censored = sum(side != 0 for _, side in found)
            ax.set_title(
                f"{point.title.splitlines()[0]}, {norm}\n{_spread(by_gain, confidence)}, {censored} censored",
                loc="left",
                size=7,
            )
            ax.axhline(ONSET, color=GREY, lw=0.6)
            panels.chance_band(ax, ds)
    axes[0, 0].set(xscale="log", ylim=(0, 1.02))
    figure.supxlabel("update ratio ‖W - W₀‖ / ‖W₀‖, mean over layers", size=8)
    figure.supylabel(panels.continuity_label(ds), size=8)
    panels.legend(figure, [line(f"g = {gain:.3g}", color="black", ls=dashes[gain], lw=1) for gain in gains], 5)
    return figure


def _spread(by_gain: list[np.ndarray], confidence: float) -> str:
    """The standard deviation over gains of the mean log ratio at onset, with its bootstrap interval."""
    if len(by_gain) < 2:
        return "onset at fewer than two gains"
    rng = np.random.default_rng(0)
    drawn = [np.std([rng.choice(x, len(x)).mean() for x in by_gain], ddof=1) for _ in range(DRAWS)]
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    value = np.std([x.mean() for x in by_gain], ddof=1)
    return f"spread of log ratio at onset {value:.2f} [{low:.2f}, {high:.2f}]"


FIGURES = (phase_maps, onset)
