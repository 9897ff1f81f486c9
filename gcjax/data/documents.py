"""The corpora of language models: a source -> documents, a stream that can be read again from its beginning.

Empty lines around a document are no part of it, and documents without a visible character are left out.
"""

import dataclasses
import glob
import importlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gcjax.data import assets
from gcjax.errors import GcjaxError, nearest, some

Documents = Callable[[], Iterator[str]]

SOURCES = ("wiki-summaries", "wikitext-103", "files")
END = "<|endoftext|>"

_HUB, _REVISION, _FOLDER = "Salesforce/wikitext", "b08601e04326c79dfdd32d625aee71d232d685c3", "wikitext-103-raw-v1"
_HUB_TRAIN = ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet")
_HUB_VALID = ("validation-00000-of-00001.parquet",)
_ARTICLE = re.compile(r" = (?!= ).*(?<! =) = \n?")  # a section's heading has more equals signs
_ROWS = 256  # of a Parquet file at a time


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Where a corpus comes from, the terms it is under, and its documents; without a split of its own, `valid` is None."""

    origin: str
    licence: str
    train: Documents
    valid: Documents | None


def open_corpus(source: str, files: Sequence[str], cache: Path | None, say: Callable[[str], object]) -> Corpus:
    """Finds or fetches the files of a corpus, as `text.load` describes; they are read, and checked, by its streams.

    `say` gets a sentence before a download. Raises `GcjaxError` for an unknown source, files that are not there, files that
    the source does not read, and a download that fails; the streams raise it for files that are empty, malformed or not
    UTF-8.
    """
    if source not in SOURCES:
        raise GcjaxError(f"there is no text source {source!r}; {nearest(source, SOURCES)}")
    if files and source != "files":
        raise GcjaxError(f"data.source {source} reads no files, but data.files names {some(files)}; leave it empty")
    match source:
        case "wiki-summaries":
            (file,), asset = assets.ASSETS[source].files, assets.ASSETS[source]
            path = assets.fetch(source, cache=cache, report=say) / file.name
            return Corpus(asset.requirements, asset.licence, lambda: _clean(_summaries(path)), None)
        case "wikitext-103":
            _import_arrow("wikitext-103")  # before its download
            train, valid = (tuple(_from_hub(name, say) for name in names) for names in (_HUB_TRAIN, _HUB_VALID))
            return Corpus(
                f"{_HUB}@{_REVISION}",
                "CC BY-SA 3.0, GFDL",
                lambda: _clean(_articles(train)),
                lambda: _clean(_articles(valid)),
            )
        case _:
            paths = _find(files)
            names = some(path.name for path in paths)
            return Corpus(names, "that of the files", lambda: _file_documents(paths), None)


def _clean(documents: Iterable[str]) -> Iterator[str]:
    stripped = (document.strip("\r\n") for document in documents)
    return (document for document in stripped if document and not document.isspace())


def _summaries(path: Path) -> Iterator[str]:
    for article in json.loads(path.read_bytes()).values():
        yield f"{article['title']}\n{article['extract']}"


def _articles(paths: Sequence[Path]) -> Iterator[str]:
    lines = []  # an article goes on from one file into the next
    for line in itertools.chain.from_iterable(map(_parquet_rows, paths)):
        if _ARTICLE.fullmatch(line):
            yield "".join(lines)
            lines = []
        lines.append(line)
    yield "".join(lines)


def _from_hub(name: str, say: Callable[[str], object]) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    file = f"{_FOLDER}/{name}"
    say(f"{file}: looking for it on the Hugging Face hub, and in its cache")
    try:
        return Path(huggingface_hub.hf_hub_download(_HUB, file, repo_type="dataset", revision=_REVISION))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise GcjaxError(f"{file} of {_HUB} could not be fetched ({reason}); check the network, or copy the hub's cache "
                         "(HF_HOME) from a machine that has it")  from error  # fmt: skip


def _find(patterns: Sequence[str]) -> tuple[Path, ...]:
    if not patterns:
        raise GcjaxError("data.source files needs the text in data.files: paths or glob patterns of text and Parquet files")
    paths: dict[Path, Path] = {}  # each file once, by its real place
    for pattern in patterns:
        path = Path(pattern).expanduser()
        matches = [path] if path.is_file() else map(Path, sorted(glob.glob(str(path), recursive=True)))
        found = {match.resolve(): match for match in matches if match.is_file()}
        if not found:
            hint = f"for the files of a directory write {pattern}/*" if path.is_dir() else "check data.files"
            raise GcjaxError(f"no file matches {pattern!r}; {hint}")
        for place, match in found.items():
            paths.setdefault(place, match)
    return tuple(paths.values())


def _file_documents(paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        documents = _clean(_parquet_rows(path) if _is_parquet(path) else _text_documents(path))
        first = next(documents, None)
        if first is None:
            raise GcjaxError(f"{path} holds no text; leave it out of data.files")
        yield first
        yield from documents


def _is_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return path.suffix == ".parquet" or stream.read(4) == b"PAR1"
    except OSError as error:
        raise GcjaxError(f"{path} cannot be read: {error}") from error


def _text_documents(path: Path) -> Iterator[str]:
    lines = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:  # line ends stay as they are
            for line in itertools.chain(stream, [END]):
                if line.strip() == END:
                    yield "".join(lines)
                    lines = []
                else:
                    lines.append(line)
    except UnicodeDecodeError as error:
        raise GcjaxError(
            f"{path} is neither Parquet nor text in UTF-8 ({error.reason}); convert it, or leave it out"
        ) from error
    except OSError as error:
        raise GcjaxError(f"{path} cannot be read: {error}") from error


def _parquet_rows(path: Path) -> Iterator[str]:
    arrow = _import_arrow(str(path))
    try:
        with arrow.parquet.ParquetFile(path) as file:
            kinds = {field.name: str(field.type) for field in file.schema_arrow}
            if kinds.get("text", "no column") not in ("string", "large_string", "string_view"):
                shown = some(f"{name} ({kind})" for name, kind in kinds.items())
                raise GcjaxError(f"{path} has no column 'text' of strings, only {shown}; rename the column that holds the text")
            for batch in file.iter_batches(_ROWS, columns=["text"]):
                yield from (row for row in batch.column(0).to_pylist() if row is not None)
    except UnicodeDecodeError as error:
        raise GcjaxError(f"the column 'text' of {path} is not UTF-8 ({error.reason}); write it again") from error
    except (OSError, ValueError, arrow.ArrowException) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise GcjaxError(f"{path} cannot be read as Parquet: {first}") from error


def _import_arrow(what: str) -> Any:
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")  # an extra, and it has no types
    except ImportError as error:
        raise GcjaxError(f"{what} is Parquet, and reading it needs: pip install 'gcjax[text]' ({error})") from error
