"""Text for language models: documents -> uint16 tokens of a byte-level BPE, in a cache that is written once.

A corpus is read anew for each pass over it (to split, to train the tokenizer, to write either split), so that no more
than a few of its documents are in memory at a time.
"""

import dataclasses
import hashlib
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import tokenizers
from jaxtyping import Int64, UInt8, UInt16
from tokenizers import decoders, models, pre_tokenizers, trainers

from gcjax.data import assets
from gcjax.data.documents import END, Corpus, Documents, open_corpus
from gcjax.errors import GcjaxError

END_ID = 0
SMALLEST, LARGEST = 257, 65_536  # entries: END and the 256 bytes; what uint16 counts

_FORMAT = 1  # of what is cached: another number for other tokens of the same text
_TRAIN, _VALID, _TOKENIZER, _SUMS = "train.npy", "valid.npy", "tokenizer.json", "SHA256SUMS"
_PIECE, _BATCH = 1 << 16, 1 << 20  # characters encoded as one string; at a time
_SCRATCH = ".prepare-"
_TELL_EVERY = 10.0  # seconds


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """A corpus in tokens: every document of a split, in the corpus's order, each followed by END_ID; mapped, read-only.

    `train_bytes` and `valid_bytes` count the documents' UTF-8 bytes, END left out, for a loss in bits per byte.
    `provenance` holds strings and numbers only: name, origin (the package, repository or files behind it), licence,
    vocabulary, the documents, bytes and tokens of each split, sha256 of the text (its order and its split count), and
    tokenizer_sha256.
    """

    train_T: UInt16[np.ndarray, "T"]
    valid_T: UInt16[np.ndarray, "U"]
    tokenizer_file: Path
    vocabulary: int
    train_bytes: int
    valid_bytes: int
    provenance: dict[str, str | int | float]


@dataclasses.dataclass(frozen=True)
class Split:
    """Some documents of a corpus: how many, their UTF-8 bytes, and the sha256 of them all in order."""

    documents: Documents
    count: int
    bytes: int
    sha256: str


def load(
    source: str,
    files: Sequence[str],
    vocabulary: int,
    valid_fraction: float,
    *,
    cache: Path | None = None,
    report: Callable[[str], object] | None = None,
) -> Text:
    """Loads a corpus in the tokens of a BPE that is trained on its training split; the first time, prepares them.

    - `wiki-summaries`: the asset of that name, an article's title and summary a document.
    - `wikitext-103`: the raw variant from the Hugging Face hub, an article a document. It has a validation split, which
      is taken as it is; `valid_fraction` has no part in it.
    - `files`: the text (UTF-8) and Parquet files that `files`, paths and glob patterns, name. A document is a text file,
      the part of one between lines that read <|endoftext|>, or a row of a Parquet file's column `text`. Such a mark
      inside a document is text as any other.

    The validation split of the first and the last is `valid_fraction` of the distinct documents, at least one: those whose
    sha256 are the smallest, whatever their order, so that no document is in both splits.

    `vocabulary` is the number of entries, the byte values and END among them; where no pair of tokens occurs twice any
    more, the tokenizer is smaller. A document longer than 65,536 characters is encoded in pieces of that length, which
    costs a token or so a piece. `cache` stands in for `assets.cache_directory()`; what is cached there is verified by
    sha256 at every use, and prepared again where it is damaged. `report` is called with a sentence before what takes long.

    Raises `GcjaxError` for an unknown source, files given with another source or not given, a vocabulary outside
    257..65,536, a `valid_fraction` outside (0, 1), files that are missing, empty, malformed or not UTF-8, fewer than two
    distinct documents, a download that fails, and a cache that cannot be written.
    """
    if not SMALLEST <= vocabulary <= LARGEST:
        raise GcjaxError(
            f"data.vocabulary is {vocabulary}; it must be within {SMALLEST} (the bytes and {END}) and {LARGEST} (uint16)"
        )
    root, say = cache or assets.cache_directory(), report or (lambda _: None)
    corpus = open_corpus(source, files, cache, say)
    say(f"{source}: reading its documents")
    train, valid = splits(source, corpus, valid_fraction)
    contents = json.dumps([_FORMAT, vocabulary, train.sha256, valid.sha256]).encode()
    folder = root / "text" / f"{source}-{vocabulary}-{hashlib.sha256(contents).hexdigest()[:16]}"
    try:
        if not _intact(folder):
            say(f"{source}: its tokens are {'damaged' if folder.exists() else 'not'} in the cache: preparing them")
            _prepare(folder, train, valid, vocabulary, say)
        train_T, valid_T = (np.load(folder / name, mmap_mode="r") for name in (_TRAIN, _VALID))
        tokenizer = tokenizers.Tokenizer.from_str((folder / _TOKENIZER).read_text(encoding="utf-8"))
        tokenizer_sha256 = assets.sha256(folder / _TOKENIZER)
    except OSError as error:
        raise GcjaxError(f"tokens of {source} cannot be kept in {root} ({error}); GCJAX_CACHE sets another place") from error
    size = tokenizer.get_vocab_size()
    provenance = {
        "name": source,
        "origin": corpus.origin,
        "licence": corpus.licence,
        "vocabulary": size,
        "train_documents": train.count,
        "valid_documents": valid.count,
        "train_bytes": train.bytes,
        "valid_bytes": valid.bytes,
        "train_tokens": len(train_T),
        "valid_tokens": len(valid_T),
        "sha256": hashlib.sha256((train.sha256 + valid.sha256).encode()).hexdigest(),
        "tokenizer_sha256": tokenizer_sha256,
    }
    return Text(train_T, valid_T, folder / _TOKENIZER, size, train.bytes, valid.bytes, provenance)


def check_window(text: Text, length: int) -> None:
    """Raises `GcjaxError` where a split has no window of `length` tokens and the one after them."""
    for split, tokens in (("training", text.train_T), ("validation", text.valid_T)):
        if len(tokens) < length + 1:
            raise GcjaxError(
                f"a window of {length} tokens needs {length + 1}, but the {split} split of {text.provenance['name']} has "
                f"{len(tokens)}; choose a shorter window or more text"
            )


def splits(source: str, corpus: Corpus, valid_fraction: float) -> tuple[Split, Split]:
    """The corpus's own splits, else all documents but `valid_fraction` of the distinct ones, chosen by content, and these.

    Raises `GcjaxError` as `load` does.
    """
    if corpus.valid is not None:
        return _split(corpus.train, *_scan(corpus.train())), _split(corpus.valid, *_scan(corpus.valid()))
    if not 0 < valid_fraction < 1:
        raise GcjaxError(f"data.valid_fraction is {valid_fraction}; it must be between 0 and 1, both left out")
    digests, sizes = _scan(corpus.train())
    starts = digests.view(">u8")[:, 0].astype(np.uint64)
    distinct = np.unique(starts)
    if len(distinct) < 2:
        raise GcjaxError(
            f"{source} ({corpus.origin}) holds {len(distinct)} distinct document(s), too few for a training and a validation "
            f"split; give more files, or part the text by lines that read {END}"
        )
    most = min(max(round(valid_fraction * len(distinct)), 1), len(distinct) - 1)
    held_out = starts < distinct[most]
    train, valid = (
        _split(lambda chosen=chosen: itertools.compress(corpus.train(), chosen.tolist()), digests[chosen], sizes[chosen])
        for chosen in (~held_out, held_out)
    )
    return train, valid


def _split(documents: Documents, digests: UInt8[np.ndarray, "N 32"], sizes: Int64[np.ndarray, "N"]) -> Split:
    return Split(documents, len(sizes), int(sizes.sum()), hashlib.sha256(digests.tobytes()).hexdigest())


def _scan(documents: Iterable[str]) -> tuple[UInt8[np.ndarray, "N 32"], Int64[np.ndarray, "N"]]:
    """The sha256 of each document and its size in bytes."""
    digests, sizes = bytearray(), []
    for content in map(str.encode, documents):
        digests += hashlib.sha256(content).digest()
        sizes.append(len(content))
    return np.frombuffer(bytes(digests), np.uint8).reshape(-1, 32), np.array(sizes, np.int64)


def _prepare(folder: Path, train: Split, valid: Split, vocabulary: int, say: Callable[[str], object]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    assets.remove_dead_scratch(folder.parent, _SCRATCH)
    # Inside the cache, hence on its file system. File by file, since two processes write the same: neither takes away what
    # the other has opened. The sums come last: without them, nothing is trusted.
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder.parent) as place:
        scratch = Path(place)
        say(f"training a tokenizer of {vocabulary} entries on {train.bytes / 1e6:.1f} MB")
        tokenizer = _train_tokenizer(train.documents(), vocabulary)
        tokenizer.save(str(scratch / _TOKENIZER))
        for name, split in ((_TRAIN, train), (_VALID, valid)):
            _write_tokens(scratch / name, split, tokenizer, say)
        (scratch / _SUMS).write_text(_sums(scratch))
        folder.mkdir(exist_ok=True)
        for name in (_TRAIN, _VALID, _TOKENIZER, _SUMS):
            (scratch / name).replace(folder / name)


def _intact(folder: Path) -> bool:
    try:
        return (folder / _SUMS).read_bytes() == _sums(folder).encode()
    except FileNotFoundError:
        return False


def _sums(folder: Path) -> str:
    """As `sha256sum -c` takes them."""
    return "".join(f"{assets.sha256(folder / name)}  {name}\n" for name in (_TRAIN, _VALID, _TOKENIZER))


def _train_tokenizer(documents: Iterable[str], vocabulary: int) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[END],  # the first, hence END_ID
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(([piece for piece, _ in batch] for batch in _batches(documents)), trainer)
    return tokenizer


def _write_tokens(path: Path, split: Split, tokenizer: tokenizers.Tokenizer, say: Callable[[str], object]) -> None:
    tokenizer.encode_special_tokens = True  # END inside a document is text
    length, done, told = 0, 0, time.monotonic()
    with path.open("wb") as file:
        _write_header(file, 0)
        for batch in _batches(_unchanged(split)):
            encodings = tokenizer.encode_batch_fast([piece for piece, _ in batch], add_special_tokens=False)
            ids = ([*encoding.ids, END_ID] if ends else encoding.ids for encoding, (_, ends) in zip(encodings, batch))
            tokens_T = np.fromiter(itertools.chain.from_iterable(ids), "<u2")
            file.write(tokens_T.tobytes())
            length, done = length + len(tokens_T), done + sum(ends for _, ends in batch)
            if time.monotonic() - told > _TELL_EVERY:
                told = time.monotonic()
                say(f"{path.stem}: {done} of {split.count} documents in tokens")
        file.seek(0)
        _write_header(file, length)


def _write_header(file: BinaryIO, length: int) -> None:
    # NumPy pads it, so that the first axis may grow within it.
    np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": (length,)})


def _unchanged(split: Split) -> Iterator[str]:
    """The documents of a split; raises `GcjaxError` after the last where they are not those that its sha256 names."""
    digest = hashlib.sha256()
    for document in split.documents():
        digest.update(hashlib.sha256(document.encode()).digest())
        yield document
    if digest.hexdigest() != split.sha256:
        raise GcjaxError("the files of the corpus changed while they were read; start again when they are whole")


def _batches(documents: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Pieces of documents, each with whether it is its document's last."""
    batch, size = [], 0
    for document in documents:
        for start in range(0, len(document), _PIECE):
            batch.append((document[start : start + _PIECE], start + _PIECE >= len(document)))
            size += len(batch[-1][0])
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
