"""The headers of safetensors and GGUF files, parsed under bounds: a damaged or hostile one ends in a `GcjaxError`.

Both are parsed here rather than by their packages, because those raise many kinds of error for a damaged file, and
`gguf.GGUFReader` trusts every length that a header states. All work and memory is bounded by the size of the file.
"""

import json
import math
import mmap
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from gcjax.errors import GcjaxError

# Bits a value takes, for every dtype that the format has.
SAFETENSORS_BITS: Mapping[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

_LARGEST_JSON = 100_000_000  # bytes, as the safetensors package has it
_LARGEST_GGUF_HEADER = 1 << 28
_MOST_DIMENSIONS, _MOST_VALUES = 16, 1 << 60  # what NumPy can hold, with room
_SHORT_ARRAY = 512
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}


class Entry(NamedTuple):
    """A tensor as the header has it; its bytes are [start, stop) of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int


class Header(NamedTuple):
    """The tensors in the order of their bytes, none of which overlap or pass the end of the file, and the metadata."""

    entries: tuple[Entry, ...]
    metadata: dict[str, Any]


def begins(path: Path) -> bytes:
    """The first 64 bytes of a file. Raises `GcjaxError` unless it is a regular, non-empty file with content of its own."""
    if not path.is_file():
        raise GcjaxError(f"{path} is missing or no regular file; download it again")
    with path.open("rb") as stream:
        first = stream.read(64)
    if first.startswith(b"version https://git-lfs.github.com/spec/"):
        raise GcjaxError(f"{path} is a Git LFS pointer, not the file itself; run 'git lfs pull' in {path.parent}")
    if not first:
        raise GcjaxError(f"{path} is empty; download it again")
    return first


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `GcjaxError` for anything else, also for one that names a key twice."""
    begins(path)
    if (size := path.stat().st_size) > _LARGEST_JSON:
        raise GcjaxError(f"{path} has {size} bytes, too many for a JSON file of a checkpoint; download it again")
    return _object(path, path.read_bytes(), "it")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(known := dict(pairs)) < len(pairs):
        raise ValueError("a key is there twice")
    return known


def _object(path: Path, content: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(content.decode(), object_pairs_hook=_unique)
        if not isinstance(value, dict):
            raise ValueError("no object")
    except (ValueError, RecursionError) as error:  # a JSONDecodeError or UnicodeDecodeError is a ValueError
        raise GcjaxError(f"{path}: {what} is not a valid JSON object ({error}); download it again") from error
    return value


def read_safetensors(path: Path) -> Header:
    """The header of a safetensors file; `metadata` is its `__metadata__`.

    Raises `GcjaxError` for a file that is none, is truncated, or whose header is not what the format demands: unique
    names, known dtypes, byte ranges that fit shape and dtype and cover all data without overlap or hole.
    """
    first, size = begins(path), path.stat().st_size
    length = int.from_bytes(first[:8], "little")
    if len(first) < 9 or first[8:9] != b"{":
        raise GcjaxError(f"{path} is not a safetensors file (it begins with {first[:9]!r}); download it again")
    if length > size - 8:
        raise GcjaxError(f"{path}: the header is said to have {length} bytes, the file has {size}; download it again")
    if length > _LARGEST_JSON:
        raise GcjaxError(f"{path}: a header of {length} bytes is larger than any safetensors file has; download it again")
    with path.open("rb") as stream:
        stream.seek(8)
        described = _object(path, stream.read(length), "its header")
    metadata = described.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise GcjaxError(f"{path}: __metadata__ is no JSON object; download it again")
    data = 8 + length
    entries = _in_order(path, (_described(path, name, value, data) for name, value in described.items()), size)
    at = data
    for entry in entries:
        if entry.start != at:
            raise GcjaxError(f"{path}: {entry.start - at} bytes before {entry.name} belong to no tensor; download it again")
        at = entry.stop
    if at != size:
        raise GcjaxError(f"{path}: the last {size - at} bytes belong to no tensor; download it again")
    return Header(entries, metadata)


def _described(path: Path, name: str, value: Any, data: int) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
            numbers = [*shape, start, stop]
            # By type, for True is an int; the bound keeps any sum of them short enough to print.
            if {int} == set(map(type, numbers)) and min(numbers) >= 0 and max(start, stop) < 1 << 63:
                if dtype not in SAFETENSORS_BITS:
                    raise GcjaxError(f"{path}: the dtype {dtype[:40]!r} of {name!r} is unknown; convert it to BF16 or F32")
                _check_size(path, name, shape)
                if math.prod(shape) * SAFETENSORS_BITS[dtype] == 8 * (stop - start):
                    return Entry(name, tuple(shape), dtype, data + start, data + stop)
                said = f"has {stop - start} bytes, which is not what {dtype} {shape} takes"
                raise GcjaxError(f"{path}: {name!r} {said}; download it again")
    raise GcjaxError(f"{path}: the header does not give {name!r} a dtype, a shape and a byte range; download it again")


def _check_size(path: Path, name: str, shape: Iterable[int]) -> None:
    if not name.isprintable():
        raise GcjaxError(f"{path}: {name!a} is no name of a tensor; download it again")
    values = 1
    for dimensions, length in enumerate(shape):
        values *= max(length, 1)
        if values >= _MOST_VALUES or dimensions >= _MOST_DIMENSIONS:
            raise GcjaxError(f"{path}: {name!r} has an impossible shape; download it again")


def _in_order(path: Path, entries: Iterable[Entry], size: int) -> tuple[Entry, ...]:
    """Sorted by byte range. Raises `GcjaxError` where two overlap or one passes the end of the file."""
    ordered = tuple(sorted(entries, key=lambda entry: (entry.start, entry.stop)))
    if ordered and (missing := max(entry.stop for entry in ordered) - size) > 0:
        raise GcjaxError(f"{path} is truncated: {missing} bytes are missing at its end; download it again")
    for one, other in zip(ordered, ordered[1:]):
        if other.start < one.stop:
            raise GcjaxError(f"{path}: the bytes of {one.name!r} and {other.name!r} overlap; download it again")
    return ordered


def read_gguf(path: Path, whole: str = "") -> Header:
    """The header of a GGUF file; `metadata` has no array of more than 512 items but the one whose key is `whole`.

    Raises `GcjaxError` for a file that is none, is truncated or big-endian, has a version other than 2 or 3, or whose
    header is not what the format demands.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    first, size = begins(path), path.stat().st_size
    if not first.startswith(b"GGUF"):
        raise GcjaxError(f"{path} is not a GGUF file (it begins with {first[:4]!r}); download it again")
    with path.open("rb") as stream:
        cursor = _Cursor(path, mmap.mmap(stream.fileno(), min(size, _LARGEST_GGUF_HEADER), access=mmap.ACCESS_READ))
    cursor.take(4)
    version = cursor.number("<I")
    if version & 0xFFFF == 0:
        raise GcjaxError(f"{path} is a big-endian GGUF file; convert it with 'gguf-convert-endian {path} little'")
    if version not in (2, 3):
        raise GcjaxError(f"{path} has version {version} of GGUF, only 2 and 3 are read; convert the model again")
    tensors, fields = cursor.number("<Q"), cursor.number("<Q")
    cursor.check_count(fields, 13)  # an empty key, a kind and one byte
    metadata: dict[str, Any] = {}
    for _ in range(fields):
        if (key := cursor.name()) in metadata:
            raise GcjaxError(f"{path}: the metadata key {key!r} is there twice; download it again")
        metadata[key] = cursor.value(math.inf if key == whole else _SHORT_ARRAY)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise GcjaxError(f"{path}: general.alignment is {alignment!r}, not a power of two; download it again")

    found: list[tuple[str, tuple[int, ...], int, int]] = []
    cursor.check_count(tensors, 24)  # an empty name, the number of dimensions, a type and an offset
    for _ in range(tensors):
        name, dimensions = cursor.name(), cursor.number("<I")
        if dimensions > _MOST_DIMENSIONS:
            raise GcjaxError(f"{path}: {name!r} is said to have {dimensions} dimensions; download it again")
        shape = tuple(cursor.number("<Q") for _ in range(dimensions))[::-1]
        _check_size(path, name, shape)
        found.append((name, shape, cursor.number("<I"), cursor.number("<Q")))
    if len({name for name, *_ in found}) < len(found):
        raise GcjaxError(f"{path} has two tensors of one name; download it again")

    data, entries = cursor.at + -cursor.at % alignment, []
    for name, shape, kind, offset in found:
        if kind not in GGML_QUANT_SIZES:
            raise GcjaxError(f"{path}: the gguf package knows no type {kind}, which {name!r} has; update that package")
        block, itemsize = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if math.prod(shape[-1:]) % block or offset % alignment:
            raise GcjaxError(f"{path}: {name!r} has an impossible shape or offset for its type; download it again")
        stop = data + offset + math.prod(shape) // block * itemsize
        entries.append(Entry(name, shape, GGMLQuantizationType(kind).name, data + offset, stop))
    return Header(_in_order(path, entries, size), {key: value for key, value in metadata.items() if value is not None})


class _Cursor:
    """Reads a GGUF header from its mapped bytes, never past their end."""

    def __init__(self, path: Path, content: mmap.mmap):
        self.path, self.content, self.at = path, content, 0

    def fail(self) -> NoReturn:
        raise GcjaxError(f"{self.path} ends inside its header, or its header is damaged; download it again")

    def check_count(self, count: int, least: int) -> None:
        """That `count` items of at least `least` bytes can be there."""
        if count * least > len(self.content) - self.at:
            self.fail()

    def take(self, count: int) -> int:
        """Moves on by `count` bytes and returns where they begin."""
        self.check_count(count, 1)
        self.at += count
        return self.at - count

    def number(self, form: str) -> int:
        return struct.unpack_from(form, self.content, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        start = self.take(self.number("<Q"))
        return self.content[start : self.at].decode(errors="replace")

    def name(self) -> str:
        name = self.string()
        if re.search("[\0\ufffd]", name):
            self.fail()
        return name

    def value(self, longest: float) -> Any:
        """A scalar, a string, or a list of at most `longest` of either; None for a longer one, which is passed over."""
        kind, count, several = self.number("<I"), 1, False
        if kind == _ARRAY:
            kind, count, several = self.number("<I"), self.number("<Q"), True
        if kind == _STRING:
            self.check_count(count, 8)
            values = [self.string() for _ in range(count)] if count <= longest else self._skip_strings(count)
        elif dtype := _SCALARS.get(kind):  # not an array of arrays, which no reader of GGUF accepts
            itemsize = np.dtype(dtype).itemsize
            start = self.take(count * itemsize)
            values = np.frombuffer(self.content, dtype, count, start).tolist() if count <= longest else None
        else:
            self.fail()
        return values if several or values is None else values[0]

    def _skip_strings(self, count: int) -> None:
        at, unpack = self.at, struct.Struct("<Q").unpack_from  # a vocabulary has a quarter of a million
        try:
            for _ in range(count):
                at += 8 + unpack(self.content, at)[0]
        except (struct.error, OverflowError):
            self.fail()
        self.take(at - self.at)
