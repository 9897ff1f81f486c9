"""A measured checkpoint, projection by projection: the paper's pattern as a table and as claims."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from gcjax.reporting import pattern
from gcjax.reporting.checks import Check
from gcjax.reporting.claims import Claim, Verdict
from gcjax.reporting.spaces import LABELS, PATTERN, PREDICTED
from gcjax.reporting.statistics import Interval, mean_interval
from gcjax.reporting.tables import number

MARGIN = 0.1  # above chance, from which a mean |cos| counts as continuity; chance is .005 to .06 in real widths
CONFIDENCE = 0.95
AT_SCALE = 8e9  # parameters
LEGEND = (
    "Means over pairs of adjacent layers, in brackets the chance level. raw: the matrix as stored; effective: with its norm's "
    "gains folded in, its chance level that of the same spectrum and gains in random frames. v1, u1: |cos| of the leading "
    "singular vectors in input and output space. Gram: alignment of Gram matrices, its chance level 0 where none is given; "
    "s2: sigma^2-weighted alignment over the spectrum, chance as v1 and u1 of the raw form; both input / output. flag: pairs "
    "too close to a tie to trust."
)


@dataclass(frozen=True)
class Row:
    """One projection in one form; pairs of values are (input, output)."""

    matrix: str
    form: str
    cosine: tuple[Interval, Interval]
    chance: tuple[float, float]
    gram: tuple[float, float]
    gram_chance: tuple[float, float]
    sigma2: tuple[float, float]
    sigma2_missing: tuple[float, float]
    flagged: int
    pairs: int
    stored: tuple[float, float]  # median over layers of the rounding angle, radians
    continuous: str  # "input", "output", "both" or "neither": above chance by the margin

    @property
    def verdict(self) -> str:
        """Whether this is what the paper says of the projection; a second, weaker space does not contradict it."""
        predicted = PREDICTED.get(self.matrix)
        if predicted is None:
            return self.continuous
        values = [found.value for found in self.cosine]
        larger = "input" if values[0] > values[1] else "output"
        fits = (
            self.continuous == "neither"
            if predicted == "neither"
            else (self.continuous in (predicted, "both") and larger == predicted)
        )
        return f"{self.continuous}{'' if fits else f', predicted {predicted}'}"


def continuous(spaces: Sequence[str], means: Sequence[float], chance: Sequence[float]) -> str:
    """The spaces in which a mean |cos| is above chance by MARGIN: one of them, "both" or "neither"."""
    above = [space for space, mean, level in zip(spaces, means, chance) if mean > level + MARGIN]
    return {0: "neither", 1: above[0] if above else "", 2: "both"}[len(above)]


def rows(ds: xr.Dataset) -> list[Row]:
    """A row for every projection and form."""
    return [_row(ds.sel(matrix=matrix, form=form), matrix, form) for matrix in ds.matrix.values for form in ds.form.values]


def _row(one: xr.Dataset, matrix: str, form: str) -> Row:
    cosine = [mean_interval(one.cosine.sel(rank=1, space=space), CONFIDENCE) for space in one.space.values]
    chance = [float(level) for level in one.cosine_null]
    pairs = int(np.isfinite(one.cosine.sel(rank=1, space="input")).sum())
    means = {
        name: tuple(map(float, one[name].mean("pair"))) for name in ("gram_alignment", "sigma2_alignment", "sigma2_missing")
    }
    return Row(
        matrix=str(matrix),
        form=str(form),
        cosine=(cosine[0], cosine[1]),
        chance=(chance[0], chance[1]),
        gram=means["gram_alignment"],  # pyright: ignore[reportArgumentType]
        gram_chance=tuple(map(float, one.gram_null)),  # pyright: ignore[reportArgumentType]
        sigma2=means["sigma2_alignment"],  # pyright: ignore[reportArgumentType]
        sigma2_missing=means["sigma2_missing"],  # pyright: ignore[reportArgumentType]
        flagged=int(one.flagged.sum()),
        pairs=pairs,
        stored=tuple(map(float, one.rounding_angle.median("layer"))),  # pyright: ignore[reportArgumentType]
        continuous=continuous(one.space.values.tolist(), [found.value for found in cosine], chance),
    )


def claims(ds: xr.Dataset) -> list[Claim]:
    """`projections` and `at-scale`, from the raw form; not tested where a projection is missing or the model small."""
    checks, missing = _checks(ds), [name for name in PREDICTED if name not in ds.matrix.values]
    lacking = [f"no projection {', '.join(missing)} in family {ds.attrs['family']}"] * bool(missing)
    size = float(ds.attrs["parameters"])
    small = [f"{size / 1e9:.3g}B parameters, {AT_SCALE / 1e9:.0f}B needed"] * (size < AT_SCALE)
    return [
        _claim("projections", PATTERN, ds, checks, lacking),
        _claim(
            "at-scale", "The pattern holds in pretrained Llama models of 8B to 70B parameters.", ds, checks, lacking + small
        ),
    ]


def _claim(name: str, statement: str, ds: xr.Dataset, checks: Sequence[Check], lacking: Sequence[str]) -> Claim:
    verdict: Verdict = "not tested" if lacking else "reproduced" if all(one.passed for one in checks) else "not reproduced"
    return Claim(name, statement, str(ds.attrs["model"]), verdict, () if lacking else tuple(checks), tuple(lacking))


def _checks(ds: xr.Dataset) -> list[Check]:
    checks = []
    for matrix, predicted in PREDICTED.items():
        if matrix in ds.matrix.values:
            raw = ds.sel(matrix=matrix, form="raw")
            cosine = {space: raw.cosine.sel(rank=1, space=space) for space in LABELS}
            chance = {space: float(raw.cosine_null.sel(space=space)) for space in LABELS}
            checks += pattern.checks(f"{matrix.capitalize()}: ", predicted, cosine, chance, MARGIN, CONFIDENCE)
    return checks


HEAD = ["", "form", "v1", "u1", "Gram", "s2", "flag", "continuous in"]


def cells(listed: Sequence[Row]) -> list[list[str]]:
    """Head and body of the table."""
    body = []
    for row in listed:
        cosines = [f"{number(found.value, 3)} ({number(level, 3)})" for found, level in zip(row.cosine, row.chance)]
        sigma2 = [f"{number(value, 3)}{'' if missing == 0 else '+'}" for value, missing in zip(row.sigma2, row.sigma2_missing)]
        gram = " / ".join(
            number(value, 3) + (f" ({number(level, 3)})" if level else "") for value, level in zip(row.gram, row.gram_chance)
        )
        body.append(
            [row.matrix.capitalize(), row.form, *cosines, gram, " / ".join(sigma2), f"{row.flagged}/{row.pairs}", row.verdict]
        )
    return [HEAD, *body]


def csv(listed: Sequence[Row]) -> list[list[Any]]:
    """One row a projection and form, with everything."""
    cosines = [f"{label}{part}" for label in LABELS.values() for part in ("", "_low", "_high", "_chance")]
    others = [f"{name}_{space}" for name in ("gram", "gram_chance", "sigma2", "sigma2_missing", "rounding") for space in LABELS]
    head = ["matrix", "form", *cosines, *others, "flagged", "pairs", "continuous"]
    body = []
    for row in listed:
        cosines = [(found.value, found.low, found.high, level) for found, level in zip(row.cosine, row.chance)]
        others = (
            *row.gram,
            *row.gram_chance,
            *row.sigma2,
            *row.sigma2_missing,
            *row.stored,
            row.flagged,
            row.pairs,
            row.continuous,
        )
        body.append([row.matrix, row.form, *cosines[0], *cosines[1], *others])
    return [head, *body]
