"""A workdir belongs to one record; what cannot be used is refused in a sentence, and nothing of anyone's is lost."""

import json
import os

import pytest

from gcjax.errors import GcjaxError
from gcjax.workdir import open_workdir

RECORD = {"config": {"seeds": 3, "executor": {"workers": 1}}, "data": "x"}


def _open(path, record=RECORD, overwrite=False):
    return open_workdir(path, record, overwrite, ("packs",), ("executor.workers",))


def test_it_is_made_and_reopened_by_the_same_record(tmp_path):
    assert _open(tmp_path / "a" / "w") == _open(tmp_path / "a" / "w")
    assert json.loads((tmp_path / "a" / "w" / "record.json").read_text()) == RECORD


def test_another_record_is_refused_with_what_differs_but_for_free_fields(tmp_path):
    _open(tmp_path)
    free = {"config": {"seeds": 3, "executor": {"workers": 2}}, "data": "x"}
    _open(tmp_path, free)
    other = {"config": {"seeds": 4, "executor": {"workers": 2}}, "data": "y"}
    with pytest.raises(GcjaxError, match=r"belongs to something else \(config\.seeds: 3 -> 4; data: x -> y\)"):
        _open(tmp_path, other)
    assert json.loads((tmp_path / "record.json").read_text()) == free


def test_overwriting_deletes_what_is_ours_and_nothing_else(tmp_path):
    _open(tmp_path)
    (tmp_path / "packs").mkdir()
    (tmp_path / "packs" / "p").write_text("")
    (tmp_path / "results.nc").write_text("")
    (tmp_path / "notes.txt").write_text("mine")
    _open(tmp_path, RECORD | {"data": "y"}, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "record.json"]


@pytest.mark.parametrize("record", [RECORD, RECORD | {"data": "y"}])
def test_what_was_overwritten_is_reopened(tmp_path, record):
    _open(tmp_path)
    (tmp_path / "results.nc").write_text("")
    _open(tmp_path, record, overwrite=True)
    (tmp_path / "results.nc").write_text("")
    assert _open(tmp_path, record) == tmp_path
    assert (tmp_path / "results.nc").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_of_others_are_never_touched(tmp_path, overwrite):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(GcjaxError, match="holds files that gcjax did not write"):
        _open(tmp_path, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_file_in_its_place_is_named(tmp_path, where):
    (tmp_path / "file").write_text("")
    with pytest.raises(GcjaxError, match=rf"the workdir {tmp_path / where} cannot be used: "):
        _open(tmp_path / where)


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(GcjaxError, match=rf"the workdir {tmp_path} cannot be used: "):
        _open(tmp_path)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read anywhere")
@pytest.mark.parametrize("mode", [0o000, 0o555])
def test_a_directory_without_permission_is_named(tmp_path, mode):
    closed = tmp_path / "w"
    closed.mkdir()
    closed.chmod(mode)
    with pytest.raises(GcjaxError, match=r"(cannot be used|cannot write)"):
        _open(closed)
    closed.chmod(0o755)
