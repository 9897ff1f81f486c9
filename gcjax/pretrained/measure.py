"""`gcjax measure`: a checkpoint -> the geometric continuity of its projections, one matrix in memory at a time.

WORKDIR/record.json   the checkpoint's fingerprint and the options that this workdir belongs to
WORKDIR/parts/        one file a projection and layer: its portrait
WORKDIR/results.nc    the dataset (`gcjax.results.MEASURED`), once every part is there
WORKDIR/circuits/     one file a layer: the portrait of its heads' products (`gcjax.pretrained.circuits`)
WORKDIR/circuits.nc   their dataset (`gcjax.results.CIRCUITS`)
"""

import dataclasses
import gc
import json
import math
import os
import threading
import time
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

from gcjax import processes, results
from gcjax.errors import GcjaxError, Stopped, some
from gcjax.geometry.decompose import Decomposition
from gcjax.pretrained import architectures, circuits, files, sources
from gcjax.pretrained.architectures import Matrix, Plan
from gcjax.pretrained.collect import collect
from gcjax.pretrained.files import Checkpoint
from gcjax.pretrained.options import Options
from gcjax.pretrained.portrait import Weight, draw
from gcjax.workdir import check_shares, exclusive, load_part, open_workdir, save_part, share


def measure(
    model: str,
    workdir: str | os.PathLike[str],
    options: Options | None = None,
    *,
    shard: tuple[int, int] | None = None,
    merge: bool = False,
    overwrite: bool = False,
    with_circuits: bool = False,
    stop: threading.Event | None = None,
    console: Console | None = None,
) -> xr.Dataset | None:
    """Measure the projections of `model` (see `sources.resolve`), write `results.nc` into `workdir` and return it.

    Interrupted at any moment, the same call resumes. `shard` (i, n) measures the i-th of n shares, from 1, and returns None
    until all are there; several processes may share a workdir in this way. `merge` measures nothing and puts the parts
    together. Processes that joined others (`gcjax.processes`) all call this with a workdir that all see, and measure a share
    each; the first returns the dataset, the others None. Set `stop`, from a signal's handler or another thread, to end after
    the matrix under way. `with_circuits` then measures the products of the attention heads into `circuits.nc`, or says why
    the model has none that can be.

    Raises `GcjaxError` for a checkpoint that cannot be read, a workdir that belongs to something else (unless `overwrite`) or
    that another process works on, and a merge of an incomplete set; `Stopped`.
    """
    console, options = console or Console(stderr=True, quiet=not processes.leads()), options or Options()
    check_shares(shard, merge, overwrite)
    workdir, stop = Path(workdir), stop or threading.Event()
    path = processes.in_turn(lambda: sources.resolve(model, partial(console.print, highlight=False, markup=False)))
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
    attributes = {
        "model": model,
        "family": plan.family,
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "fingerprint": record["fingerprint"],
        "notes": json.dumps(notes),
        "options": json.dumps(record["options"]),
    }
    job = _Job(checkpoint, plan, workdir, options, shard, merge, stop, attributes, console)
    with exclusive(workdir, shard, overwrite or with_circuits, partial(console.print, highlight=False, markup=False)):
        if processes.leads():
            open_workdir(workdir, record, overwrite, ("parts", "circuits", "circuits.nc"))
        processes.wait()
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
    stop: threading.Event
    attributes: Mapping[str, Any]
    console: Console

    def share(self, total: int) -> range:
        """Which of `total` parts are this process's to measure."""
        return range(0) if self.merge else range(total)[share(total, self.shard or (processes.index() + 1, processes.count()))]

    def end_if_asked(self) -> None:
        if self.stop.is_set():
            raise Stopped(f"stopped on a signal with all it measured saved; the same command resumes from {self.workdir}")

    def lacks(self, missing: Sequence[str], total: int, what: str) -> bool:
        """Whether anything is missing, and says so; raises `GcjaxError` where all was to be put together."""
        if missing:
            text = f"{len(missing)} of {total} {what} are missing in {self.workdir} ({some(missing)})"
            if self.merge or processes.count() > 1:
                raise GcjaxError(f"{text}; measure them before --merge" if self.merge else f"{text}; all processes must see it")
            self.console.print(f"{text}; when they are there, --merge puts all together", highlight=False, markup=False)
        return bool(missing)

    def done(self, target: Path) -> bool:
        """Whether `target` is there already, and says so."""
        found = bool(processes.of_first(target.exists()))
        if found:
            text = f"{target} is complete; nothing to measure (--overwrite begins anew)"
            self.console.print(text, highlight=False, markup=False)
        return found


def _projections(job: _Job) -> xr.Dataset | None:
    target, folder, units = job.workdir / "results.nc", job.workdir / "parts", job.plan.matrices
    if job.done(target):
        return results.load(target) if processes.leads() else None
    begun = time.monotonic()
    if own := job.share(len(units)):
        _measure(job, own, folder)
    processes.wait()
    if not processes.leads():
        return None
    missing = [_name(unit) for unit in units if not _part(folder, unit).exists()]
    if job.lacks(missing, len(units), "parts"):
        return None
    attributes = {**job.attributes, "wall_seconds": time.monotonic() - begun}
    found = collect(job.plan, lambda unit: load_part(_part(folder, unit)), job.options, attributes)
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
        read = {name: partial(architectures.whole, unit[name], job.checkpoint) for name in circuits.PROJECTIONS}
        save_part(parts[layer], circuits.draw(read, heads, job.options.rank))
        job.end_if_asked()
    job.console.print(f"circuits of {len(todo)} layers, {time.monotonic() - begun:.0f} s", highlight=False)
    processes.wait()
    if processes.leads() and not job.lacks(
        [str(layer) for layer in units if not parts[layer].exists()], len(units), "layers' circuits"
    ):
        attributes = {**job.attributes, "wall_seconds": time.monotonic() - begun}
        results.save(circuits.collect(job.plan, lambda layer: load_part(parts[layer]), job.options, attributes), target)


def _part(folder: Path, unit: Matrix) -> Path:
    return folder / f"{quote(unit.projection, safe='')}-{unit.layer:04d}.npz"  # found by pattern, it may hold any character


def _name(unit: Matrix) -> str:
    return f"{unit.projection} {unit.layer}"


def _read(checkpoint: Checkpoint, unit: Matrix) -> Weight:
    gc.collect(0)  # until then JAX keeps the host arrays it was lent, those of the matrix before
    w_OI = architectures.whole(unit, checkpoint)
    gain = unit.gain
    gain_D = None if gain is None else checkpoint.tensors[gain.tensor].read().astype(np.float32) + np.float32(gain.offset)
    dtype = checkpoint.tensors[unit.parts[0].tensor].dtype
    w_OI, gain_D = jax.device_put((w_OI, gain_D), may_alias=True)  # on CPU there is then no second copy
    return Weight(_name(unit), dtype, w_OI, gain_D, gain is not None and gain.space == "output")


def _fetch(checkpoint: Checkpoint, unit: Matrix) -> None:
    for part in unit.parts:
        checkpoint.tensors[part.tensor].fetch()


def leave_the_cores_to_xla() -> None:
    """One thread for the LAPACK under XLA on CPU, which is SciPy's: beside XLA's own threads they slow each other down."""
    for library in ThreadpoolController().lib_controllers:
        if library.internal_api == "openblas" and Path(library.filepath).parent.name.startswith("scipy"):
            library.set_num_threads(1)


def _measure(job: _Job, own: range, folder: Path) -> None:
    """Draw the portraits of `own` that are not there yet; the next matrix's bytes are fetched while this one is computed."""
    checkpoint, units, options, console = job.checkpoint, job.plan.matrices, job.options, job.console
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
        for done, i in enumerate(todo, start=1):
            earlier = before(i)
            for following in todo[done : done + 1]:
                reader.submit(_fetch, checkpoint, units[following])
            portrait, wholes = draw(_read(checkpoint, units[i]), earlier, options)  # no name here: it is freed before the next
            latest = (i, wholes)
            save_part(_part(folder, units[i]), portrait)
            job.end_if_asked()
            read += sum(checkpoint.tensors[part.tensor].stop - checkpoint.tensors[part.tensor].start for part in units[i].parts)
            text = f"{_name(units[i])}, {read / 1e6 / (time.monotonic() - begun):.0f} MB/s"
            progress.update(task, advance=1, description=text)
            if not console.is_terminal and (done == len(todo) or units[todo[done]].projection != units[i].projection):
                console.print(f"{done}/{len(todo)} matrices, {text}", highlight=False)
