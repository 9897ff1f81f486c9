"""A checkpoint on disk as a list of lazily read tensors: safetensors, one file or sharded, and GGUF.

Nothing is unpickled, and no more than a header is read before a tensor is asked for.
"""

import contextlib
import dataclasses
import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from gcjax.errors import GcjaxError, nearest, some
from gcjax.pretrained import headers
from gcjax.pretrained.directory import choose
from gcjax.pretrained.headers import Header

FP8 = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}

_PLAIN = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_WHOLE = {"BOOL"} | {f"{sign}{bits}" for sign in "UI" for bits in (8, 16, 32, 64)}
_CHUNK = 1 << 17  # values converted at a time: they and their float32 stay in a core's cache
# Tensor names that only a packed format has.
_PACKED = (
    (r"\.qweight$", "GPTQ or AWQ"),
    (r"\.weight_packed$", "compressed-tensors"),
    (r"\.quant_state\.|\.absmax$|\.SCB$", "bitsandbytes"),
    (r"\.weight_scale_2$", "NVFP4"),
    (r"_blocks$", "MXFP4"),
)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file, not yet read: its bytes are [start, stop) of `file`.

    `shape` is row-major, as PyTorch has it. `dtype` is the storage: a safetensors dtype (F32, BF16, F8_E4M3, ...) or a
    GGUF type (Q4_1, ...). `scale` multiplies an fp8 tensor: one value, one a row, or one for each `block` (rows,
    columns) of a matrix.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int
    stop: int
    scale: "Tensor | None" = None
    block: tuple[int, int] | None = None

    def read(self, rows: slice | None = None) -> np.ndarray:
        """The values in float32 (float64 for F64), C-contiguous; only `rows` (step 1) of the first axis where given.

        No more bytes are read and converted than asked for, and no more memory taken than the result and a few MB.

        Raises `GcjaxError` for an integer or bool dtype, one that cannot be decoded, and a file that is no longer what
        was opened; `ValueError` for rows with a step, or of a scalar.
        """
        if rows is None:
            return self._rows(0, self.shape[0] if self.shape else 1)
        if not self.shape or rows.step not in (None, 1):
            raise ValueError(f"rows {rows} of {self.name}, whose shape is {self.shape}")
        first, last, _ = rows.indices(self.shape[0])
        if len(self.shape) == 1 and self.dtype not in (*_PLAIN, *FP8):  # a block of a quantized vector spans its rows
            return self.read()[rows].copy()
        return self._rows(first, max(first, last))

    @property
    def stored(self) -> tuple["Tensor", ...]:
        """What in files it is made of."""
        return (self,) if self.scale is None else (self, self.scale)

    def fetch(self) -> None:
        """Has the system read the stored bytes, into its cache and no memory of the process, so that `read` need not wait.

        What cannot be read is `read`'s to say.
        """
        buffer = memoryview(bytearray(1 << 20))
        for part in self.stored:
            with contextlib.suppress(OSError), part.file.open("rb", buffering=0) as stream:
                stream.seek(part.start)
                left = part.stop - part.start
                while left > 0 and (got := stream.readinto(buffer[:left])):
                    left -= got

    def _rows(self, first: int, last: int) -> np.ndarray:
        shape = (last - first, *self.shape[1:]) if self.shape else ()
        size, axis = self.stop - self.start, max(self.shape[0], 1) if self.shape else 1
        convert, chunk = self._decoder()
        values = aligned(shape, np.float64 if self.dtype == "F64" else np.float32)
        flat, done = values.reshape(-1), 0
        try:
            with np.errstate(all="ignore"):  # NaN and Inf are the reader's business
                for part in self._bytes(self.start + size * first // axis, self.start + size * last // axis, chunk):
                    converted = convert(part)
                    flat[done : done + converted.size] = converted
                    done += converted.size
                if self.scale is not None:
                    _multiply(values, self.scale.read(), self.block, first)
        except OSError as error:
            raise GcjaxError(f"{self.file}: {self.name} cannot be read ({error}); check the file") from error
        return values

    def _bytes(self, start: int, stop: int, chunk: int) -> Iterator[np.ndarray]:
        # Not by a memory map: its pages count as memory of the process, and a file cut short kills it.
        buffer = np.empty(min(chunk, stop - start), np.uint8)
        with self.file.open("rb") as stream:
            stream.seek(start)
            for at in range(start, stop, chunk):
                part = buffer[: min(chunk, stop - at)]
                if stream.readinto(part.data) != len(part):
                    raise GcjaxError(f"{self.file} has become shorter since it was opened; download it again")
                yield part

    def _decoder(self) -> tuple[Any, int]:
        """What turns a chunk of bytes into values (of any dtype), and the chunk's size in bytes."""
        if plain := _PLAIN.get(self.dtype):
            return lambda part: part.view(plain), _CHUNK * np.dtype(plain).itemsize
        if fp8 := FP8.get(self.dtype):
            table = np.arange(256, dtype=np.uint8).view(fp8).astype(np.float32)  # 5 times as fast as a cast
            return lambda part: table.take(part, mode="clip"), _CHUNK
        if self.dtype in _WHOLE:
            raise GcjaxError(f"{self.file}: {self.name} holds {self.dtype}, not real numbers; leave it out")
        if self.dtype in headers.SAFETENSORS_BITS:
            raise GcjaxError(f"{self.file}: {self.name} is stored as {self.dtype}, which is not read; convert it to BF16")
        import gguf

        kind = gguf.GGMLQuantizationType[self.dtype]
        block, itemsize = gguf.GGML_QUANT_SIZES[kind]
        return partial(self._dequantized, kind), _CHUNK // block * itemsize

    def _dequantized(self, kind: Any, part: np.ndarray) -> np.ndarray:
        import gguf

        try:
            return gguf.quants.dequantize(part[None], kind).ravel()
        except NotImplementedError as error:
            said = f"is quantized as {self.dtype}, which the gguf package cannot decode"
            raise GcjaxError(f"{self.file}: {self.name} {said}; use a file quantized otherwise") from error


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array to be filled, where JAX on a CPU can take it as it is: at a multiple of 64 bytes."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(dtype).reshape(shape)


def _multiply(values: np.ndarray, scale: np.ndarray, block: tuple[int, int] | None, first: int) -> None:
    """Scales in place the rows of an fp8 tensor, of which `values` are those from `first`."""
    if scale.size == 1:
        values *= scale.reshape(())
    elif block is None:
        values *= scale.reshape(-1, *[1] * (values.ndim - 1))[first : first + len(values)]
    else:
        last = first + len(values)
        for number in range(first // block[0], math.ceil(last / block[0])):
            top, bottom = max(number * block[0], first), min((number + 1) * block[0], last)
            values[top - first : bottom - first] *= np.repeat(scale[number], block[1])[: values.shape[1]]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What `open_checkpoint` found at `path`.

    `format` is safetensors or gguf. `config` is config.json, {} where there is none; for GGUF the metadata, but for
    arrays of more than 512 items. `notes` holds a sentence about each kind of file or tensor that was ignored.
    """

    path: Path
    format: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    notes: tuple[str, ...]


def open_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """Opens a directory as Hugging Face publishes it, or one safetensors or GGUF file; of a split GGUF, all parts.

    config.json is taken from the directory that the weights are in. Only headers are read. The order of the tensors is
    that of the files by name, then of their bytes. The scales of fp8 tensors are applied by `read`, not listed.

    Raises `GcjaxError` for whatever is not a whole checkpoint of real numbers, with what to do.
    """
    given = Path(path).expanduser()
    try:
        choice = choose(given)
        parse = headers.read_gguf if choice.format == "gguf" else headers.read_safetensors
        found = [(file, parse(file)) for file in choice.files]
        if choice.format == "gguf":
            config = _gguf_config(found)
        else:
            beside = choice.files[0].parent / "config.json"
            config = headers.read_json(beside) if beside.exists() else {}
    except OSError as error:
        raise GcjaxError(f"{given} cannot be read ({error}); check the path and its permissions") from error
    notes, tensors = list(choice.notes), {}
    for file, header in found:
        entries = header.entries
        if choice.index is not None:
            entries, note = _allowed(file, header, choice.index[file.name])
            notes += note
        for entry in entries:
            if entry.name in tensors:
                raise GcjaxError(f"{file} and {tensors[entry.name].file} both hold {entry.name!r}; download them again")
            tensors[entry.name] = Tensor(entry.name, entry.shape, entry.dtype, file, entry.start, entry.stop)
    if not tensors:
        raise GcjaxError(f"{given} holds no tensors; give a checkpoint with weights")
    if choice.format == "safetensors":
        quantization = config.get("quantization_config")
        tensors = _usable(given, tensors, quantization if isinstance(quantization, dict) else {})
    return Checkpoint(given, choice.format, tensors, config, tuple(notes))


def gguf_field(path: str | os.PathLike, key: str) -> Any:
    """One metadata field of a GGUF file or directory, however long: a number, a bool, a string, or a list of them.

    Raises `GcjaxError` where the file does not have it.
    """
    given = Path(path).expanduser()
    try:
        choice = choose(given)
        if choice.format != "gguf":
            raise GcjaxError(f"{given} is no GGUF file, hence has no field {key!r}; give a .gguf file")
        metadata = headers.read_gguf(choice.files[0], whole=key).metadata
    except OSError as error:
        raise GcjaxError(f"{given} cannot be read ({error}); check the path and its permissions") from error
    if key not in metadata:
        raise GcjaxError(f"{given} has no metadata field {key!r}; {nearest(key, metadata)}")
    return metadata[key]


def fingerprint(checkpoint: Checkpoint) -> str:
    """A sha256 that a copy elsewhere shares and another checkpoint does not, however similar.

    It is over file sizes, headers, and each tensor's name, shape, dtype, byte range and first 4 KiB, and reads no more.
    """
    digest = hashlib.sha256(checkpoint.format.encode())
    by_file: dict[Path, list[Tensor]] = {}
    for tensor in checkpoint.tensors.values():
        for part in tensor.stored:
            by_file.setdefault(part.file, []).append(part)
    for file, tensors in by_file.items():
        try:
            with file.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                left = min(tensor.start for tensor in tensors)
                if checkpoint.format == "safetensors":  # there, ignored tensors may be between the header and these
                    left = min(left, 8 + int.from_bytes(stream.read(8), "little"))
                digest.update(f"\n{size} {len(tensors)} {left}\n".encode())
                stream.seek(0)
                while left > 0 and (block := stream.read(min(left, 1 << 20))):
                    digest.update(block)
                    left -= len(block)
                for tensor in tensors:
                    digest.update(f"{(tensor.name, tensor.shape, tensor.dtype, tensor.start, tensor.stop)}".encode())
                    stream.seek(tensor.start)
                    digest.update(stream.read(min(4096, tensor.stop - tensor.start)))
        except OSError as error:
            raise GcjaxError(f"{file} cannot be read ({error}); check the file") from error
    return digest.hexdigest()


def _allowed(file: Path, header: Header, names: set[str]) -> tuple[list[headers.Entry], list[str]]:
    if missing := sorted(names - {entry.name for entry in header.entries}):
        raise GcjaxError(f"{file} lacks {some(map(ascii, missing))}, which the index says it holds; download it again")
    extra = [entry.name for entry in header.entries if entry.name not in names]
    note = [f"{some(extra)} in {file.name} ignored: the index does not give them to that file"] if extra else []
    return [entry for entry in header.entries if entry.name in names], note


def _gguf_config(found: list[tuple[Path, Header]]) -> dict[str, Any]:
    """The metadata of the first part, which has all of it."""
    for file, header in found:
        if header.metadata.get("split.count", 1) not in (len(found), 0):
            count = header.metadata["split.count"]
            raise GcjaxError(f"{file} is one of {count} parts; put all into one directory under their original names")
    return {key: value for key, value in found[0][1].metadata.items() if not key.startswith("split.")}


def _usable(given: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors with fp8 scales attached. Raises `GcjaxError` for adapters, packed integers, and fp8 without a scale."""
    method = quantization.get("quant_method")
    for name in tensors:
        if ".lora_A." in name or ".lora_B." in name:
            raise GcjaxError(f"{given} holds an adapter (LoRA) in {name!r}; merge it first, with peft's merge_and_unload()")
    if packed := _packed(tensors, method):
        said = f"{given} holds weights packed as {packed[0]} ({packed[1]!r}), which cannot be decoded"
        raise GcjaxError(f"{said}; use the model in BF16 or F32 that it was made from")
    scales = {}
    for name in (name for name, tensor in tensors.items() if tensor.dtype in FP8):
        scale = tensors.get(f"{name}_scale") or tensors.get(f"{name}_scale_inv")
        if scale is None or scale.dtype not in _PLAIN:
            said = f"{given}: {name!r} is in fp8 without {name}_scale or {name}_scale_inv in floating point"
            raise GcjaxError(f"{said}; download the whole checkpoint, or use one in BF16")
        scales[name] = scale
    given_size = quantization.get("weight_block_size")
    scaled = {
        name: dataclasses.replace(tensors[name], scale=scale, block=_block(tensors[name], scale, given_size))
        for name, scale in scales.items()
    }
    applied = {scale.name for scale in scales.values()}
    return {name: scaled.get(name, tensor) for name, tensor in tensors.items() if name not in applied}


def _packed(tensors: Mapping[str, Tensor], method: Any) -> tuple[str, str] | None:
    """The format of weights packed in integers, by its own names before the names that it shares, and one of them."""
    for pattern, packed in _PACKED:
        for name in filter(re.compile(pattern).search, tensors):
            if packed == "MXFP4" and f"{name.removesuffix('_blocks')}_scales" not in tensors:
                continue
            return (method.upper() if packed == "GPTQ or AWQ" and method in ("gptq", "awq") else packed), name
    for name, tensor in tensors.items():
        if name.endswith(".weight") and len(tensor.shape) > 1 and tensor.dtype in _WHOLE:
            return (method if isinstance(method, str) else f"an unknown format in {tensor.dtype}"), name
    return None


def _block(tensor: Tensor, scale: Tensor, given: Any) -> tuple[int, int] | None:
    """The size of the blocks that have a scale each; None for one scale, or one a row."""
    if math.prod(scale.shape) == 1:
        return None
    if tensor.shape and scale.shape in (tensor.shape[:1], (tensor.shape[0], *[1] * len(tensor.shape[1:]))):
        return None
    match given or [128, 128]:
        case [int(rows), int(columns)] if min(rows, columns) > 0 and len(tensor.shape) == 2:
            if scale.shape == (math.ceil(tensor.shape[0] / rows), math.ceil(tensor.shape[1] / columns)):
                return min(rows, max(tensor.shape[0], 1)), min(columns, max(tensor.shape[1], 1))
    said = f"the scale {scale.name!r} of shape {scale.shape} does not fit {tensor.name!r} of shape {tensor.shape}"
    raise GcjaxError(f"{tensor.file}: {said} (quantization_config.weight_block_size is {given!r}); download it again")
