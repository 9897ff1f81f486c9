"""Histories -> the study's dataset: axes put in order, drift and ratios derived, nulls added."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from ml_collections import ConfigDict

from gcjax import config as configs
from gcjax import results
from gcjax.geometry import nulls
from gcjax.provenance import origin
from gcjax.training import problem, sweep, throughput
from gcjax.training.checkpoint import History
from gcjax.training.executor import boundaries, full_steps, snapshot_steps

HAAR_DRAWS, HAAR_LARGEST = 200, 256  # of a larger dimension the normal approximation is good, and drawing slow


def assemble(
    config: ConfigDict, packs: Sequence[sweep.Pack], histories: Sequence[History], provenance: Mapping[str, Any], seconds: float
) -> xr.Dataset:
    """One dataset of all runs in the order of the sweep (`gcjax.results.SCHEMA`)."""
    listed = sweep.runs(config)
    order = [[run[:3] for pack in packs for run in pack.runs].index(run[:3]) for run in listed]
    joined = {name: _run_first(name, [history[name] for history in histories])[order] for name in histories[0]}
    steps, width = snapshot_steps(config), max(len(pack.runs) for pack in packs)
    full = [steps.index(step) for step in full_steps(config)]
    measured = {name.partition("/")[0] for name in joined if name.endswith("/cosine")}
    names = [name for name in problem.build(listed[0].config).roles if name in measured]  # in the model's order
    variables: dict[str, np.ndarray] = {
        name: _matrices(joined, names, name, axis=3) for name in ("cosine", "overlap", "sigma", "gap", "angle_bound", "flagged")
    }
    for name in ("gram_alignment", "sigma2_alignment", "layer_cosine"):
        variables[name] = _matrices(joined, names, name, axis=3)[:, full]
    for name in ("containment", "layer_overlap"):
        variables[name] = _matrices(joined, names, name, axis=2)[:, full]
    quantities = [name.rpartition("/")[2] for name in joined if name.startswith(f"{names[0]}/activity/")]
    if quantities:
        each = [_matrices(joined, names, f"activity/{quantity}", axis=2) for quantity in quantities]
        variables["activity"] = np.stack(each, axis=-1)
    variables["transfer"] = _matrices(joined, names, "transfer", axis=2)
    variables["spectrum"] = np.stack(_padded([joined[f"{name}/spectrum"] for name in names]), axis=2)
    variables["drift"] = np.stack([_drift(joined, name) for name in names], axis=2)
    variables["update_ratio"] = _update_ratio(_matrices(joined, names, "norm", axis=3), variables["sigma"][..., 0])
    variables |= _losses(joined, boundaries(config), steps)
    variables |= {name: joined[name] for name in ("test_loss", "test_accuracy")}
    dims = {name: (joined[f"{name}/leading_input"].shape[-1], joined[f"{name}/leading_output"].shape[-1]) for name in names}
    variables |= _nulls(dims, variables)

    ran = ~np.isnan(joined["test_loss"][:, 0])
    alive = np.isfinite(joined["test_loss"][:, -1])
    status = np.where(alive, "finished", np.where(ran, "diverged", "unfinished"))
    paths = sweep.swept(listed)
    coords: dict[str, Any] = {
        "point": ("run", [run.point for run in listed]),
        "variant": ("run", [run.variant for run in listed]),
        "seed": ("run", [run.seed for run in listed]),
        "status": ("run", status.tolist()),
        "step": steps,
        "full_step": full_steps(config),
        "source": list(results.SOURCES),
        "matrix": names,
        "space": list(results.SPACES),
        "norm": list(results.NORMS),
        "rank": np.arange(1, variables["cosine"].shape[-1] + 1),
        "quantile": list(results.QUANTILES),
    }
    coords |= {"quantity": quantities} if quantities else {}
    coords |= {path: ("run", [configs.get(run.config, path) for run in listed]) for path in paths}
    attrs = {
        "study": config.study,
        "config": configs.to_json(config),
        "sweep": json.dumps(paths),
        **origin(),
        "data": json.dumps(dict(provenance)),
        "wall_seconds": seconds,
        "throughput": json.dumps(throughput.of_runs(listed, width, joined["chunk/seconds"], boundaries(config), steps)),
    }
    return results.dataset({name: _narrow(value) for name, value in variables.items()}, coords, attrs)


def _narrow(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float32) if value.dtype == np.float64 else value


def _run_first(name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Packs joined along the run axis, which comes first (histories have the row first, except for last-only measures)."""
    if name.endswith("/spectrum"):
        return np.concatenate(parts, axis=0)
    return np.concatenate([part.swapaxes(0, 1) for part in parts], axis=0)


def _matrices(joined: Mapping[str, np.ndarray], names: Sequence[str], label: str, axis: int) -> np.ndarray:
    return np.stack([joined[f"{name}/{label}"] for name in names], axis=axis)


def _padded(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The arrays with NaN at the end of their last axis, as long as the longest."""
    longest = max(part.shape[-1] for part in parts)
    return [np.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, longest - part.shape[-1])], constant_values=np.nan)
            for part in parts]  # fmt: skip


def _drift(joined: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Angle of every leading vector to itself at the run's snapshot of highest mean continuity in that space, [R S A L]."""
    continuity_RSA = joined[f"{name}/cosine"][:, :, 0, :, :, 0].mean(axis=-1)
    drifts = []
    for a, space in enumerate(results.SPACES):
        x_RSLD = joined[f"{name}/leading_{space}"]
        known = np.nan_to_num(continuity_RSA[..., a], nan=-1.0)
        peak_RLD = x_RSLD[np.arange(len(x_RSLD)), known.argmax(axis=1)]
        sign_RSL1 = np.where(np.einsum("rsld,rld->rsl", x_RSLD, peak_RLD) < 0, -1.0, 1.0)[..., None]
        turned_RSLD = sign_RSL1 * peak_RLD[:, None]
        # Half the angle's tangent: the arccosine of a rounded cosine cannot tell small angles from 0.
        apart, together = (np.linalg.norm(x, axis=-1) for x in (x_RSLD - turned_RSLD, x_RSLD + turned_RSLD))
        drifts.append(2 * np.arctan2(apart, together))
    return np.stack(drifts, axis=2)


def _update_ratio(norm_RSAML: np.ndarray, largest_RSAML: np.ndarray) -> np.ndarray:
    """||W_t - W_0|| / ||W_0|| in both norms, [R S M L N]."""
    weight, update = results.SOURCES.index("weight"), results.SOURCES.index("update")
    ratios = [x[:, :, update] / x[:, :1, weight] for x in (norm_RSAML, largest_RSAML)]
    return np.stack(ratios, axis=-1)


def _losses(joined: Mapping[str, np.ndarray], ends: Sequence[int], steps: Sequence[int]) -> dict[str, np.ndarray]:
    """Chunk losses joined to the snapshot intervals that they make up; at step 0 the loss of the first batch."""
    lengths = np.diff([0, *ends])
    mean, largest = joined["batch_loss"].copy(), joined["batch_loss"].copy()
    for i, (before, now) in enumerate(zip(steps, steps[1:]), start=1):
        inside = [c for c, end in enumerate(ends) if before < end <= now]
        mean[:, i] = joined["chunk/loss"][:, inside] @ (lengths[inside] / lengths[inside].sum())
        largest[:, i] = joined["chunk/loss_max"][:, inside].max(axis=1)
    return {"loss": mean, "loss_max": largest}


def _nulls(dims: Mapping[str, tuple[int, int]], variables: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    q, cosine = results.QUANTILES, variables["cosine"]
    pairs, ranks = cosine.shape[-2], np.arange(1, cosine.shape[-1] + 1)
    sizes = {d for pair in dims.values() for d in pair}
    squares = {d: nulls.haar_squares(d, HAAR_DRAWS) if d <= HAAR_LARGEST else d for d in sizes}

    def each(of_dimension: Any) -> np.ndarray:
        return np.asarray([[of_dimension(d) for d in pair] for pair in dims.values()], np.float32)

    return {
        "cosine_null": each(nulls.cosine_mean),
        "cosine_null_quantile": each(lambda d: nulls.cosine_quantile(q, d)),
        "cosine_mean_null_quantile": each(lambda d: nulls.cosine_mean_quantile(q, d, pairs)),
        "overlap_null": each(lambda d: nulls.overlap_mean(ranks, d)),
        "gram_null_quantile": np.asarray(
            [
                [[_gram_null(s_LK, dims[name], squares) for name, s_LK in zip(dims, s_MLK)] for s_MLK in s_AMLK]
                for s_AMLK in variables["spectrum"]
            ]
        ),
    }


def _gram_null(s_LK: np.ndarray, dims: tuple[int, int], squares: Mapping[int, np.ndarray | int]) -> list[np.ndarray]:
    """Quantiles for the input and the output space, computed once where their dimensions are equal."""
    levels = {d: nulls.gram_alignment_quantile(results.QUANTILES, s_LK[:, : min(dims)], squares[d]) for d in set(dims)}
    return [levels[d] for d in dims]
