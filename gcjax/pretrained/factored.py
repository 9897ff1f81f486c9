"""A compressed model as a directory of safetensors that Hugging Face's names and layout describe, and such a one read back.

DIR/config.json, tokenizer.json, model.safetensors.index.json, model-00001-of-00030.safetensors, ...    one file a window
DIR/factors.json    unless dense; what `gcjax` needs beside Hugging Face's files:

    {"format": 1,
     "factors": {"model.layers.0.mlp.up_proj.weight": ["model.layers.0.mlp.up_proj.left", "shared.up.0-1.right"], ...}}

is a projection `W[out, in] = left[out, rank] @ right[rank, in]`; a tensor named by several layers is the basis they share.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from gcjax import results
from gcjax.errors import GcjaxError, some
from gcjax.geometry.sharing import Factors
from gcjax.models import llama
from gcjax.pretrained import convert, headers
from gcjax.pretrained.decoder import Decoder
from gcjax.pretrained.directory import FACTORS
from gcjax.pretrained.files import Checkpoint, Tensor, open_checkpoint

FORMAT = 1
_MOST = 1000  # times that products may be larger than what the files hold
_ADVICE = "; free space or give another --out, then run the same command again"


class Written(NamedTuple):
    """Where a compressed model goes, the share of its projections' parameters to keep, and whether as written-out products."""

    out: Path
    keep: float | None
    dense: bool


def check(out: Path, model: Decoder) -> None:
    """Raises `GcjaxError` for an `out` that is not new, and a model that config.json cannot describe."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise GcjaxError(f"{out} holds something already; give a new directory as --out")
    except OSError as error:
        raise GcjaxError(f"{out} cannot be read ({error.strerror or error}); give a new directory as --out") from error
    if model.section.rope_scaling.kind == "factors":
        raise GcjaxError(
            "a GGUF file's rotary factors have no place in a config.json; compress the model's safetensors with --out"
        )


def write(
    out: Path,
    model: Decoder,
    tokenizer: Tokenizer,
    windows: Sequence[range],
    each: Callable[[str, Sequence[range], int], Iterable[range]],
    factors: Callable[[str, range], Factors],
    dense: bool,
) -> int:
    """Write the model to the directory `out`, whole or not at all, float32; returns how many parameters its projections have.

    `factors(matrix, window)` are made one window of one projection at a time, and `each` shows how far it is. Raises
    `GcjaxError` where that fails.
    """
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of one that was killed
    count, parameters = len(windows) + 1, 0
    files: dict[str, str] = {}
    index: dict[str, list[str]] = {}

    def save(number: int, tensors: Mapping[str, np.ndarray]) -> None:
        file = f"model-{number:05}-of-{count:05}.safetensors"
        whole = {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}
        save_file(whole, partial / file, {"format": "pt"})
        files.update(dict.fromkeys(whole, file))

    def plain(parameters: Mapping[str, object], layer: int | None = None) -> dict[str, np.ndarray]:
        found = {name: np.asarray(value) for name, value in parameters.items() if name not in llama.MATRICES}
        return {convert.tensor_name(name, layer): x.T if convert.NAMES[name][2] else x for name, x in found.items()}

    try:
        partial.mkdir(parents=True)
        save(1, plain(model.outer))
        for number, window in enumerate(each("windows written", windows, len(windows)), 2):
            tensors: dict[str, np.ndarray] = {}
            for place in window:
                tensors |= plain(model.layers[place], place)
            for matrix in llama.MATRICES:
                made, names = factors(matrix, window), [convert.tensor_name(matrix, place) for place in window]
                parameters += made.parameters
                if dense:
                    tensors |= dict(zip(names, made.dense()))
                    continue
                shared = f"shared.{matrix}.{window[0]}-{window[-1]}"
                for n, name in enumerate(names):
                    sides = []
                    for side in ("left", "right"):
                        values = getattr(made, side)
                        own = len(values) == len(window)
                        sides.append(f"{name.removesuffix('.weight') if own else shared}.{side}")
                        tensors[sides[-1]] = values[n if own else 0]
                    index[name] = sides
            save(number, tensors)
        weights = {"metadata": {}, "weight_map": files}
        described = {"model.safetensors.index.json": weights, "config.json": convert.hugging_face_config(model.section)}
        if not dense:
            described[FACTORS] = {"format": FORMAT, "factors": index}
        for name, content in described.items():
            results.write_whole(partial / name, json.dumps(content, indent=1).encode(), _ADVICE)
        tokenizer.save(str(partial / "tokenizer.json"))
        if out.exists():
            out.rmdir()  # `check` found it empty
        partial.rename(out)
    except OSError as error:
        raise GcjaxError(f"cannot write {out}: {error.strerror or error}{_ADVICE}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product(Tensor):
    """`left @ right`, of which [start, stop) of `file` are the left one's bytes."""

    left: Tensor
    right: Tensor

    @property
    def stored(self) -> tuple[Tensor, ...]:
        return (*self.left.stored, *self.right.stored)

    def _rows(self, first: int, last: int) -> np.ndarray:
        return self.left.read(slice(first, last)) @ self.right.read()


def open_factored(folder: Path) -> Checkpoint:
    """A directory that `write` wrote, as a checkpoint of the products; only headers are read.

    Raises `GcjaxError` as `files.open_checkpoint` does, and for a factors.json that does not fit the tensors.
    """
    checkpoint, file = open_checkpoint(folder), folder / FACTORS
    record = headers.read_json(file)
    index = record.get("factors")
    if record.get("format") != FORMAT or not isinstance(index, dict):
        raise GcjaxError(f"{file} is not of format {FORMAT}, which this version reads; write the model again")
    tensors, used = dict(checkpoint.tensors), set()
    for name, sides in index.items():
        found = [checkpoint.tensors.get(side) if isinstance(side, str) else None for side in sides[:3]] \
            if isinstance(sides, list) else []  # fmt: skip
        match found:
            case [Tensor(shape=(o, r)) as left, Tensor(shape=(q, i)) as right] if r == q and name not in tensors:
                tensors[name] = _Product(name, (o, i), left.dtype, left.file, left.start, left.stop, left=left, right=right)
                used |= {left.name, right.name}
            case _:
                raise GcjaxError(f"{file} makes {name!a} of {sides!a}, which are not its two factors; write the model again")
    held = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    if sum(math.prod(tensors[name].shape) for name in index) > _MOST * held:
        raise GcjaxError(f"{file} makes {some(index)} over {_MOST} times as large as the files; write the model again")
    kept = {name: tensor for name, tensor in tensors.items() if name not in used}
    return dataclasses.replace(checkpoint, tensors=kept)
