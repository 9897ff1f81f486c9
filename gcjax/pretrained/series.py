"""Checkpoints of one training run -> continuity against the training step (`gcjax.results`, kind "series").

WORKDIR/checkpoints/LABEL/   a measurement of its own for each (`gcjax.pretrained.measure`)
WORKDIR/results.nc           all of them along the axis `step`
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import xarray as xr
from rich.console import Console

from gcjax import processes, results
from gcjax.errors import GcjaxError
from gcjax.pretrained.measure import measure
from gcjax.workdir import check_shares, open_workdir


def expand(models: Sequence[str]) -> list[str]:
    """The models that a command line names: `hf:org/name@a,b` is two."""
    found = []
    for model in models:
        name, at, revisions = model.partition("@")
        several = model.startswith("hf:") and at
        found += [f"{name}@{revision}" for revision in revisions.split(",") if revision] if several else [model]
    return found


def steps(models: Sequence[str]) -> list[int]:
    """The training step of each: the number behind "step" in its revision or last folder, or the last number there; their
    places in the list where that does not tell all of them apart."""
    labels = [model.partition("@")[2] or Path(model).name for model in models]
    numbers = [re.findall(r"step[-_]?(\d+)", label) or re.findall(r"\d+", label) for label in labels]
    found = [int(number[-1]) if number else -1 for number in numbers]
    return found if len(set(found)) == len(found) and -1 not in found else list(range(len(models)))


def measure_series(models: Sequence[str], workdir: str | os.PathLike[str], *how: Any, overwrite: bool = False,
                   console: Console | None = None, **more: Any) -> xr.Dataset | None:  # fmt: skip
    """Measure each of `models` as `measure` does, and join the results along `step`, in order of the steps.

    Raises what `measure` raises, and `GcjaxError` where a model is given twice or two do not have the same projections.
    """
    console = console or Console(stderr=True, quiet=not processes.leads())
    if len(set(models)) < len(models):
        raise GcjaxError(f"a model is given twice among {', '.join(models)}; give each checkpoint once")
    check_shares(more.get("shard"), more.get("merge", False), overwrite)
    root = Path(workdir)
    if processes.leads():
        open_workdir(root, {"checkpoints": sorted(models)}, overwrite, ("checkpoints",))
    processes.wait()
    measured = []
    for step, model in sorted(zip(steps(models), models)):
        console.print(f"step {step}: {model}", highlight=False)
        folder = root / "checkpoints" / quote(model, safe="")
        found = measure(model, folder, *how, console=console, **more)
        measured += [(step, model, found)] if found is not None else []
    if len(measured) < len(models):
        return None
    series = join(measured)
    results.save(series, root / "results.nc")
    return series


def join(measured: Sequence[tuple[int, str, xr.Dataset]]) -> xr.Dataset:
    """Measurements of (step, model) as one dataset; its attributes are the last one's, and `model` lists all."""
    *_, (_, model, last) = measured
    for _, other, ds in measured:
        for axis in ("matrix", "layer", "rank"):
            if ds[axis].values.tolist() != last[axis].values.tolist():
                raise GcjaxError(f"{other} and {model} differ in {axis}: they are no checkpoints of one training run")
    joined = xr.concat([ds for *_, ds in measured], dim="step", coords="minimal", compat="override", join="exact",
                       combine_attrs="override")  # fmt: skip
    labels = [model for _, model, _ in measured]
    seconds = sum(float(ds.attrs["wall_seconds"]) for *_, ds in measured)
    attributes = last.attrs | {"model": f"{labels[0]} to {labels[-1]}", "kind": "series", "wall_seconds": seconds}
    joined = joined.assign_coords(step=[step for step, *_ in measured], checkpoint=("step", labels)).assign_attrs(attributes)
    return results.check(joined, "this series")
