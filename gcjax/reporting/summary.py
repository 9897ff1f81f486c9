"""One row a point of the study: what v1 says and, beside it, what keeps it honest, each with its chance level."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xarray as xr

from gcjax.reporting import measures
from gcjax.reporting.statistics import Interval, mean_interval
from gcjax.results import STATUSES

COLUMNS: Mapping[str, str] = {  # measure -> heading
    "weight_v1_peak": "v1 peak",
    "weight_v1_end": "v1 end",
    "cumulative_v1_end": "grad v1",
    "weight_u1_end": "u1",
    "overlap_end": "top K",
    "gram_end": "Gram",
    "sigma2_end": "s2",
    "gap_end": "gap",
    "flagged_end": "flag",
    "transfer_end": "trans",
    "ratio_frobenius_end": "ratio F",
    "ratio_spectral_end": "ratio S",
    "accuracy_end": "acc",
}
LEGEND = (
    "Means over finished runs at the last snapshot; div: diverged, spk: loss spike. v1, u1: weight continuity in "
    "input and output space; grad: of the cumulative gradient. Input space: top K, overlap of the leading {rank} "
    "dimensions; Gram, alignment of Gram matrices; s2, sigma^2-weighted alignment; trans, |cos| of v1 with that of the "
    "own cumulative gradient. gap: s_1/s_2, median over layers; flag: share of pairs too close to a tie to trust v1; "
    "ratio: ||W - W_0|| / ||W_0||, Frobenius and spectral; acc: test accuracy. Chance: unrelated directions; for gap "
    "and acc the value before training."
)
BASELINE = f"Positive activations alone give an input-space cosine near 1/pi = {measures.POSITIVE_BASELINE:.3f}"


@dataclass(frozen=True)
class Cell:
    """A measure's mean over the finished runs with its interval, and its chance level where it has one."""

    found: Interval
    null: float | None


@dataclass(frozen=True)
class Row:
    """One point: how its runs ended, its measures, and the cosine that its positive activations give by themselves."""

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
                rows.append(_row(measures.labelled(matrix, setting), variant, runs, rules["confidence"]))
    return rows


def _row(setting: str, variant: str, runs: xr.Dataset, confidence: float) -> Row:
    done = measures.finished(runs)
    counts = {status: int((runs.status == status).sum()) for status in STATUSES}
    cells = {name: Cell(mean_interval(done[name], confidence), _null(done, name)) for name in COLUMNS}
    baseline = measures.POSITIVE_BASELINE if variant == measures.POSITIVE else None
    return Row(setting, variant, **counts, spiked=int(done.spiked.sum()), cells=cells, baseline=baseline)


def _null(done: xr.Dataset, name: str) -> float | None:
    levels = done[f"{name}_chance"].values if f"{name}_chance" in done else np.array([])
    return float(levels.mean()) if levels.size else None
