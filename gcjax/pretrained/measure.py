"""`gcjax measure`: a checkpoint -> the geometric continuity of its projections, one matrix in memory at a time.

WORKDIR/record.json   the checkpoint's fingerprint and the options that this workdir belongs to
WORKDIR/parts/        one file a projection and layer: its portrait
WORKDIR/results.nc    the dataset (`gcjax.results.MEASURED`), once every part is there
WORKDIR/circuits/     one file a layer: the portrait of its heads' products (`gcjax.pretrained.circuits`)
WORKDIR/circuits.nc   their dataset (`gcjax.results.CIRCUITS`)
"""

import dataclasses
import io
import json
import math
import os
import time
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import jax
import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn, track
from threadpoolctl import ThreadpoolController

from gcjax import results
from gcjax.errors import GcjaxError
from gcjax.geometry.decompose import Decomposition
from gcjax.pretrained import architectures, circuits, files, sources
from gcjax.pretrained.architectures import Matrix, Plan
from gcjax.pretrained.collect import collect
from gcjax.pretrained.files import Checkpoint
from gcjax.pretrained.options import Options
from gcjax.pretrained.portrait import Portrait, Weight, draw
from gcjax.workdir import open_workdir


def measure(
    model: str,
    workdir: str | os.PathLike[str],
    options: Options | None = None,
    *,
    shard: tuple[int, int] | None = None,
    merge: bool = False,
    overwrite: bool = False,
    with_circuits: bool = False,
    console: Console | None = None,
) -> xr.Dataset | None:
    """Measure the projections of `model` (see `sources.resolve`), write `results.nc` into `workdir` and return it.

    Interrupted at any moment, the same call resumes. `shard` (i, n) measures the i-th of n shares, from 1, and returns None
    until all are there; several processes may share a workdir in this way. `merge` measures nothing and puts the parts
    together. `with_circuits` then measures the products of the attention heads into `circuits.nc`, or says why the model has
    none that can be. Raises `GcjaxError` for a checkpoint that cannot be read, a workdir that belongs to something else
    (unless `overwrite`), and a merge of an incomplete set.
    """
    console, options = console or Console(stderr=True), options or Options()
    if shard is not None and not 1 <= shard[0] <= shard[1]:
        raise GcjaxError(f"--shard {shard[0]}/{shard[1]} does not exist; shards of {shard[1]} are numbered from 1")
    path = sources.resolve(model, lambda text: console.print(text, highlight=False))
    checkpoint = sources.open_model(path)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    plan = architectures.plan(shapes, checkpoint.config, checkpoint.format)
    notes = (*checkpoint.notes, *plan.notes)
    for note in notes:
        console.print(f"note: {note}", style="dim", highlight=False, markup=False)
    refusal = circuits.refusal(plan) if with_circuits else None
    if refusal is not None:
        console.print(refusal, highlight=False, markup=False)
    record = {"format": results.FORMAT, "fingerprint": files.fingerprint(checkpoint), "options": dataclasses.asdict(options)}
    workdir = open_workdir(Path(workdir), record, overwrite, ("parts", "circuits", "circuits.nc"))
    attributes = {
        "model": model,
        "family": plan.family,
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "fingerprint": record["fingerprint"],
        "notes": json.dumps(notes),
        "options": json.dumps(record["options"]),
    }
    job = _Job(checkpoint, plan, workdir, options, shard, merge, attributes, console)
    found = _projections(job)
    if with_circuits and refusal is None:
        _circuits(job)
    return found


class _Job(NamedTuple):
    """What a call has to do, and where."""

    checkpoint: Checkpoint
    plan: Plan
    workdir: Path
    options: Options
    shard: tuple[int, int] | None
    merge: bool
    attributes: Mapping[str, Any]
    console: Console

    def share(self, total: int) -> range:
        """Which of `total` parts are this process's to measure."""
        if self.merge:
            return range(0)
        first, last = (0, total) if self.shard is None else ((self.shard[0] + i) * total // self.shard[1] for i in (-1, 0))
        return range(first, last)

    def lacks(self, missing: Sequence[str], total: int, what: str) -> bool:
        """Whether anything is missing, and says so; raises `GcjaxError` where all was to be put together."""
        if missing:
            names = ", ".join(missing[:6]) + (", ..." if len(missing) > 6 else "")
            text = f"{len(missing)} of {total} {what} are missing in {self.workdir} ({names})"
            if self.merge:
                raise GcjaxError(f"{text}; measure them before --merge")
            self.console.print(f"{text}; when they are there, --merge puts all together", highlight=False)
        return bool(missing)

    def done(self, target: Path) -> bool:
        """Whether `target` is there already, and says so."""
        if found := target.exists():
            text = f"{target} is complete; nothing to measure (--overwrite begins anew)"
            self.console.print(text, highlight=False)
        return found


def _projections(job: _Job) -> xr.Dataset | None:
    target, folder, units = job.workdir / "results.nc", job.workdir / "parts", job.plan.matrices
    if job.done(target):
        return results.load(target)
    begun = time.monotonic()
    if own := job.share(len(units)):
        _measure(job.checkpoint, units, own, folder, job.options, job.console)
    missing = [f"{unit.projection} {unit.layer}" for unit in units if not _part(folder, unit).exists()]
    if job.lacks(missing, len(units), "parts"):
        return None
    attributes = {**job.attributes, "wall_seconds": time.monotonic() - begun}
    found = collect(job.plan, lambda unit: _load(_part(folder, unit)), job.options, attributes)
    results.save(found, target)
    return found


def _circuits(job: _Job) -> None:
    target, units, heads = job.workdir / "circuits.nc", circuits.units(job.plan), job.plan.heads
    if job.done(target):
        return
    assert heads is not None  # else it was refused
    begun, parts = time.monotonic(), {layer: job.workdir / "circuits" / f"{layer:04d}.npz" for layer in units}
    layers = list(units)
    todo = [layers[i] for i in job.share(len(layers)) if not parts[layers[i]].exists()]
    for layer in track(todo, "layers' circuits", console=job.console, disable=not job.console.is_terminal):
        unit = units[layer]
        read = {name: partial(_whole, job.checkpoint, unit[name]) for name in circuits.PROJECTIONS}
        _save(parts[layer], circuits.draw(read, heads, job.options.rank))
    job.console.print(f"circuits of {len(todo)} layers, {time.monotonic() - begun:.0f} s", highlight=False)
    if not job.lacks([str(layer) for layer in units if not parts[layer].exists()], len(units), "layers' circuits"):
        attributes = {**job.attributes, "wall_seconds": time.monotonic() - begun}
        results.save(circuits.collect(job.plan, lambda layer: _load(parts[layer]), job.options, attributes), target)


def _part(folder: Path, unit: Matrix) -> Path:
    return folder / f"{quote(unit.projection, safe='')}-{unit.layer:04d}.npz"  # found by pattern, it may hold any character


def _load(path: Path) -> Portrait:
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            return dict(stored)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise GcjaxError(f"{path} is damaged ({error}); delete it and run the same command again") from error


def _save(path: Path, portrait: Portrait) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **portrait)  # pyright: ignore[reportArgumentType]
    results.write_whole(path, buffer.getbuffer(), "; free space and run the same command again")


def _whole(checkpoint: Checkpoint, unit: Matrix) -> np.ndarray:
    return architectures.assemble(unit, lambda name: checkpoint.tensors[name].read())


def _read(checkpoint: Checkpoint, unit: Matrix) -> Weight:
    w_OI = _whole(checkpoint, unit)
    gain = unit.gain
    gain_D = None if gain is None else checkpoint.tensors[gain.tensor].read().astype(np.float32) + np.float32(gain.offset)
    dtype = checkpoint.tensors[unit.parts[0].tensor].dtype
    w_OI, gain_D = jax.device_put((w_OI, gain_D), may_alias=True)  # on CPU there is then no second copy
    return Weight(f"{unit.projection} {unit.layer}", dtype, w_OI, gain_D, gain is not None and gain.space == "output")


def leave_the_cores_to_xla() -> None:
    """One thread for the LAPACK under XLA on CPU, which is SciPy's: beside XLA's own threads they slow each other down."""
    for library in ThreadpoolController().lib_controllers:
        if library.internal_api == "openblas" and Path(library.filepath).parent.name.startswith("scipy"):
            library.set_num_threads(1)


def _measure(
    checkpoint: Checkpoint, units: Sequence[Matrix], own: range, folder: Path, options: Options, console: Console
) -> None:
    """Draw the portraits of `own` that are not there yet; the next matrix is read while this one is computed."""
    todo = [i for i in own if not _part(folder, units[i]).exists()]
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("matrices, {task.description}"), TimeElapsedColumn(),
               TimeRemainingColumn())  # fmt: skip
    latest: tuple[int, dict[str, Decomposition]] = (-1, {})

    def before(i: int) -> Mapping[str, Decomposition]:
        """The whole of the layer before; drawn again where this process has not just done so."""
        if i == 0 or units[i - 1].projection != units[i].projection or min(units[i].shape) > options.exact_below:
            return {}
        return latest[1] if latest[0] == i - 1 else draw(_read(checkpoint, units[i - 1]), {}, options)[1]

    leave_the_cores_to_xla()
    read, begun = 0, time.monotonic()
    with ThreadPoolExecutor(1) as reader, Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(todo))
        queue = [reader.submit(_read, checkpoint, units[i]) for i in todo[:1]]
        for done, i in enumerate(todo, start=1):
            weight = queue.pop().result()
            queue += [reader.submit(_read, checkpoint, units[following]) for following in todo[done : done + 1]]
            portrait, wholes = draw(weight, before(i), options)
            latest = (i, wholes)
            _save(_part(folder, units[i]), portrait)
            read += sum(checkpoint.tensors[part.tensor].stop - checkpoint.tensors[part.tensor].start for part in units[i].parts)
            text = f"{weight.name}, {read / 1e6 / (time.monotonic() - begun):.0f} MB/s"
            progress.update(task, advance=1, description=text)
            if not console.is_terminal and (done == len(todo) or units[todo[done]].projection != units[i].projection):
                console.print(f"{done}/{len(todo)} matrices, {text}", highlight=False)
