"""`gcjax measure`: a checkpoint -> the geometric continuity of its projections, one matrix in memory at a time.

WORKDIR/record.json   the checkpoint's fingerprint and the options that this workdir belongs to
WORKDIR/parts/        one file a projection and layer: its portrait
WORKDIR/results.nc    the dataset (`gcjax.results.MEASURED`), once every part is there
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
from pathlib import Path
from urllib.parse import quote

import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gcjax import results
from gcjax.errors import GcjaxError
from gcjax.pretrained import architectures, files, sources
from gcjax.pretrained.architectures import Matrix
from gcjax.pretrained.collect import collect
from gcjax.pretrained.files import Checkpoint
from gcjax.pretrained.options import Options
from gcjax.pretrained.portrait import Portrait, Weight, Whole, draw
from gcjax.workdir import open_workdir


def measure(
    model: str,
    workdir: str | os.PathLike[str],
    options: Options | None = None,
    *,
    shard: tuple[int, int] | None = None,
    merge: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> xr.Dataset | None:
    """Measure the projections of `model` (see `sources.resolve`), write `results.nc` into `workdir` and return it.

    Interrupted at any moment, the same call resumes. `shard` (i, n) measures the i-th of n shares, from 1, and returns None
    until all are there; several processes may share a workdir in this way. `merge` measures nothing and puts the parts
    together. Raises `GcjaxError` for a checkpoint that cannot be read, a workdir that belongs to something else (unless
    `overwrite`), and a merge of an incomplete set.
    """
    console, options = console or Console(stderr=True), options or Options()
    if shard is not None and not 1 <= shard[0] <= shard[1]:
        raise GcjaxError(f"--shard {shard[0]}/{shard[1]} does not exist; shards of {shard[1]} are numbered from 1")
    path = sources.resolve(model, lambda text: console.print(text, highlight=False))
    checkpoint = files.open_checkpoint(path)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    plan = architectures.plan(shapes, checkpoint.config, checkpoint.format)
    notes = (*checkpoint.notes, *plan.notes)
    for note in notes:
        console.print(f"note: {note}", style="dim", highlight=False, markup=False)
    record = {"fingerprint": files.fingerprint(checkpoint), "options": dataclasses.asdict(options)}
    workdir = open_workdir(Path(workdir), record, overwrite, ("parts",))
    target, units = workdir / "results.nc", plan.matrices
    if target.exists():
        console.print(f"{target} is complete; nothing to measure (--overwrite begins anew)", highlight=False)
        return results.load(target)
    begun = time.monotonic()
    if not merge:
        first, last = (0, len(units)) if shard is None else ((shard[0] + i) * len(units) // shard[1] for i in (-1, 0))
        _measure(checkpoint, units, range(first, last), workdir / "parts", options, console)
    missing = [unit for unit in units if not _part(workdir / "parts", unit).exists()]
    if missing:
        text = f"{len(missing)} of {len(units)} parts are missing in {workdir} ({_names(missing)})"
        if merge:
            raise GcjaxError(f"{text}; measure them before --merge")
        console.print(f"{text}; when they are there, --merge puts all together", highlight=False)
        return None
    portraits = {(unit.projection, unit.layer): _load(_part(workdir / "parts", unit)) for unit in units}
    attributes = {
        "model": model,
        "family": plan.family,
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "fingerprint": record["fingerprint"],
        "notes": json.dumps(notes),
        "options": json.dumps(record["options"]),
        "wall_seconds": time.monotonic() - begun,
    }
    result = collect(plan, portraits, options, attributes)
    results.save(result, target)
    return result


def _names(units: Sequence[Matrix]) -> str:
    return ", ".join(f"{unit.projection} {unit.layer}" for unit in units[:6]) + (", ..." if len(units) > 6 else "")


def _part(folder: Path, unit: Matrix) -> Path:
    return folder / f"{quote(unit.projection, safe='')}-{unit.layer:04d}.npz"  # found by pattern, it may hold any character


def _load(path: Path) -> Portrait:
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            return dict(stored)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise GcjaxError(f"{path} is damaged ({error}); delete it and run the same command again") from error


def _read(checkpoint: Checkpoint, unit: Matrix) -> Weight:
    w_OI = architectures.assemble(unit, lambda name: checkpoint.tensors[name].read())
    gain = unit.gain
    gain_D = None if gain is None else checkpoint.tensors[gain.tensor].read().astype(np.float32) + np.float32(gain.offset)
    return Weight(f"{unit.projection} {unit.layer}", w_OI, gain_D, gain is not None and gain.space == "output")


def _measure(
    checkpoint: Checkpoint, units: Sequence[Matrix], own: range, folder: Path, options: Options, console: Console
) -> None:
    """Draw the portraits of `own` that are not there yet; the next matrix is read while this one is computed."""
    todo = [i for i in own if not _part(folder, units[i]).exists()]
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("matrices, {task.description}"), TimeElapsedColumn(),
               TimeRemainingColumn())  # fmt: skip
    latest: tuple[int, dict[str, Whole]] = (-1, {})

    def before(i: int) -> Mapping[str, Whole]:
        """The whole of the layer before; drawn again where this process has not just done so."""
        if i == 0 or units[i - 1].projection != units[i].projection or min(units[i].shape) > options.exact_below:
            return {}
        return latest[1] if latest[0] == i - 1 else draw(_read(checkpoint, units[i - 1]), {}, options)[1]

    read, begun = 0, time.monotonic()
    with ThreadPoolExecutor(1) as reader, Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(todo))
        queue = [reader.submit(_read, checkpoint, units[i]) for i in todo[:1]]
        for done, i in enumerate(todo, start=1):
            weight = queue.pop().result()
            queue += [reader.submit(_read, checkpoint, units[following]) for following in todo[done : done + 1]]
            portrait, wholes = draw(weight, before(i), options)
            latest = (i, wholes)
            buffer = io.BytesIO()
            np.savez(buffer, **portrait)  # pyright: ignore[reportArgumentType]
            results.write_whole(_part(folder, units[i]), buffer.getbuffer(), "; free space and run the same command again")
            read += sum(checkpoint.tensors[part.tensor].stop - checkpoint.tensors[part.tensor].start for part in units[i].parts)
            text = f"{weight.name}, {read / 1e6 / (time.monotonic() - begun):.0f} MB/s"
            progress.update(task, advance=1, description=text)
            if not console.is_terminal and (done == len(todo) or units[todo[done]].projection != units[i].projection):
                console.print(f"{done}/{len(todo)} matrices, {text}", highlight=False)
