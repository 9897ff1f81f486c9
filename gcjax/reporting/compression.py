"""What sharing and pruning cost a checkpoint: tables, the paper's two claims about it, and advice as JSON."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy import stats

from gcjax.reporting.checks import Check, check
from gcjax.reporting.claims import Claim
from gcjax.reporting.spaces import other
from gcjax.reporting.statistics import Interval, mean_interval
from gcjax.reporting.tables import Cells, number
from gcjax.results import CHOICES, PREDICTED, SCHEMES, SPACES

CONFIDENCE = 0.95
MARGIN = 0.0  # of an interval that has to be above it
SHARING = "Bases are better shared in the space in which a projection is continuous than in the other one."
PRUNING = "The layers whose weights continue those beside them are the ones to leave out."
ORDERS = {
    "continuity": "weight continuity",
    "depth": "last but one first",
    "influence": "block influence",
    "measured": "measured, one by one",
}
SHARING_LEGEND = (
    "Relative error of a window's outputs, mean over windows, each layer's own basis and one shared in the input or the "
    "output space, at equal parameters; in brackets the same spectra in random frames (weights alone). other - predicted: what "
    "the space that the paper predicts saves against the other one; own - shared: what the better shared basis saves against "
    "none (negative: it costs); each with half its {sure:.0f}% interval over windows. advice: the least mean error, in "
    "capitals where that is sure."
)
ONE_LEGEND = (
    "Perplexity on held-out text (as it is {dense}) with one projection compressed, in windows of {size}, for outputs on real "
    "inputs. Last: difference of mean losses, nats a token, with half its {sure:.0f}% interval over sequences; above 0 the "
    "predicted space is the better one."
)
ALL_LEGEND = (
    "The same with all projections compressed: each layer its own bases; shared in the spaces that the paper predicts, or in "
    "the other ones (V, of which it predicts none, its own in both); by the least mean error."
)
PRUNING_LEGEND = (
    "Perplexity without so many layers, chosen by each score; at random: mean, in brackets the range of {draws} draws. "
    "rank correlation: of the score with the measured fall of the loss when that layer alone is left out (1: it tells exactly "
    "which ones are needless), with its {sure:.0f}% interval."
)


class Advice(NamedTuple):
    """Of one projection in windows of one size, at one ratio; errors by choice, differences over windows."""

    matrix: str
    size: int
    ratio: float
    error: dict[str, float]
    null: dict[str, float]
    choice: str
    saves: Interval  # own less the better shared one
    predicted: Interval | None  # the other space less the predicted one; None where the paper predicts none
    windows: list[dict[str, Any]]

    @property
    def sure(self) -> bool:
        """Whether the interval of sharing against not sharing leaves 0 out, on the side of the advice."""
        return self.saves.low > 0 if self.choice != "own" else self.saves.high < 0


def objective(ds: xr.Dataset) -> str:
    """The one that advice is for: outputs on real inputs where they were measured."""
    return str(ds.objective.values[-1])


def shown_ratio(ds: xr.Dataset) -> float:
    """The ratio of the tables: the middle one of those whose perplexity was measured, else of all."""
    ratios = np.sort(ds.tested.values if "tested" in ds.dims else ds.ratio.values)
    return float(ratios[len(ratios) // 2])


def advice(ds: xr.Dataset) -> Iterator[Advice]:
    """For every projection, window size and ratio."""
    for matrix in ds.matrix.values.tolist():
        for size in ds["size"].values.tolist():
            for ratio in ds.ratio.values.tolist():
                yield _advice(ds.sel(matrix=matrix, size=size, ratio=ratio), matrix, size, ratio)


def _advice(one: xr.Dataset, matrix: str, size: int, ratio: float) -> Advice:
    error = one.error.sel(objective=objective(one))
    by_choice = {choice: error.sel(choice=choice).values.astype(float) for choice in CHOICES}
    mean = {choice: float(error.sel(choice=choice).mean()) for choice in CHOICES}
    shared = min(SPACES, key=lambda space: mean[space])
    predicted = PREDICTED.get(matrix)
    windows = []
    for w in np.flatnonzero(np.isfinite(by_choice["own"])).tolist():
        errors = {choice: float(by_choice[choice][w]) for choice in CHOICES}
        layers = [int(one.window_first[w]), int(one.window_last[w])]
        windows.append({"layers": layers, "advice": min(errors, key=lambda choice: errors[choice]), "error": errors})
    return Advice(
        matrix,
        size,
        ratio,
        mean,
        {choice: float(one.null_error.sel(choice=choice).mean()) for choice in CHOICES},
        CHOICES[int(one.advised.sel(objective=objective(one)))],
        mean_interval(by_choice["own"] - by_choice[shared], CONFIDENCE),
        mean_interval(by_choice[other(predicted)] - by_choice[predicted], CONFIDENCE) if predicted in SPACES else None,
        windows,
    )


def advice_json(ds: xr.Dataset) -> bytes:
    """All advice: per projection, window size and ratio, and per window."""
    rows = [
        {
            "projection": one.matrix,
            "window_size": one.size,
            "parameters_kept": round(one.ratio, 6),
            "advice": one.choice,
            "sure": one.sure,
            "expected_error": one.error[one.choice],
            "error": one.error,
            "error_in_random_frames": one.null,
            "sharing_saves": _interval(one.saves),
            "predicted_space_saves": None if one.predicted is None else _interval(one.predicted),
            "windows": one.windows,
        }
        for one in advice(ds)
    ]
    head = {"model": ds.attrs["model"], "objective": objective(ds), "confidence": CONFIDENCE, "advice": rows}
    return json.dumps(head, indent=1).encode()


def _interval(found: Interval) -> list[float | None]:
    """Value, low, high; None for what is not finite, which JSON does not know."""
    return [float(x) if np.isfinite(x) else None for x in (found.value, found.low, found.high)]


def _signed(found: Interval | None) -> str:
    """A difference and half its interval."""
    if found is None:
        return "-"
    return f"{found.value:+.3f}" + (f" ±{(found.high - found.low) / 2:.3f}" if np.isfinite(found.low) else "")


def sharing_cells(ds: xr.Dataset) -> Cells:
    """Head and body of the advice, at `shown_ratio`."""
    ratio, body = shown_ratio(ds), []
    for one in advice(ds.sel(ratio=[ratio])):
        errors = [f"{number(one.error[choice], 3)} ({number(one.null[choice], 3)})" for choice in CHOICES]
        said = one.choice.upper() if one.sure else one.choice
        body.append([one.matrix.capitalize(), str(one.size), *errors, _signed(one.predicted), _signed(one.saves), said])
    return [["", "layers", *CHOICES, "other - predicted", "own - shared", "advice"], *body]


def has_perplexity(ds: xr.Dataset) -> bool:
    return "nll_dense" in ds


def perplexity(nll: xr.DataArray) -> float:
    """Of losses by sequence."""
    return float(np.exp(nll.mean()))


def one_cells(ds: xr.Dataset) -> Cells:
    """Head and body: perplexity with one projection compressed."""
    body = []
    for tested in ds.tested.values.tolist():
        for matrix in ds.matrix.values.tolist():
            nll = ds.nll.sel(matrix=matrix, tested=tested)
            shown = [_perplexity(nll.sel(choice=choice)) for choice in CHOICES]
            body.append([matrix.capitalize(), number(tested, 2), *shown, _signed(space_gain(ds, matrix, tested))])
    return [["", "kept", *CHOICES, "loss, other - predicted"], *body]


def all_cells(ds: xr.Dataset) -> Cells:
    """Head and body: perplexity with all projections compressed."""
    body = []
    for tested in ds.tested.values.tolist():
        nll = ds.nll_all.sel(tested=tested)
        shown = [_perplexity(nll.sel(scheme=scheme)) for scheme in SCHEMES]
        gain = mean_interval(nll.sel(scheme="opposite") - nll.sel(scheme="predicted"), CONFIDENCE)
        body.append(["All", number(tested, 2), *shown, _signed(gain)])
    return [["", "kept", *SCHEMES, "loss, opposite - predicted"], *body]


def space_gain(ds: xr.Dataset, matrix: str, tested: float) -> Interval | None:
    """The loss with one projection shared in the other space less that in the predicted one; None where there is none."""
    predicted = PREDICTED.get(matrix)
    if predicted not in SPACES:
        return None
    nll = ds.nll.sel(matrix=matrix, tested=tested)
    return mean_interval(nll.sel(choice=other(predicted)) - nll.sel(choice=predicted), CONFIDENCE)


def _perplexity(nll: xr.DataArray) -> str:
    value = perplexity(nll)
    return f"{value:.4g}" if value < 1e4 else f"{value:.1e}"


def rank_correlation(score: NDArray[Any], fall: NDArray[Any]) -> Interval:
    """Spearman's, with Fisher's interval in Bonett and Wright's form (2000)."""
    known = np.isfinite(score) & np.isfinite(fall)
    n = int(known.sum())
    if n < 4 or np.ptp(score[known]) == 0:
        return Interval(np.nan, -np.inf, np.inf, n)
    value = float(stats.spearmanr(score[known], fall[known])[0])  # pyright: ignore[reportArgumentType]
    half = float(stats.norm.ppf((1 + CONFIDENCE) / 2)) * np.sqrt((1 + value**2 / 2) / (n - 3))
    middle = np.arctanh(np.clip(value, -1 + 1e-12, 1 - 1e-12))
    return Interval(value, float(np.tanh(middle - half)), float(np.tanh(middle + half)), n)


def correlations(ds: xr.Dataset) -> dict[str, Interval]:
    """Of each score with the fall of the loss when a layer alone is left out."""
    fall = -(ds.nll_without.mean("sequence") - ds.nll_dense.mean()).values
    return {order: rank_correlation(ds.score.sel(order=order).values, fall) for order in ds.order.values.tolist()}


def pruning_cells(ds: xr.Dataset) -> Cells:
    """Head and body: one order a row, then random layers."""
    body = []
    for order, found in correlations(ds).items():
        shown = [_perplexity(ds.nll_pruned.sel(order=order, pruned=count)) for count in ds.pruned.values]
        low, high = number(found.low, 2), number(found.high, 2)
        rank = "by construction" if order == "measured" else f"{number(found.value, 2)} [{low}, {high}]"
        body.append([ORDERS[order], *shown, rank])
    drawn = np.exp(ds.nll_random.mean("sequence"))
    shown = [f"{float(x.mean()):.4g} ({float(x.min()):.4g}, {float(x.max()):.4g})" for x in drawn.transpose("pruned", "draw")]
    body.append(["at random", *shown, ""])
    return [["", *(f"{count} left out" for count in ds.pruned.values), "rank correlation"], *body]


def claims(ds: xr.Dataset) -> list[Claim]:
    """`sharing-space`, at `shown_ratio` in the first windows, and `pruning-continuity`."""
    first = ds.sel(ratio=[shown_ratio(ds)], size=[ds["size"].values[0]])
    checks = [
        check(f"{one.matrix.capitalize()}: error, other - predicted", one.predicted, at_least=MARGIN)
        for one in advice(first)
        if one.predicted is not None
    ]
    if has_perplexity(ds):
        gains = {matrix: space_gain(ds, matrix, shown_ratio(ds)) for matrix in ds.matrix.values.tolist()}
        checks += [
            check(f"{matrix.capitalize()}: loss, other - predicted", gain, at_least=MARGIN)
            for matrix, gain in gains.items()
            if gain is not None
        ]
    found = [_claim("sharing-space", SHARING, ds, checks, "no projection of which the paper predicts a space")]
    ranked: list[Check] = []
    if has_perplexity(ds):
        by_continuity = correlations(ds)["continuity"]
        ranked = [check("rank correlation, continuity and measured", by_continuity, null=0.0, at_least=MARGIN)]
    return [*found, _claim("pruning-continuity", PRUNING, ds, ranked, "the model was not run")]


def _claim(name: str, statement: str, ds: xr.Dataset, checks: list[Check], lacking: str) -> Claim:
    if not checks:
        return Claim(name, statement, str(ds.attrs["model"]), "not tested", (), (lacking,))
    verdict = "reproduced" if all(one.passed for one in checks) else "not reproduced"
    return Claim(name, statement, str(ds.attrs["model"]), verdict, tuple(checks), ())


def summary(ds: xr.Dataset) -> list[list[Any]]:
    """A row for every projection, window size and ratio."""
    head = ["matrix", "size", "ratio", *CHOICES, *(f"{choice}_random_frames" for choice in CHOICES), "advice", "sure",
            *(f"own_less_shared{end}" for end in ("", "_low", "_high")),
            *(f"other_less_predicted{end}" for end in ("", "_low", "_high"))]  # fmt: skip
    body = []
    for one in advice(ds):
        saves = (one.saves.value, one.saves.low, one.saves.high)
        space = ("", "", "") if one.predicted is None else (one.predicted.value, one.predicted.low, one.predicted.high)
        errors = [found[choice] for found in (one.error, one.null) for choice in CHOICES]
        body.append([one.matrix, one.size, one.ratio, *errors, one.choice, one.sure, *saves, *space])
    return [head, *body]


def sections(ds: xr.Dataset) -> list[tuple[str, Cells, str]]:
    """Heading, table and legend of each part that was measured."""
    sure = 100 * CONFIDENCE
    kept = (
        f"Sharing, {100 * shown_ratio(ds):.3g}% of the parameters kept, "
        + {
            "frobenius": "weights alone",
            "activations": "outputs on real inputs",
        }[objective(ds)]
    )
    found = [(kept, sharing_cells(ds), SHARING_LEGEND.format(sure=sure))]
    if has_perplexity(ds):
        size, dense = int(ds["size"].values[0]), _perplexity(ds.nll_dense)
        found += [
            ("Perplexity, one projection", one_cells(ds), ONE_LEGEND.format(size=size, dense=dense, sure=sure)),
            ("Perplexity, all projections", all_cells(ds), ALL_LEGEND),
            ("Pruning", pruning_cells(ds), PRUNING_LEGEND.format(draws=ds.sizes["draw"], sure=sure)),
        ]
    return found
