"""Locks: who is refused, who takes over, and that no moment is good for two."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gcjax import lock
from gcjax.errors import GcjaxError
from gcjax.lock import locked

# Takes a lock for each line "I N DIRECTORY" (0 0: the whole), says "in" or why not, and holds it until the next line.
HOLD = """
import contextlib, json, socket, sys
from pathlib import Path
from gcjax import errors, lock
host, lock.BEAT = sys.argv[1], float(sys.argv[2])
if host:
    socket.gethostname = lambda: host
for line in sys.stdin:
    i, n, directory = line.split()
    with contextlib.ExitStack() as held:
        try:
            share = (int(i), int(n)) if int(n) else None
            held.enter_context(lock.locked(Path(directory), share, lambda text: print(text, file=sys.stderr)))
            print("in", flush=True)
        except errors.GcjaxError as error:
            print(error, flush=True)
        next(sys.stdin)
        held.close()
        print("out", flush=True)
"""
Share = tuple[int, int] | None


class Peer:
    """Another process, which holds locks when it is told to."""

    def __init__(self, host: str = "", beat: float = 0.02) -> None:
        command = [sys.executable, "-c", HOLD, host, str(beat)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def begin(self, directory: Path, share: Share = None) -> None:
        i, n = share or (0, 0)
        self._tell(f"{i} {n} {directory}")

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def enter(self, directory: Path, share: Share = None) -> str:
        self.begin(directory, share)
        return self.answer()

    def leave(self) -> None:
        self._tell("")
        assert self.answer() == "out"

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    peers = []

    def start(*args: object, **options: object) -> Peer:
        peers.append(Peer(*args, **options))
        return peers[-1]

    yield start
    for each in peers:
        each.close()


@pytest.fixture(scope="module")
def racers() -> Iterator[list[Peer]]:
    peers = [Peer() for _ in range(5)]
    yield peers
    for each in peers:
        each.close()


def dead_lock(directory: Path, name: str = ".lock", **changes: object) -> dict[str, object]:
    """Leave the lock of a process that was killed, and return its content."""
    holder, scratch = Peer(), directory / "scratch"
    try:
        assert holder.enter(scratch) == "in"
    finally:
        holder.close()
    content = json.loads((scratch / ".lock").read_text()) | changes
    shutil.rmtree(scratch)
    (directory / name).write_text(json.dumps(content))
    return content


def assert_refused(directory: Path, share: Share = None, match: str = "is in use by") -> None:
    with pytest.raises(GcjaxError, match=match), locked(directory, share):
        pass


def test_the_second_is_refused_by_name_and_enters_when_the_first_has_left(tmp_path: Path, peer: Callable[..., Peer]) -> None:
    workdir, first = tmp_path / "not" / "there", peer()
    assert first.enter(workdir) == "in"
    assert_refused(workdir, match=f"not/there is in use by process {first.process.pid} on {socket.gethostname()} .* stop it")
    first.leave()
    with locked(workdir):
        assert f"in use by process {os.getpid()}" in first.enter(workdir)
        assert_refused(workdir)
    assert list(workdir.iterdir()) == []


def test_an_exception_goes_through_and_releases(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the body's own"), locked(tmp_path):
        raise OSError("the body's own")
    with locked(tmp_path):
        pass


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ((1, 2), (2, 2), True),
        ((1, 2), (1, 2), False),
        (None, (1, 2), False),
        ((1, 2), None, False),
        ((1, 2), (2, 3), False),
        ((2, 3), (1, 2), False),
        ((1, 1), None, False),
    ],
)
def test_shares_of_one_division_live_together_and_nothing_else_does(
    first: Share, second: Share, together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "PATIENCE", 0.1)
    with locked(tmp_path, first):
        if together:
            with locked(tmp_path, second):
                assert {path.name for path in tmp_path.iterdir()} == {".lock-1-of-2", ".lock-2-of-2"}
        else:
            assert_refused(tmp_path, second)
    with locked(tmp_path, second):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("buried", [True, False], ids=["reaped", "zombie"])
@pytest.mark.parametrize("share", [None, (2, 3)])
def test_a_killed_process_is_succeeded_at_once(share: Share, buried: bool, tmp_path: Path, peer: Callable[..., Peer]) -> None:
    first, said = peer(), []
    assert first.enter(tmp_path, share) == "in"
    first.process.kill()
    if buried:
        first.process.wait()
    else:
        os.waitid(os.P_PID, first.process.pid, os.WEXITED | os.WNOWAIT)
    with locked(tmp_path, None, said.append):
        assert {path.name for path in tmp_path.iterdir()} == {".lock"}
    assert len(said) == 1
    assert f"process {first.process.pid}" in said[0]
    assert "taking over" in said[0]


def test_another_process_of_the_same_number_is_no_holder(tmp_path: Path) -> None:
    start = lock._start(os.getpid())
    assert start is not None
    dead_lock(tmp_path, pid=os.getpid(), start=start)
    assert_refused(tmp_path)  # that is this process
    dead_lock(tmp_path, pid=os.getpid(), start=start - 1)
    with locked(tmp_path):
        pass


def test_a_stopped_process_keeps_its_lock(tmp_path: Path, peer: Callable[..., Peer]) -> None:
    first = peer()
    first.enter(tmp_path)
    first.process.send_signal(signal.SIGSTOP)
    assert_refused(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"host": "node7"}, {"machine": "another boot"}, {"machine": ""}],
    ids=["another host", "a host of the same name, or rebooted", "a host without /proc"],
)
def test_a_lock_of_another_machine_is_stale_once_it_was_seen_not_to_change(
    changes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.03)
    said: list[str] = []
    content = dead_lock(tmp_path, **changes)
    begun = time.monotonic()
    with locked(tmp_path, None, said.append):
        assert time.monotonic() - begun >= lock.BEAT * lock.WATCH
    assert ["watching" in text for text in said] == [True, False]
    assert all(f"process {content['pid']} on {content['host']}" in text for text in said)


def test_a_lock_of_another_machine_that_changes_is_respected(
    tmp_path: Path, peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.1)
    far = peer(host="node7")
    assert far.enter(tmp_path) == "in"
    assert_refused(tmp_path, match=f"in use by process {far.process.pid} on node7")
    assert_refused(tmp_path, (1, 2), match="node7")
    far.process.send_signal(signal.SIGSTOP)  # a machine that stopped
    said: list[str] = []
    with locked(tmp_path, None, said.append):
        far.process.send_signal(signal.SIGCONT)
        time.sleep(0.2)  # back, it must leave its successor's lock alone
        far.leave()
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_a_lock_released_while_it_is_watched_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.05)
    dead_lock(tmp_path, host="node7")
    timer = threading.Timer(0.1, (tmp_path / ".lock").unlink)
    timer.start()
    with locked(tmp_path):
        pass
    timer.join()


def test_a_held_lock_beats_and_keeps_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.01)
    with locked(tmp_path):
        seen = set()
        for _ in range(20):
            seen.add((tmp_path / ".lock").read_text())
            time.sleep(0.01)
    assert len(seen) > 3
    assert len({len(text) for text in seen}) == 1


@pytest.mark.parametrize("replaced", [True, False])
def test_a_lock_that_was_lost_is_left_alone_and_the_loss_is_said(
    replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.01)
    said: list[str] = []
    with locked(tmp_path, None, said.append):
        (tmp_path / ".lock").unlink()
        if replaced:
            (tmp_path / ".lock").write_text("somebody else's")
        time.sleep(0.2)
    assert len(said) == 1
    assert "removed or taken over" in said[0]
    assert [path.read_text() for path in tmp_path.iterdir()] == ["somebody else's"] * replaced


@pytest.mark.parametrize("content", ["", '{"host": "x"', "[]", "\0" * 200])
def test_a_damaged_lock_is_watched_and_taken_over(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.01)
    (tmp_path / ".lock").write_text(content)
    said: list[str] = []
    with locked(tmp_path, None, said.append):
        pass
    assert len(said) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_process_killed_while_it_took_over_is_no_obstacle(tmp_path: Path) -> None:
    dead = dead_lock(tmp_path)
    guard = f".lock.{dead['token']}"
    second = dead_lock(tmp_path, guard)
    dead_lock(tmp_path, f"{guard}.{second['token']}")
    with locked(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {".lock"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dead", [False, True], ids=["free", "left by a dead process"])
def test_of_many_at_once_exactly_one_enters(dead: bool, tmp_path: Path, racers: list[Peer]) -> None:
    left = json.dumps(dead_lock(tmp_path))
    for _ in range(25):
        (tmp_path / ".lock").unlink(missing_ok=True)
        if dead:
            (tmp_path / ".lock").write_text(left)
        for racer in racers:
            racer.begin(tmp_path)
        answers = [racer.answer() for racer in racers]
        assert answers.count("in") == 1, answers
        for racer in racers:
            racer.leave()
        assert list(tmp_path.iterdir()) == []


def test_of_whole_and_shares_at_once_one_kind_enters(tmp_path: Path, racers: list[Peer]) -> None:
    shares: list[Share] = [None, (1, 2), (2, 2), (1, 3), (2, 3)]
    for _ in range(6):
        for racer, share in random.sample(list(zip(racers, shares)), len(shares)):
            racer.begin(tmp_path, share)
        answers = [racer.answer() for racer in racers]
        inside = {share and share[1] for share, answer in zip(shares, answers) if answer == "in"}
        assert len(inside) == 1, answers
        for racer in racers:
            racer.leave()


CYCLE = """
import sys
from pathlib import Path
from gcjax import lock
lock.BEAT = 0.001
print(flush=True)
while True:
    with lock.locked(Path(sys.argv[1])):
        pass
"""


def test_killed_at_any_moment_it_is_succeeded_without_a_watch(tmp_path: Path) -> None:
    for _ in range(8):
        command = [sys.executable, "-c", CYCLE, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(random.uniform(0, 0.02))
            process.kill()
        said: list[str] = []
        with locked(tmp_path, None, said.append):
            assert not any("watching" in text for text in said)


def test_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    dead_lock(tmp_path)
    with locked(tmp_path):
        assert_refused(tmp_path)
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


FULL = """
import resource, sys
from pathlib import Path
from gcjax import errors, lock
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    with lock.locked(Path(sys.argv[1])):
        pass
except errors.GcjaxError as error:
    print(error)
"""


def test_a_disk_that_refuses_is_one_clear_error_and_no_litter(tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True)
    assert found.stdout.startswith(f"cannot write the lock {tmp_path}/.lock (File too large); make room")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert_refused(tmp_path / "file", match="cannot write the lock .* take a --workdir that can be written")
