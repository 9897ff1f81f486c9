"""MNIST, Fashion-MNIST and KMNIST as NumPy arrays, from a named asset, from IDX files or from a TFDS directory."""

import contextlib
import dataclasses
import gzip
import hashlib
import importlib
import importlib.util
import io
import math
import struct
import threading
import urllib.parse
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, UInt8

from gcjax.data import assets
from gcjax.errors import GcjaxError, nearest

Split = tuple[UInt8[np.ndarray, "_ 784"], Int32[np.ndarray, "_"]]  # images, labels

LICENCES = {"mnist": "CC BY-SA 3.0", "fashion_mnist": "MIT", "kmnist": "CC BY-SA 4.0"}
SOURCES = ("auto", "asset", "idx", "tfds")
PIXELS, CLASSES = 784, 10  # the same for all three sets as published

_SIDE, _MOST_IMAGES = 28, 60_000
_TEST_EVERY = 5
_ANSWER_SECONDS = 4.0


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """A labelled image set: uint8 pixels flattened row by row, [N, 784], and int32 labels 0..9, [N]; all read-only.

    `provenance` holds strings and numbers only: name, source, origin (the package or TFDS version behind it), licence,
    train_size, test_size, and sha256. The hash is over both splits as sets of examples, because TFDS shuffles what it
    prepares: the same published data hashes the same from any source, while the order of the examples is the source's.
    """

    train_x: UInt8[np.ndarray, "N 784"]
    train_y: Int32[np.ndarray, "N"]
    test_x: UInt8[np.ndarray, "M 784"]
    test_y: Int32[np.ndarray, "M"]
    provenance: dict[str, str | int]


def load(name: str, source: str, directory: str) -> Images:
    """Loads `name` (mnist, fashion_mnist or kmnist) from one of three sources, or from the best that is there.

    - `auto`: IDX files where `directory` holds them, else TFDS where the set is prepared (in `directory`, or in TFDS's
      default), else the asset; never downloads a whole set.
    - `asset`: MNIST only, the asset mnist-5k, which lists 500 images of each class; `directory` must be empty. Image i
      of a class is a test image when i % 5 == 4, otherwise a training image (1,000 and 4,000), and both splits go
      through the classes in turn (digits 0, 1, ..., 9, 0, ...), so that any prefix is balanced.
    - `idx`: the four files as published, in `directory`, gzipped or not: train-images-idx3-ubyte[.gz],
      train-labels-idx1-ubyte[.gz] and the two of t10k; a dot before idx is accepted too.
    - `tfds`: `directory` as TFDS prepares it in array_record format ("": TFDS's own default), read without TensorFlow.
      What is not prepared there is prepared first, which needs TensorFlow and the network.

    Raises `GcjaxError` for an unknown name or source, files that are missing or malformed, an asset that cannot be
    fetched, a TFDS directory that cannot be read, and one that cannot be prepared.
    """
    if name not in LICENCES:
        raise GcjaxError(f"there is no image set {name!r}; {nearest(name, LICENCES)}")
    if source == "auto":
        source = _best_source(name, directory)
        directory = "" if source == "asset" else directory
    match source:
        case "asset":
            train, test, origin = _load_asset(name, directory)
        case "idx":
            train, test, origin = _load_idx(directory)
        case "tfds":
            train, test, origin = _load_tfds(name, directory)
        case _:
            raise GcjaxError(f"there is no image source {source!r}; {nearest(source, SOURCES)}")
    provenance = {
        "name": name,
        "source": source,
        "origin": origin,
        "licence": LICENCES[name],
        "train_size": len(train[0]),
        "test_size": len(test[0]),
        "sha256": _content_sha256(train, test),
    }
    for array in (*train, *test):
        array.flags.writeable = False
    return Images(*train, *test, provenance)


def _best_source(name: str, directory: str) -> str:
    if directory and any(Path(directory).expanduser().glob("train-images*")):
        return "idx"
    if importlib.util.find_spec("tensorflow_datasets") is not None:
        tfds: Any = importlib.import_module("tensorflow_datasets")
        if tfds.builder(name, data_dir=directory or None, file_format="array_record").is_prepared():
            return "tfds"
    return "asset"


def _content_sha256(*splits: Split) -> str:
    digest = hashlib.sha256()
    for x, y in splits:
        examples = np.column_stack([y.astype(np.uint8), x])
        digest.update(struct.pack(">QQ", *examples.shape))
        digest.update(b"".join(sorted(example.tobytes() for example in examples)))
    return digest.hexdigest()


def _load_asset(name: str, directory: str) -> tuple[Split, Split, str]:
    if name != "mnist":
        raise GcjaxError(f"no asset holds {name}, only mnist; load it with data.source idx or tfds")
    if directory:
        raise GcjaxError(f"data.source asset reads no directory, but data.directory is {directory!r}; leave it empty")
    rows = np.loadtxt(assets.fetch("mnist-5k") / "mnist_5k.csv.gz", np.uint8, delimiter=",")  # 784 pixels, the label
    by_class = rows.reshape(CLASSES, -1, rows.shape[-1]).swapaxes(0, 1)  # [image of its class, class, ...]
    x, y = by_class[..., :-1], by_class[..., -1].astype(np.int32)
    is_test = np.arange(len(x)) % _TEST_EVERY == _TEST_EVERY - 1
    train, test = ((x[chosen].reshape(-1, x.shape[-1]), y[chosen].ravel()) for chosen in (~is_test, is_test))
    return train, test, assets.ASSETS["mnist-5k"].requirements


def _load_idx(directory: str) -> tuple[Split, Split, str]:
    folder = Path(directory).expanduser()
    if not directory or not folder.is_dir():
        raise GcjaxError(f"data.source idx reads the IDX files in data.directory, but {directory!r} is not a directory")
    return _read_idx_split(folder, "train"), _read_idx_split(folder, "t10k"), "IDX files"


def _read_idx_split(folder: Path, split: str) -> Split:
    images, labels = _find_idx(folder, f"{split}-images", 3), _find_idx(folder, f"{split}-labels", 1)
    x, y = _read_idx(images, (_SIDE, _SIDE)), _read_idx(labels, ())
    if len(x) != len(y):
        raise GcjaxError(f"{labels} holds {len(y)} labels for the {len(x)} images of {images.name}")
    if y.max() >= CLASSES:
        raise GcjaxError(f"{labels} holds the label {y.max()}, which is not within 0..{CLASSES - 1}")
    return x.reshape(len(x), -1), y.astype(np.int32)


def _find_idx(folder: Path, stem: str, ndim: int) -> Path:
    names = [f"{stem}{mark}idx{ndim}-ubyte{suffix}" for mark in "-." for suffix in ("", ".gz")]
    for path in (folder / name for name in names):
        if path.is_file():
            return path
    raise GcjaxError(f"{folder} holds no IDX file {' or '.join(names)}")


def _read_idx(path: Path, item: tuple[int, ...]) -> UInt8[np.ndarray, "_ ..."]:
    """The uint8 array [N, *item] of an IDX file; nothing is allocated before the header has been checked."""
    try:
        with path.open("rb") as raw:
            # Told by content: some downloads are unpacked on the way and keep their .gz name.
            stream = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw
            shape = _read_idx_header(path, stream, item)
            size = math.prod(shape)
            content = stream.read(size + 1)  # one more, to see that the file ends where its header says
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise GcjaxError(f"{path} is not a whole gzip file: {error}") from error
    except OSError as error:
        raise GcjaxError(f"{path} cannot be read: {error}") from error
    if len(content) != size:
        state = "is longer than" if len(content) > size else f"ends after {len(content)} of"
        raise GcjaxError(f"{path} {state} the {size} bytes that its header {list(shape)} promises")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _read_idx_header(path: Path, stream: io.BufferedIOBase, item: tuple[int, ...]) -> tuple[int, ...]:
    ndim = 1 + len(item)
    header = stream.read(4 + 4 * ndim)
    magic = bytes([0, 0, 8, ndim])  # 8: unsigned bytes
    if header[:4] != magic:
        raise GcjaxError(
            f"{path} begins with {header[:4].hex() or 'nothing'}, not with {magic.hex()}, the IDX mark of such a file"
        )
    if len(header) != 4 + 4 * ndim:
        raise GcjaxError(f"{path} ends within its IDX header")
    shape = struct.unpack(f">{ndim}I", header[4:])
    if shape[1:] != item or not 0 < shape[0] <= _MOST_IMAGES:
        expected = "x".join(["N", *map(str, item)])
        raise GcjaxError(f"{path} claims the shape {list(shape)}, not {expected} with N from 1 to {_MOST_IMAGES}")
    return shape


def _load_tfds(name: str, directory: str) -> tuple[Split, Split, str]:
    try:
        tfds: Any = importlib.import_module("tensorflow_datasets")  # an extra, and its own types are incomplete
    except ImportError as error:
        raise GcjaxError(f"data.source tfds needs: pip install 'gcjax[tfds-read]' ({error})") from error
    place = directory or "TFDS's default directory"
    try:
        builder = tfds.builder(name, data_dir=directory or None, file_format="array_record")
        if not builder.is_prepared():
            _check_can_prepare(name, builder.URL, place)
            builder.download_and_prepare()
        train, test = (_read_tfds_split(builder.as_data_source(split=split)) for split in ("train", "test"))
        return train, test, builder.info.full_name
    except GcjaxError:
        raise
    except Exception as error:  # RuntimeError, KeyError, ValueError or ParseError, depending on which file is corrupt
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise GcjaxError(f"{name} in {place} cannot be read or prepared in array_record format: {first}") from error


def _read_tfds_split(examples: Any) -> Split:
    x, y = np.empty((len(examples), _SIDE * _SIDE), np.uint8), np.empty(len(examples), np.int32)
    # All in one call: record by record, TFDS takes three times as long.
    for i, example in enumerate(examples.__getitems__(list(range(len(examples))))):
        x[i], y[i] = example["image"].ravel(), example["label"]
    return x, y


def _check_can_prepare(name: str, url: str, place: str) -> None:
    """Refuses at once what TFDS would retry for minutes."""
    if importlib.util.find_spec("tensorflow") is None:
        need = "preparing it needs TensorFlow: pip install 'gcjax[tfds]'"
    elif not _answers(url):
        need = f"{urllib.parse.urlsplit(url).hostname}, which serves it, does not answer"
    else:
        return
    prepare = f"tfds.builder('{name}', data_dir='DIR', file_format='array_record').download_and_prepare()"
    raise GcjaxError(
        f"{name} is not prepared in {place} and {need}; or use {'--config.data.source=asset, or ' * (name == 'mnist')}"
        "IDX files (--config.data.source=idx), or prepare DIR on another machine and copy it: "
        f'python -c "import tensorflow_datasets as tfds; {prepare}"'
    )


def _answers(url: str) -> bool:
    # What TFDS downloads with: the same proxies, the same certificates.
    import requests  # pyright: ignore[reportMissingImports, reportMissingModuleSource]

    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(requests.RequestException):
            if requests.head(url, timeout=_ANSWER_SECONDS).status_code < 500:  # a proxy answers 50x for a dead host
                answered.set()

    # In a thread, because the timeout does not bound a name look-up.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS)
    return answered.is_set()
