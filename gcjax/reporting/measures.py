"""A study's results as a few numbers a run, each with its chance level: all that claims and summary read."""

import json
from collections.abc import Callable, Mapping
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from gcjax.errors import GcjaxError
from gcjax.reporting import spaces

ARCHITECTURE = (  # what makes up a variant
    "model.residual",
    "model.activation",
    "model.activation_scale",
    "model.activation_shift",
    "model.negative_slope",
    "model.normalization",
    "model.norm",
    "model.attention",
    "model.rope",
    "model.value_activation",
)
SEED = "seed"
SPIKE_AFTER, SPIKE_FACTOR = 0.25, 10.0
POSITIVE = "NoRes+ReLU"
POSITIVE_BASELINE = 1 / np.pi  # E[relu(z)]^2 / E[relu(z)^2], z normal
AS_CONFIGURED = "as configured"


def thresholds(ds: xr.Dataset) -> dict[str, Any]:
    """The claims' thresholds, fixed in the config before the study ran; raises `GcjaxError` where there are none."""
    config = json.loads(ds.attrs["config"])
    if "claims" not in config:
        raise GcjaxError("the results' config holds no 'claims': no threshold was fixed before the study ran")
    return config["claims"]


def matrices(ds: xr.Dataset) -> dict[str, xr.Dataset]:
    """One dataset a matrix of the layer, by the matrix's name; by '' where there is just one, as in the MLP."""
    if ds.sizes["matrix"] == 1:
        return {"": ds.isel(matrix=0)}
    return {name: ds.sel(matrix=name) for name in spaces.ordered(ds.matrix.values.tolist())}


def space(ds: xr.Dataset) -> str:
    """The space that the numbers of a dataset of one matrix are of."""
    return spaces.own(str(ds.matrix.values))


def is_language(ds: xr.Dataset) -> bool:
    """Whether the study's models predict tokens: their test loss is nats a token, and has a perplexity."""
    return "vocabulary" in json.loads(ds.attrs["config"])["model"]


def distinct(values: xr.DataArray) -> list[Any]:
    """The different values in the order of their first appearance: results list the paper's variants in its order."""
    return list(dict.fromkeys(values.values.tolist()))


def finished(runs: xr.Dataset) -> xr.Dataset:
    """The runs that reached their last step; means are taken over these alone."""
    return runs.isel(run=(runs.status == "finished").values)


def outside_variant(path: str) -> bool:
    """Whether a swept path belongs to a run's setting, as opposed to its variant and seed."""
    return path not in (*ARCHITECTURE, SEED)


def labelled(matrix: str, setting: str) -> str:
    """The setting's label in a study of several matrices: `Gate v1`, `Down u1, lr=0.001`."""
    if not matrix:
        return setting
    return spaces.heading(matrix) + ("" if setting == AS_CONFIGURED else f", {setting}")


def settings(ds: xr.Dataset, keep: Callable[[str], bool] = outside_variant) -> list[str]:
    """Each run's setting, spelt out: its values of the swept paths that differ between runs and that `keep` accepts.

    Behind the first, values that equal the config's own are left out: `adam`, `adam, lr=0.0003, b2=0`, `sgd, lr=0.03`.
    """
    config = json.loads(ds.attrs["config"])
    swept = [path for path in json.loads(ds.attrs["sweep"]) if outside_variant(path) and keep(path)]
    used = [path for path in swept if len(distinct(ds[path])) > 1]
    short = [path.split(".")[-1] for path in used]
    names = [path if short.count(name) > 1 else name for path, name in zip(used, short)]
    usual = [reduce(getitem, path.split("."), config) for path in used]
    labels = [
        ", ".join(_spell(name, x) for i, (name, x, base) in enumerate(zip(names, row, usual)) if not i or x != base)
        for row in zip(*(ds[path].values.tolist() for path in used))
    ]
    return labels or [AS_CONFIGURED] * ds.sizes["run"]


def _spell(name: str, value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if name == "name" else f"{name}={text}"


def end_index(ds: xr.Dataset) -> xr.DataArray:
    """Each run's last snapshot with a finite loss: runs of one study may differ in length, and padding is NaN."""
    known = np.isfinite(ds.loss)
    return known.sizes["step"] - 1 - known.isel(step=slice(None, None, -1)).argmax("step")


def at_end(ds: xr.Dataset) -> xr.Dataset:
    """The results without their step axes: each run at its last snapshot, and at its last full-spectrum snapshot."""
    step = end_index(ds)
    full = np.searchsorted(ds.full_step.values, ds.step.values[step.values], side="right") - 1
    return ds.isel(step=step, full_step=xr.DataArray(np.maximum(full, 0), dims="run"))


def over_pairs(ds: xr.Dataset, variable: str, source: str, space: str) -> xr.DataArray:
    """The mean of `variable` over adjacent layers, without pairs that have none because a matrix is zero."""
    return ds[variable].sel(source=source, space=space).mean("pair")


def continuity(ds: xr.Dataset, source: str, space: str) -> xr.DataArray:
    """The paper's continuity: the leading singular vectors' |cosine|, mean over adjacent layers."""
    return over_pairs(ds, "cosine", source, space).sel(rank=1)


def perplexity(ds: xr.Dataset) -> xr.DataArray:
    """Of a language model on held-out text, each token's."""
    with np.errstate(over="ignore"):  # of a run on its way to diverge
        return np.exp(ds.test_loss)


def spikes(ds: xr.Dataset, nats: float) -> xr.DataArray:
    """Snapshot intervals with a loss spike, over (run, step).

    A spike is a batch loss, after the first `SPIKE_AFTER` of the run, above `nats`, of a run that had learned before:
    above `SPIKE_FACTOR` times the lowest mean loss of a snapshot interval so far; or, as a language model's loss stays of
    the order of its first, where that lowest loss was below `nats` before the interval.
    """
    late = ds.step > SPIKE_AFTER * ds.step[end_index(ds)].drop_vars("step")
    floor = ds.loss.copy(data=np.fmin.accumulate(ds.loss.values, axis=ds.loss.get_axis_num("step")))
    learned = floor.shift(step=1) < nats if is_language(ds) else ds.loss_max > SPIKE_FACTOR * floor
    return late & (ds.loss_max > nats) & learned


def crossing(transfer: NDArray[Any], ratio: NDArray[Any], level: float) -> tuple[float, int]:
    """Update ratio at which `transfer` first reaches `level`, geometrically between snapshots, and how it is censored.

    Censored: 1 where it is never reached (the largest ratio seen is a lower bound), -1 where the first snapshot is
    already there (its ratio is an upper bound), 0 otherwise.
    """
    known = np.isfinite(transfer) & (ratio > 0)
    if not known.any():
        return np.nan, 0
    y, x = transfer[known].astype(np.float64), np.log(ratio[known].astype(np.float64))
    first = int(np.argmax(y >= level))
    if y[first] < level:
        return float(np.exp(x.max())), 1
    if first == 0:
        return float(np.exp(x[0])), -1
    return float(np.exp(np.interp(level, y[first - 1 : first + 1], x[first - 1 : first + 1]))), 0


def per_run(ds: xr.Dataset, rules: Mapping[str, Any]) -> xr.Dataset:
    """Every number that claims and summary use, over `run`; `NAME_chance` beside each NAME that has a chance level.

    `ds` holds one matrix, `rules` are `thresholds(ds)`. Numbers are of the matrix's own space, which stands in the attribute
    `space`; those called `other` of the other one. Gap, accuracy and perplexity have their value before training in place of
    a chance level. Only language models have a perplexity; crossings need the rule of the claim `transfer`.
    """
    own = space(ds)
    other = spaces.other(own)
    start, end = ds.isel(step=0), at_end(ds)
    weight, elsewhere = continuity(ds, "weight", own), continuity(ds, "weight", other)
    profile = over_pairs(end, "cosine", "weight", own)
    last_rank = ds["rank"].values[-1]
    numbers = {
        "weight_start": continuity(start, "weight", own),
        "weight_peak": weight.max("step"),
        "weight_peak_step": weight.idxmax("step"),
        "weight_end": continuity(end, "weight", own),
        "weight_drop": weight.max("step") - continuity(end, "weight", own),
        "weight_other_peak": elsewhere.max("step"),
        "weight_other_peak_step": elsewhere.idxmax("step"),
        "weight_other_end": continuity(end, "weight", other),
        "gradient_start": continuity(start, "gradient", own),
        "cumulative_end": continuity(end, "cumulative_gradient", own),
        "dominance_end": profile.sel(rank=1) - profile.sel(rank=slice(2, None)).mean("rank"),
        "overlap_end": over_pairs(end, "overlap", "weight", own).sel(rank=last_rank),
        "gram_end": over_pairs(end, "gram_alignment", "weight", own),
        "sigma2_end": over_pairs(end, "sigma2_alignment", "weight", own),
        "gap_end": end.gap.sel(source="weight").median("layer"),
        "flagged_end": end.flagged.sel(source="weight").mean("pair"),
        "transfer_end": end.transfer.sel(space=own).mean("layer"),
        "accuracy_end": end.test_accuracy,
        "spiked": spikes(ds, rules["spike"]).any("step"),
    }
    numbers |= {f"ratio_{norm}_end": end.update_ratio.sel(norm=norm).mean("layer") for norm in ds.norm.values.tolist()}
    if "transfer" in rules:
        numbers |= _crossings(ds, own, rules["transfer"]["crossing"])

    null = ds.cosine_null.sel(space=own)
    chance: dict[str, xr.DataArray] = dict.fromkeys(("weight_start", "weight_peak", "weight_end", "gradient_start"), null)
    chance |= dict.fromkeys(("cumulative_end", "sigma2_end", "transfer_end"), null)
    chance |= dict.fromkeys(("weight_other_peak", "weight_other_end"), ds.cosine_null.sel(space=other))
    chance |= {
        "dominance_end": xr.DataArray(0.0),
        "overlap_end": ds.overlap_null.sel(space=own, rank=last_rank),
        "gram_end": ds.gram_null_quantile.sel(source="weight", space=own).sel(quantile=0.5, method="nearest"),
        "gap_end": start.gap.sel(source="weight").median("layer"),
        "accuracy_end": start.test_accuracy,
    }
    if is_language(ds):
        numbers["perplexity_end"], chance["perplexity_end"] = perplexity(end), perplexity(start)
    numbers |= {
        f"{name}_chance": ds.seed.copy(data=np.broadcast_to(level.values, ds.sizes["run"])) for name, level in chance.items()
    }
    bare = {name: value.transpose("run").variable for name, value in numbers.items()}
    coords = {name: value.variable for name, value in ds.coords.items() if value.dims == ("run",)}
    result = xr.Dataset(bare, coords=coords).assign_coords(setting=("run", settings(ds)))
    return result.assign_attrs(sweep=ds.attrs["sweep"], matrix=str(ds.matrix.values), space=own)


def _crossings(ds: xr.Dataset, own: str, level: float) -> dict[str, xr.DataArray]:
    """The update ratio in each norm at which transfer reaches `level`, and how it is censored."""
    transfer, numbers = ds.transfer.sel(space=own).mean("layer"), {}
    for norm in ds.norm.values.tolist():
        ratio = ds.update_ratio.sel(norm=norm).mean("layer")
        found = [crossing(*pair, level) for pair in zip(transfer.values, ratio.values)]
        numbers[f"crossing_{norm}"] = xr.DataArray([value for value, _ in found], dims="run")
        numbers[f"censored_{norm}"] = xr.DataArray([side for _, side in found], dims="run")
    return numbers
