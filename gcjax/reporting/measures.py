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

ARCHITECTURE = ("model.residual", "model.activation", "model.normalization")  # what makes up a variant
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
    return {name: ds.sel(matrix=name) for name in ds.matrix.values.tolist()}


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
    """The setting's label in a study of several matrices."""
    return f"{matrix}, {setting}" if matrix else setting


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


def over_pairs(ds: xr.Dataset, variable: str, source: str, space: str = "input") -> xr.DataArray:
    """The mean of `variable` over adjacent layers, without pairs that have none because a matrix is zero."""
    return ds[variable].sel(source=source, space=space).mean("pair")


def continuity(ds: xr.Dataset, source: str, space: str = "input") -> xr.DataArray:
    """The paper's continuity: the leading singular vectors' |cosine|, mean over adjacent layers."""
    return over_pairs(ds, "cosine", source, space).sel(rank=1)


def spikes(ds: xr.Dataset, nats: float) -> xr.DataArray:
    """Snapshot intervals with a loss spike, over (run, step).

    A spike is a batch loss, after the first `SPIKE_AFTER` of the run, above `nats` and above `SPIKE_FACTOR` times the
    lowest mean loss of a snapshot interval so far: the factor keeps a run that never learned from counting as one.
    """
    late = ds.step > SPIKE_AFTER * ds.step[end_index(ds)].drop_vars("step")
    floor = ds.loss.copy(data=np.fmin.accumulate(ds.loss.values, axis=ds.loss.get_axis_num("step")))
    return late & (ds.loss_max > nats) & (ds.loss_max > SPIKE_FACTOR * floor)


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

    `ds` holds one matrix, `rules` are `thresholds(ds)`. v1 is the input space's leading vector, u1 the output space's;
    gap and accuracy have their value before training in place of a chance level.
    """
    start, end, v1 = ds.isel(step=0), at_end(ds), continuity(ds, "weight")
    profile = over_pairs(end, "cosine", "weight")
    transfer = ds.transfer.sel(space="input").mean("layer")
    last_rank = ds["rank"].values[-1]
    numbers = {
        "weight_v1_start": continuity(start, "weight"),
        "weight_v1_peak": v1.max("step"),
        "weight_v1_end": continuity(end, "weight"),
        "weight_v1_drop": v1.max("step") - continuity(end, "weight"),
        "weight_u1_end": continuity(end, "weight", "output"),
        "gradient_v1_start": continuity(start, "gradient"),
        "cumulative_v1_end": continuity(end, "cumulative_gradient"),
        "dominance_end": profile.sel(rank=1) - profile.sel(rank=slice(2, None)).mean("rank"),
        "overlap_end": over_pairs(end, "overlap", "weight").sel(rank=last_rank),
        "gram_end": over_pairs(end, "gram_alignment", "weight"),
        "sigma2_end": over_pairs(end, "sigma2_alignment", "weight"),
        "gap_end": end.gap.sel(source="weight").median("layer"),
        "flagged_end": end.flagged.sel(source="weight").mean("pair"),
        "transfer_end": end.transfer.sel(space="input").mean("layer"),
        "accuracy_end": end.test_accuracy,
        "spiked": spikes(ds, rules["spike"]).any("step"),
    }
    for norm in ds.norm.values.tolist():
        ratio = ds.update_ratio.sel(norm=norm).mean("layer")
        crossed = [crossing(*pair, rules["transfer"]["crossing"]) for pair in zip(transfer.values, ratio.values)]
        numbers[f"ratio_{norm}_end"] = end.update_ratio.sel(norm=norm).mean("layer")
        numbers[f"crossing_{norm}"] = xr.DataArray([value for value, _ in crossed], dims="run")
        numbers[f"censored_{norm}"] = xr.DataArray([side for _, side in crossed], dims="run")

    random = ds.cosine_null.sel(space="input")
    chance: dict[str, xr.DataArray] = dict.fromkeys(
        ("weight_v1_start", "weight_v1_peak", "weight_v1_end", "gradient_v1_start"), random
    )
    chance |= dict.fromkeys(("cumulative_v1_end", "sigma2_end", "transfer_end"), random)
    chance |= {
        "weight_u1_end": ds.cosine_null.sel(space="output"),
        "dominance_end": xr.DataArray(0.0),
        "overlap_end": ds.overlap_null.sel(space="input", rank=last_rank),
        "gram_end": ds.gram_null_quantile.sel(source="weight", space="input").sel(quantile=0.5, method="nearest"),
        "gap_end": start.gap.sel(source="weight").median("layer"),
        "accuracy_end": start.test_accuracy,
    }
    numbers |= {
        f"{name}_chance": ds.seed.copy(data=np.broadcast_to(level.values, ds.sizes["run"])) for name, level in chance.items()
    }
    bare = {name: value.transpose("run").variable for name, value in numbers.items()}
    coords = {name: value.variable for name, value in ds.coords.items() if value.dims == ("run",)}
    result = xr.Dataset(bare, coords=coords).assign_coords(setting=("run", settings(ds)))
    return result.assign_attrs(sweep=ds.attrs["sweep"])
