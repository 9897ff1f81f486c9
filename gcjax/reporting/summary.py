"""One row a point of the study: what v1 says and, beside it, what keeps it honest, each with its chance level."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from gcjax.reporting import measures, spaces
from gcjax.reporting.statistics import Interval, mean_interval
from gcjax.results import STATUSES

COLUMNS: Mapping[str, str] = {  # measure -> heading; {own}, {other}: v1 or u1
    "weight_peak": "{own} peak",
    "weight_end": "{own} end",
    "cumulative_end": "grad {own}",
    "weight_other_end": "{other}",
    "overlap_end": "top K",
    "gram_end": "Gram",
    "sigma2_end": "s2",
    "gap_end": "gap",
    "flagged_end": "flag",
    "transfer_end": "trans",
    "ratio_frobenius_end": "ratio F",
    "ratio_spectral_end": "ratio S",
    "accuracy_end": "acc",
    "perplexity_end": "ppl",
}
LEGEND = (
    "Means over finished runs at the last snapshot; div: diverged, spk: loss spike. v1, u1: weight continuity in "
    "input and output space; grad: of the cumulative gradient. {space} space: top K, overlap of the leading {rank} "
    "dimensions; Gram, alignment of Gram matrices; s2, sigma^2-weighted alignment; trans, |cos| of {own} with that of the "
    "own cumulative gradient. gap: s_1/s_2, median over layers; flag: share of pairs too close to a tie to trust {own}; "
    "ratio: ||W - W_0|| / ||W_0||, Frobenius and spectral; {quality}. Chance: unrelated directions; for gap "
    "and {short} the value before training."
)
OWN_SPACE = (
    " own: v1 or u1, as each matrix's heading says, in the space in which the paper predicts its continuity (V, of which it "
    "predicts none: input); other: the other space's."
)
QUALITY = {"accuracy_end": "acc: test accuracy", "perplexity_end": "ppl: perplexity of held-out text"}
BASELINE = f"Positive activations alone give an input-space cosine near 1/pi = {measures.POSITIVE_BASELINE:.3f}"


@dataclass(frozen=True)
class Cell:
    """A measure's mean over the finished runs with its interval, and its chance level where it has one."""

    found: Interval
    null: float | None


@dataclass(frozen=True)
class Row:
    """One point: how its runs ended, its measures, and the cosine that its positive activations give by themselves.

    `matrix` is '' where the study has just one; `space` is the one that the measures are of.
    """

    matrix: str
    space: str
    setting: str
    variant: str
    finished: int
    diverged: int
    unfinished: int
    spiked: int
    cells: Mapping[str, Cell]
    baseline: float | None


def summary(ds: xr.Dataset) -> list[Row]:
    """A row for every point, setting by setting, in the order of the results; raises as `measures.thresholds` does."""
    rules = measures.thresholds(ds)
    rows = []
    for matrix, of_matrix in measures.matrices(ds).items():
        numbers = measures.per_run(of_matrix, rules)
        for setting in measures.distinct(numbers.setting):
            inside = numbers.isel(run=(numbers.setting == setting).values)
            for variant in measures.distinct(inside.variant):
                runs = inside.isel(run=(inside.variant == variant).values)
                rows.append(_row(matrix, setting, variant, runs, rules["confidence"]))
    return rows


def headings(rows: Sequence[Row]) -> dict[str, str]:
    """What the measures of these rows are called."""
    found = {row.space for row in rows}
    own = spaces.LABELS[found.pop()] if len(found) == 1 and not rows[0].matrix else ""
    other = {"v1": "u1", "u1": "v1"}.get(own, "other")
    return {name: COLUMNS[name].format(own=own or "own", other=other) for name in rows[0].cells}


def legend(rows: Sequence[Row], rank: int) -> str:
    """What the columns mean; `rank`: how many leading vectors were measured."""
    (quality,) = [name for name in QUALITY if name in rows[0].cells]
    several, space = bool(rows[0].matrix), rows[0].space
    said = {"quality": QUALITY[quality], "short": COLUMNS[quality], "rank": rank}
    said |= {"space": "Own", "own": "own"} if several else {"space": space.capitalize(), "own": spaces.LABELS[space]}
    return LEGEND.format(**said) + OWN_SPACE * several


def _row(matrix: str, setting: str, variant: str, runs: xr.Dataset, confidence: float) -> Row:
    done = measures.finished(runs)
    counts = {status: int((runs.status == status).sum()) for status in STATUSES}
    left_out = "accuracy_end" if "perplexity_end" in runs else "perplexity_end"
    shown = [name for name in COLUMNS if name != left_out]
    cells = {name: Cell(mean_interval(done[name], confidence), _null(done, name)) for name in shown}
    baseline = measures.POSITIVE_BASELINE if variant == measures.POSITIVE else None
    label, space = measures.labelled(matrix, setting), str(runs.attrs["space"])
    return Row(matrix, space, label, variant, **counts, spiked=int(done.spiked.sum()), cells=cells, baseline=baseline)


def _null(done: xr.Dataset, name: str) -> float | None:
    levels = done[f"{name}_chance"].values if f"{name}_chance" in done else np.array([])
    return float(levels.mean()) if levels.size else None
