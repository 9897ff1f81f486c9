"""A model that `gcjax convert` wrote, read back: as parameters of `models.llama`, or as a checkpoint to be measured.

To `gcjax measure` the directory is a checkpoint with Hugging Face's names, read layer by layer.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from gcjax import trees
from gcjax.errors import GcjaxError, some
from gcjax.models import llama
from gcjax.pretrained import convert as conversion
from gcjax.pretrained import headers
from gcjax.pretrained.files import Checkpoint, Tensor

# Of model.json. `storage` gives the dtype of every tensor that a parameter was made of, by layer.
FIELDS = {"gcjax": str, "model": dict, "dtype": str, "source": str, "source_fingerprint": str, "storage": dict,
          "notes": list}  # fmt: skip
_DTYPES = {np.dtype(np.float32): "F32", np.dtype(jnp.bfloat16): "BF16"}


def load(
    directory: str | os.PathLike[str], place: Callable[[str, np.ndarray], Any] = lambda name, value: jnp.asarray(value)
) -> tuple[ConfigDict, dict[str, Any]]:
    """The `model` section of a converted model and its parameters, for `models.llama.build(section).apply`.

    `place(parameter, array)` puts each on its device or sharding before the next is read.
    Raises `GcjaxError` for a directory that `convert` did not write, or that is damaged.
    """
    folder = Path(directory).expanduser()
    section, _, declared = _open(folder)
    params = {}
    for name in declared:
        params[name] = place(name, _or_damaged(folder, lambda at, name=name: trees.read(at / name)[name]))
    return section, params


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stored(Tensor):
    """A parameter, or one layer of a stack of them. `file` stands for the orbax checkpoint that it is in, which it alone
    identifies, and [start, stop) for the size of the values; only the layer itself is read. `dtype` is the coarsest that
    the values have been stored in, in the source or here."""

    parameter: str
    layer: int | None
    transposed: bool

    def _rows(self, first: int, last: int) -> np.ndarray:
        def values(params: Path) -> np.ndarray:
            at, name = params / self.parameter, self.parameter
            return trees.read(at)[name] if self.layer is None else trees.entry(at, name, self.layer)

        value = _or_damaged(self.file.parents[2], values)
        return np.ascontiguousarray((value.T if self.transposed else value)[first:last], np.float32)


def open_converted(folder: Path) -> Checkpoint:
    """A converted model as a checkpoint of tensors `[out, in]` under Hugging Face's names, read layer by layer.

    Raises `GcjaxError` as `load` does.
    """
    section, record, declared = _open(folder)
    tensors: dict[str, Tensor] = {}
    for name, (shape, dtype) in declared.items():
        transposed, shape = conversion.NAMES[name][2], shape[1:] if layered(name) else shape
        shape, size = shape[::-1] if transposed else shape, math.prod(shape) * dtype.itemsize
        manifest = folder / "params" / name / "manifest.ocdbt"  # rewritten with new random ids whenever the values are
        layers = range(section.depth) if layered(name) else (None,)
        for layer, stored in zip(layers, record["storage"][name], strict=True):
            stored = "BF16" if _DTYPES[dtype] == "BF16" and stored in ("F64", "F32", "F16") else stored
            tensor = conversion.tensor_name(name, layer)
            tensors[tensor] = _Stored(tensor, shape, stored, manifest, 0, size,
                                      parameter=name, layer=layer, transposed=transposed)  # fmt: skip
    return Checkpoint(folder, "safetensors", tensors, conversion.hugging_face_config(section), tuple(record["notes"]))


def layered(name: str) -> bool:
    """Whether a parameter is a stack of layers."""
    return "{}" in conversion.NAMES[name][0]


def read_record(folder: Path) -> dict[str, Any]:
    """model.json; raises `GcjaxError` where `convert` did not write it."""
    file = folder / "model.json"
    try:
        record = headers.read_json(file)
    except OSError as error:
        raise GcjaxError(f"{file} cannot be read ({error.strerror or error}); give a directory of gcjax convert") from error
    if wrong := [field for field, kind in FIELDS.items() if not isinstance(record.get(field), kind)]:
        raise GcjaxError(f"{file} was not written by gcjax convert (it has no {some(wrong)}); give another directory")
    return record


def _open(folder: Path) -> tuple[ConfigDict, dict[str, Any], Mapping[str, tuple[tuple[int, ...], np.dtype]]]:
    """The `model` section, model.json and every parameter's shape and dtype, which have to be those the model declares."""
    record = read_record(folder)
    try:
        scaling = record["model"]["rope_scaling"]
        scaling["factors"] = tuple(scaling["factors"])  # JSON has no tuples
        section = ConfigDict(record["model"])
        wanted = jax.eval_shape(llama.build(section).init, jax.random.key(0))
        if any(len(record["storage"][name]) != (value.shape[0] if layered(name) else 1) for name, value in wanted.items()):
            raise ValueError("storage has another number of layers")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise GcjaxError(f"{folder / 'model.json'} does not describe a model ({error}); convert it again") from error
    found = {}
    for name, value in wanted.items():
        shape, dtype = found[name] = _or_damaged(folder, lambda at, name=name: trees.describe(at / name, name))
        if shape != value.shape or dtype not in _DTYPES:
            said = f"{dtype}{list(shape)} where its model.json makes it {list(value.shape)}"
            raise GcjaxError(f"{folder / 'params' / name} is {said}; convert the model again")
    return section, record, found


def _or_damaged(folder: Path, get: Callable[[Path], Any]) -> Any:
    try:
        return get(folder / "params")
    except Exception as error:  # orbax and tensorstore raise whatever the damage leads them to
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise GcjaxError(f"{folder} is damaged ({reason[:200]}); convert the model again") from error
