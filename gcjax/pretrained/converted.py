"""`gcjax convert`: a checkpoint of the Llama family -> a directory that holds it as parameters of `models.llama`.

DIR/model.json     the `model` section, the source, its fingerprint and storage dtypes, and what there is to note
DIR/params/NAME/   one orbax checkpoint a parameter, a stack's layers stored one by one

A parameter is written before the next is read, so that the host holds the largest of them a few times over (the values,
orbax's copy and what it has encoded), never the model.
`gcjax.pretrained.stored` reads it back.
"""

import json
import os
import shutil
from importlib import metadata
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gcjax import results, trees
from gcjax.errors import GcjaxError
from gcjax.models import llama
from gcjax.pretrained import convert as conversion
from gcjax.pretrained import files, sources
from gcjax.pretrained.directory import CONVERTED, is_converted
from gcjax.pretrained.files import Checkpoint
from gcjax.pretrained.stored import layered, read_record

ADVICE = "free space or permissions, then run the same command again"


def convert(
    model: str,
    out: str | os.PathLike[str],
    dtype: str = "float32",
    *,
    overwrite: bool = False,
    console: Console | None = None,
) -> Path:
    """Write the parameters of `model` (see `sources.resolve`) to the directory `out`, whole or not at all.

    Raises `GcjaxError` for a checkpoint that is not one of `models.llama` or cannot be read, and for an `out` that holds
    anything but a converted model, or one without `overwrite`; then nothing has changed.
    """
    console, out = console or Console(stderr=True), Path(out).expanduser().absolute()
    _check_vacant(out, overwrite)
    path = sources.resolve(model, lambda text: console.print(text, highlight=False, markup=False))
    if is_converted(path):
        raise GcjaxError(f"{path} is converted already; give the checkpoint that it was made from")
    checkpoint = files.open_checkpoint(path)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    source = conversion.model_config(checkpoint.config, shapes, lambda name: checkpoint.tensors[name].read())
    record = {
        "gcjax": metadata.version("gcjax"),
        "model": source.model.to_dict(),
        "dtype": dtype,
        "source": model,
        "source_fingerprint": files.fingerprint(checkpoint),
        "notes": [*checkpoint.notes, *source.notes],
    }
    for note in record["notes"]:
        console.print(f"note: {note}", style="dim", highlight=False, markup=False)
    beside, old = (out.with_name(f".{out.name}.{end}") for end in ("partial", "old"))
    try:
        shutil.rmtree(beside, ignore_errors=True)  # of one that was killed
        record["storage"] = _write(checkpoint, source, dtype, beside, console)
        results.write_whole(beside / "model.json", json.dumps(record, indent=1).encode(), f"; {ADVICE}")
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
            out.rename(old)
        beside.rename(out)
    except OSError as error:
        raise GcjaxError(f"cannot write {out}: {error.strerror or error}; {ADVICE}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    for part, count in llama.parameters_per_part(source.model).items():
        console.print(f"{part:<10}{count:>15,}", highlight=False)
    console.print(f"{dtype} parameters in {out}", highlight=False, markup=False, soft_wrap=True)
    return out


def _check_vacant(out: Path, overwrite: bool) -> None:
    try:
        found = sorted(path.name for path in out.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise GcjaxError(f"{out} cannot be written ({error.strerror or error}); give a new directory as --out") from error
    if not found:
        return
    if not is_converted(out) or set(found) != set(CONVERTED):
        raise GcjaxError(f"{out} holds files that gcjax convert did not write; give an empty or a new directory as --out")
    read_record(out)
    if not overwrite:
        raise GcjaxError(f"{out} holds a converted model already; give another --out, or --overwrite to replace it")


def _write(checkpoint: Checkpoint, source: conversion.Source, dtype: str, folder: Path, console: Console) -> dict[str, list]:
    """Writes all parameters; returns the storage dtype of every tensor that each was made of."""
    tensors, storage, dtypes = checkpoint.tensors, {}, []
    columns = (BarColumn(), DownloadColumn(), TextColumn("{task.description}", markup=False),
               TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=sum(tensor.stop - tensor.start for tensor in tensors.values()))

        def read(name: str) -> np.ndarray:
            value = tensors[name].read()
            dtypes.append(tensors[name].dtype)
            progress.update(task, advance=tensors[name].stop - tensors[name].start, description=name)
            return value

        def place(name: str, value: np.ndarray) -> None:
            trees.write(folder / "params" / name, {name: value}, by_layer=layered(name), advice=ADVICE)
            storage[name] = dtypes[: len(value) if layered(name) else 1]
            dtypes.clear()
            if not console.is_terminal:
                console.print(f"{name} {list(value.shape)}, {value.nbytes / 1e6:,.1f} MB", highlight=False, markup=False)

        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        conversion.convert(shapes, read, source.model, dtype, source.format, place)
    return storage
