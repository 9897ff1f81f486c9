"""What goes wrong on real machines, done to real runs of the command line: each ends as one that nothing was done to.

GCJAX_KILLS=20 python -m pytest tests/test_faults.py     kills each kind of run twenty times instead of three
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import xarray as xr
from toys import LLAMA, MLP, TOY_LLAMA, TOY_MLP, write_checkpoint, write_prose

from gcjax import config as configs
from gcjax import results
from gcjax.errors import REQUEUE, GcjaxError
from gcjax.pretrained.measure import measure
from gcjax.pretrained.options import Options
from gcjax.training import study

KILLS = int(os.environ.get("GCJAX_KILLS", "3"))
LONGEST = 300  # seconds that any of these commands may take on a busy machine


SIGNALS = {"sweep": signal.SIGTERM, "measurement": signal.SIGUSR1}


class Kind(NamedTuple):
    """A command but for its workdir, and what comes of it undisturbed."""

    name: str
    arguments: tuple[str, ...]
    finish: Callable[[Path], xr.Dataset | None]  # the same work on a workdir, in this process and without the report
    workdir: Path
    undisturbed: xr.Dataset
    seconds: float  # which that took, compilation included
    bytes: int  # what it took on disk, but for the report
    partial: str  # a pattern for what it leaves in its workdir on the way


def _start(arguments: tuple[str, ...], workdir: Path) -> subprocess.Popen[str]:
    verb, *rest = arguments
    command = [sys.executable, "-m", "gcjax", verb, *rest, "--workdir", str(workdir), "--formats="]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = process.communicate(timeout=LONGEST)
    return process.returncode, said


def _until(done: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LONGEST
    while not done():
        assert process.poll() is None, f"it ended before it could be disturbed: {process.communicate()[1]}"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def of(*kinds: str) -> pytest.MarkDecorator:
    """The test does the same to each kind of run, but a start takes long: it is done to `kinds` alone."""
    return pytest.mark.parametrize("kind", kinds, indirect=True)


@pytest.fixture(scope="module", params=["sweep", "transformer", "measurement"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    folder, workdir = tmp_path_factory.mktemp(request.param), tmp_path_factory.mktemp("undisturbed") / "w"
    if request.param == "measurement":
        write_checkpoint(folder / "model", layers=6)
        arguments, partial = ("measure", str(folder / "model"), "--rank", "4", "--draws", "2"), "parts/*.npz"

        def finish(workdir: Path) -> xr.Dataset | None:
            return measure(arguments[1], workdir, Options(rank=4, draws=2))
    else:
        config, toy = (MLP, TOY_MLP) if request.param == "sweep" else (LLAMA, (*TOY_LLAMA, f"data.files={write_prose(folder)}"))
        overrides, partial = (*toy, "checkpoint.seconds=0.0", "executor.workers=1"), "packs/*/running/*[0-9]"
        arguments = ("train", "--config", config, *(f"--config.{override}" for override in overrides))

        def finish(workdir: Path) -> xr.Dataset | None:
            return study.train(configs.load(config, overrides), workdir)

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "transformer":
            patch.setenv("GCJAX_CACHE", str(folder / "cache"))
        begun = time.monotonic()
        undisturbed = finish(workdir)
        seconds = time.monotonic() - begun
        assert undisturbed is not None
        written = [path for name in ("packs", "parts") for path in (workdir / name).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in written)
        yield Kind(request.param, arguments, finish, workdir, undisturbed, seconds, size, partial)


def test_killed_at_random_moments_it_resumes_to_the_same_bits(kind: Kind, tmp_path: Path) -> None:
    dice, killed, workdir, whole, longest = random.Random(0), 0, tmp_path / "w0", 0, kind.seconds
    while killed < KILLS:
        process, begun = _start(kind.arguments, workdir), time.monotonic()
        try:
            process.communicate(timeout=dice.uniform(0.3, 1.0) * longest)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            killed += 1
        else:  # done before the kill: the next one begins anew
            assert process.returncode == 0
            xr.testing.assert_equal(results.load(workdir / "results.nc"), kind.undisturbed)
            whole += 1
            workdir, longest = tmp_path / f"w{whole}", time.monotonic() - begun
    xr.testing.assert_equal(kind.finish(workdir), kind.undisturbed)
    assert not list(workdir.rglob("*.tmp*")) + list(workdir.rglob(".lock*")), "a killed process's scraps are left"


@of(*SIGNALS)
def test_on_a_signal_it_saves_says_so_and_asks_to_be_started_again(kind: Kind, tmp_path: Path) -> None:
    process = _start(kind.arguments, tmp_path / "w")
    _until(lambda: list((tmp_path / "w").glob(kind.partial)), process)
    process.send_signal(SIGNALS[kind.name])
    code, said = _end(process)
    assert code == REQUEUE, said
    assert "stopped on a signal" in said
    assert "the same command resumes" in said
    assert "Traceback" not in said
    xr.testing.assert_equal(kind.finish(tmp_path / "w"), kind.undisturbed)


@of("measurement")
def test_of_two_commands_on_one_workdir_the_second_is_refused(kind: Kind, tmp_path: Path) -> None:
    process = _start(kind.arguments, tmp_path / "w")
    _until(lambda: list((tmp_path / "w").glob(kind.partial)), process)
    process.send_signal(signal.SIGSTOP)  # it shall not end meanwhile
    try:
        code, said = _end(_start(kind.arguments, tmp_path / "w"))
    finally:
        process.send_signal(signal.SIGCONT)
    assert code == 1
    assert f"is in use by process {process.pid} on" in said
    code, said = _end(process)
    assert code == 0, said
    xr.testing.assert_equal(results.load(tmp_path / "w" / "results.nc"), kind.undisturbed)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(size: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("a file system of its own takes root")
        return disk

    yield mount
    subprocess.run(["umount", str(disk)], check=False, capture_output=True)


@of("sweep", "measurement")
def test_a_full_disk_stops_it_cleanly_and_with_room_it_goes_on(kind: Kind, tmp_path: Path, small_disk) -> None:
    """With a third of the room that it needs; then the disk grows."""
    disk = small_disk(kind.bytes // 3)
    code, said = _end(_start(kind.arguments, disk / "w"))
    assert code == 1, said
    last = said.strip().splitlines()[-1]  # before it, orbax's own threads may have complained
    assert last.startswith("gcjax: cannot write "), said
    assert "then run the same command again" in last or last.endswith("run the same command again")
    subprocess.run(["mount", "-o", f"remount,size={1 << 28}", str(disk)], check=True)
    xr.testing.assert_equal(kind.finish(disk / "w"), kind.undisturbed)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "zeroed": lambda content: bytes(len(content)),
}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, kind: Kind) -> Path:
    """A workdir with two checkpoints of a pack."""
    workdir = tmp_path_factory.mktemp("interrupted") / "w"
    process = _start(kind.arguments, workdir)
    _until(lambda: len(list(workdir.glob(kind.partial))) > 1, process)
    process.send_signal(signal.SIGTERM)
    assert _end(process)[0] == REQUEUE
    return workdir


@of("sweep")
@pytest.mark.parametrize("how", DAMAGE)
def test_of_a_damaged_checkpoint_the_one_before_is_taken(
    kind: Kind, interrupted: Path, tmp_path: Path, how: str, capfd
) -> None:
    workdir = shutil.copytree(interrupted, tmp_path / "w")
    newest = max(workdir.glob(kind.partial), key=lambda path: int(path.name))
    for path in newest.rglob("*"):
        if path.is_file():
            path.write_bytes(DAMAGE[how](path.read_bytes()))
    xr.testing.assert_equal(kind.finish(workdir), kind.undisturbed)
    assert f"running/{newest.name} is damaged" in capfd.readouterr().err


@of("measurement")
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_part_of_a_measurement_is_named_with_what_to_do(kind: Kind, tmp_path: Path, how: str) -> None:
    workdir = shutil.copytree(kind.workdir, tmp_path / "w")
    (workdir / "results.nc").unlink()
    part = sorted((workdir / "parts").iterdir())[3]
    part.write_bytes(DAMAGE[how](part.read_bytes()))
    with pytest.raises(GcjaxError, match=f"{part.name} is damaged .*; delete it and run the same command again"):
        kind.finish(workdir)
    part.unlink()
    xr.testing.assert_equal(kind.finish(workdir), kind.undisturbed)
