"""Which files of a directory make up a checkpoint, and what is said of one that has none to read."""

import re
from pathlib import Path
from typing import NamedTuple

from gcjax.errors import GcjaxError, some
from gcjax.pretrained import headers

_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
CONVERTED = ("model.json", "params")  # what gcjax convert writes into a directory
FACTORS = "factors.json"  # what gcjax compress writes beside a model's factors
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class Choice(NamedTuple):
    """The files to read, and for a sharded checkpoint the tensors to take from each."""

    format: str
    files: list[Path]
    notes: list[str]
    index: dict[str, set[str]] | None = None


def is_converted(given: Path) -> bool:
    """Whether `given` looks like a directory that gcjax convert wrote; `stored.open_converted` makes sure."""
    return (given / CONVERTED[0]).is_file() and (given / CONVERTED[1]).is_dir()


def choose(given: Path) -> Choice:
    """The files of the checkpoint `given`, a directory or a file. Raises `GcjaxError` where there are none to read."""
    if given.is_dir():
        return _in_folder(given)
    if not given.exists():
        raise GcjaxError(f"{given} does not exist; give a checkpoint's directory, or a safetensors or GGUF file")
    first = headers.begins(given)
    if given.suffix == ".json":
        raise GcjaxError(f"{given} holds no weights; give its directory, {given.parent}")
    if given.suffix == ".gguf" or first.startswith(b"GGUF"):
        return Choice("gguf", _parts(given), [])
    if given.suffix == ".safetensors" or first[8:9] == b"{":  # a file in a cache may be named by its hash
        return Choice("safetensors", [given], [])
    if given.suffix in _PICKLES or first.startswith((b"PK\3\4", b"\x80\x02")):
        raise _pickles(given, given.parent)
    said = f"(it begins with {first[:4]!r})"
    raise GcjaxError(f"{given} is neither a safetensors nor a GGUF file {said}; give one of those")


def _in_folder(folder: Path) -> Choice:
    names = sorted(path.name for path in folder.iterdir())
    weights = [name for name in names if name.endswith(".safetensors")]
    adapters = [name for name in names if name.startswith("adapter_model.")]
    ggufs = [name for name in names if name.endswith(".gguf")]
    plain = [name for name in weights if name not in adapters]
    notes = [f"{some(adapters)} ignored: an adapter is not part of the model"] if adapters else []
    if _INDEX in names:
        index = _index(folder / _INDEX)
        chosen, why = sorted(index), "not in the index"
    else:
        index, why = None, "not part of the model"
        chosen = [name for name in plain if not name.startswith("consolidated")] or plain
        if "model.safetensors" in chosen:
            chosen = ["model.safetensors"]
    if chosen:
        if index is None and len(chosen) > 1:
            said = f"{folder} holds {some(chosen, 200)} without {_INDEX}, which says what belongs together"
            raise GcjaxError(f"{said}; download that too, or give one of the files")
        if missing := [name for name in chosen if not (folder / name).is_file()]:
            raise GcjaxError(f"{folder} lacks {some(missing, 200)}, or has links to nothing there; download them")
        if stray := [name for name in plain if name not in chosen]:
            notes.append(f"{some(stray)} ignored: {why}")
        if ggufs:
            notes.append(f"{some(ggufs)} ignored: the directory holds safetensors too")
        return Choice("safetensors", [folder / name for name in chosen], notes, index)
    if ggufs:
        parts = _parts(folder / ggufs[0])
        if others := [name for name in ggufs if folder / name not in parts]:
            raise GcjaxError(f"{folder} holds several models, {some([ggufs[0], *others])}; give one of the files")
        return Choice("gguf", parts, notes)
    if adapters or "adapter_config.json" in names:
        said = f"{folder} holds an adapter (LoRA), not a model"
        raise GcjaxError(f"{said}; merge it into its base model first, with peft's merge_and_unload()")
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        raise _pickles(folder / pickles[0], folder)
    raise GcjaxError(f"{folder} holds no weights, only {some(names) or 'nothing at all'}; give a checkpoint's directory")


def _pickles(file: Path, folder: Path) -> GcjaxError:
    load = f"AutoModelForCausalLM.from_pretrained({str(folder)!r})"
    save = f".save_pretrained({str(folder / 'safetensors')!r}, safe_serialization=True)"
    return GcjaxError(
        f"{file} is a pickle, which could run any code and is not read; if you trust it, convert it with "
        f'python -c "from transformers import AutoModelForCausalLM; {load}{save}"'
    )


def _index(path: Path) -> dict[str, set[str]]:
    """The names of the tensors to take from each file."""
    given_to = headers.read_json(path).get("weight_map")
    if not isinstance(given_to, dict) or not given_to:
        raise GcjaxError(f"{path} has no weight_map; download it again")
    index: dict[str, set[str]] = {}
    for name, file in given_to.items():
        # Only the name is checked: in a Hugging Face cache the file itself is a link to elsewhere.
        if not isinstance(file, str) or not file.isprintable() or file in ("", ".", "..") or re.search(r"[/\\:]", file):
            raise GcjaxError(f"{path} puts {name!a} into {file!a}, which is no file of its directory; download it again")
        index.setdefault(file, set()).add(name)
    return index


def _parts(file: Path) -> list[Path]:
    """All the files of a GGUF model, of which `file` is one."""
    if not (split := _SPLIT.fullmatch(file.name)):
        return [file]
    names = [f"{split[1]}-{number:05}-of-{split[3]}.gguf" for number in range(1, int(split[3]) + 1)]
    if missing := [name for name in names if not (file.parent / name).is_file()]:
        raise GcjaxError(f"{file.parent} lacks {some(missing, 200)}, parts of {split[1]}; download them")
    return [file.parent / name for name in names]
