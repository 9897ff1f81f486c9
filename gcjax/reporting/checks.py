"""One number against one threshold, and the runs of one setting that such numbers are taken from."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from gcjax.reporting import measures, spaces
from gcjax.reporting.statistics import Interval, mean_interval, paired

UNDECIDED = "undecided, the interval spans the threshold"
LABELS = {  # {own}, {other}: v1 or u1, by the space that the numbers are of
    "weight_start": "weight {own} at step 0",
    "weight_peak": "weight {own}, peak",
    "weight_end": "weight {own} at end",
    "weight_drop": "weight {own}, peak - end",
    "weight_other_peak": "weight {other}, peak",
    "weight_other_end": "weight {other} at end",
    "gradient_start": "gradient {own} at step 0",
    "cumulative_end": "cumulative-gradient {own} at end",
    "dominance_end": "lead of rank 1, weights",
    "transfer_end": "transfer at end",
}


@dataclass(frozen=True)
class Check:
    """A mean over `n` runs against a threshold.

    It passes where its whole confidence interval does, so that a few noisy seeds prove nothing. One that does not
    decide is shown for information. `null` is the chance level, where there is one.
    """

    name: str
    value: float
    low: float
    high: float
    n: int
    null: float | None
    threshold: str
    passed: bool
    decides: bool
    detail: str


def check(
    name: str,
    found: Interval,
    *,
    null: float | None = None,
    at_least: float = -np.inf,
    at_most: float = np.inf,
    decides: bool = True,
    detail: str = "",
) -> Check:
    """Hold an interval against [at_least, at_most]; one that spans a threshold fails and is called undecided."""
    passed = found.low >= at_least and found.high <= at_most
    spans = not passed and found.low <= at_most and found.high >= at_least
    threshold = f"in [{at_least:.3g}, {at_most:.3g}]"
    if np.isinf(at_least) and np.isinf(at_most):
        threshold = ""
    elif at_least == -at_most:
        threshold = f"within ±{at_most:.3g}"
    elif np.isinf(at_least):
        threshold = f"<= {at_most:.3g}"
    elif np.isinf(at_most):
        threshold = f">= {at_least:.3g}"
    detail = "; ".join(filter(None, [UNDECIDED if spans else "", detail]))
    return Check(name, found.value, found.low, found.high, found.n, null, threshold, passed, decides, detail)


@dataclass(frozen=True)
class Setting:
    """The runs of one setting as `measures.per_run` numbers, and the confidence of a statement about them.

    The numbers are of one matrix, of the first where `matrices` holds a setting for each; those differ in their numbers
    alone, and have the matrix as `subject` in their checks' names.
    """

    label: str
    numbers: xr.Dataset
    confidence: float
    subject: str = ""
    matrices: Mapping[str, "Setting"] = field(default_factory=dict)

    @property
    def variants(self) -> list[str]:
        """The variants that were run, whatever became of their runs."""
        return measures.distinct(self.numbers.variant)

    @cached_property
    def _by_variant(self) -> dict[str, xr.Dataset]:
        return {name: self.numbers.isel(run=(self.numbers.variant == name).values) for name in self.variants}

    def every(self, variant: str) -> xr.Dataset:
        """All runs of a variant; an empty dataset where it was not run."""
        return self._by_variant[variant] if variant in self._by_variant else self.numbers.isel(run=slice(0))

    @cached_property
    def _finished(self) -> dict[str, xr.Dataset]:
        return {name: measures.finished(runs) for name, runs in self._by_variant.items()}

    def runs(self, variant: str) -> xr.Dataset:
        """The finished runs of a variant; means are taken over these."""
        return self._finished[variant] if variant in self._finished else self.every(variant)

    def without_spikes(self) -> "Setting":
        """The same setting without the runs whose loss spiked late."""
        return replace(self, numbers=self.numbers.isel(run=~self.numbers.spiked.values))

    def count(self, variant: str) -> str:
        """How many of the variant's runs finished, and what became of the others; '' where all finished smoothly."""
        every, done = self.every(variant), self.runs(variant)
        counts = {status: int((every.status == status).sum()) for status in ("diverged", "unfinished")}
        counts["with a loss spike"] = int(done.spiked.sum())
        odd = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return f"{variant}: {done.sizes['run']} of {every.sizes['run']} runs finished, {odd}" if odd else ""

    def name(self, who: str, measure: str) -> str:
        """What a check of a measure is called: `SiLU: Gate weight v1 at end`."""
        own = self.numbers.attrs["space"]
        what = LABELS[measure].format(own=spaces.LABELS[own], other=spaces.LABELS[spaces.other(own)])
        return f"{who}: {self.subject} {what}" if self.subject else f"{who}: {what}"

    def null(self, variant: str, measure: str) -> float:
        """The measure's chance level, mean over the variant's runs."""
        return float(self.runs(variant)[f"{measure}_chance"].mean())

    def check(self, variant: str, measure: str, **how: Any) -> Check:
        """One variant's mean of `measure`, beside its chance level where it has one, against the bounds in `how`."""
        null = self.null(variant, measure) if f"{measure}_chance" in self.numbers else None
        found = mean_interval(self.runs(variant)[measure], self.confidence)
        return check(self.name(variant, measure), found, null=null, **how)

    def lead(self, front: str, back: str, measure: str, **how: Any) -> Check:
        """How far one variant lies above another in `measure`, paired by seed."""
        found = mean_interval(paired(self.runs(front)[measure], self.runs(back)[measure]), self.confidence)
        return check(self.name(f"{front} - {back}", measure), found, **how)

    def ratio_at_crossing(self, variant: str, norm: str, **how: Any) -> Check:
        """Update ratio at which transfer crosses its level: geometric mean, with the interval of the mean logarithm.

        A run that never crosses, or has crossed before it is first seen, bounds its ratio from one side only; so the
        interval is open on that side, and the check cannot pass.
        """
        runs = self.runs(variant)
        log = mean_interval(np.log(runs[f"crossing_{norm}"]), self.confidence)
        never, before = (int((runs[f"censored_{norm}"] == side).sum()) for side in (1, -1))
        low, high = 0.0 if before else np.exp(log.low), np.inf if never else np.exp(log.high)
        counts = {"never cross": never, "had crossed when first seen": before}
        detail = "; ".join(f"{count} of {log.n} runs {what}" for what, count in counts.items() if count)
        found = Interval(float(np.exp(log.value)), float(low), float(high), log.n)
        return check(f"{variant}: {norm.capitalize()} ratio at crossing", found, detail=detail, **how)
