"""One command at a time works on a workdir, or on a share of it; the lock of one that died is taken over.

A lock is a file that names the process that holds it: `.lock`, or `.lock-I-of-N` for a share. Whether a process of this
machine still runs, the kernel tells. Nobody can look at a process of another machine, so each holder keeps changing its
file, and one that is seen not to change for a while is taken for dead; no clocks are compared.

filelock's SoftFileLease is near to this, but knows no shares, waits for good for a process that was killed between creating
and filling its file, and takes two machines of one name (localhost, containers) for one.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import secrets
import shlex
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from gcjax.errors import GcjaxError

Say = Callable[[str], object]
BEAT = 5.0  # seconds from one change of a held lock to the next
WATCH = 6  # so many beats without a change: its process is gone
PATIENCE = 1.0  # seconds in which the loser of two that began at the same moment will have left
NAME = re.compile(r"\.lock(?:-(\d+)-of-(\d+))?")


class _Holder(NamedTuple):
    """The content of a lock."""

    host: str
    machine: str  # where `pid` and `start` mean something (`_machine`)
    pid: int
    start: int  # of the process, in clock ticks since the machine's: process numbers are used again
    command: str
    token: str  # of this lock alone
    beats: str  # of one width, so that a change needs no room on a full disk

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} ({self.command})"


@contextlib.contextmanager
def locked(directory: Path, share: tuple[int, int] | None = None, say: Say = print) -> Iterator[None]:
    """Hold `directory`, which is made if need be, or the share (i, n) of the work in it, i from 1.

    The whole excludes all else; shares exclude the whole, the same share, and those of another n. `say` is told of a lock
    that is watched (for `BEAT * WATCH` seconds) or taken over, and of the loss of this one. Raises `GcjaxError` where another
    process is at work there, or the disk refuses the lock.
    """
    i, n = share or (0, 0)
    path = directory / (f".lock-{i}-of-{n}" if share else ".lock")
    command, token = textwrap.shorten(shlex.join(sys.argv), 160, placeholder=" ..."), secrets.token_hex(8)
    own = _Holder(socket.gethostname(), _machine(), os.getpid(), _start(os.getpid()) or 0, command, token, _count(0))
    left = threading.Event()
    heart = threading.Thread(target=_beat, args=(path, own, left, say), daemon=True)
    try:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            while not _create(path, own):
                if (holder := _settle(path, own, say)) is not None:
                    raise _refusal(directory, holder)
            heart.start()
            # Of two that create their locks and then look, one at least sees the other. The whole, and a smaller n, leave at
            # once; the others wait for them to leave. So no two enter, and one does.
            for other, of in _others(directory, n):
                patient_until = time.monotonic() + (PATIENCE if n > of else 0)
                while (holder := _settle(other, own, say)) is not None:
                    if time.monotonic() >= patient_until:
                        raise _refusal(directory, holder)
                    time.sleep(PATIENCE / 50)
        except OSError as error:
            text = f"cannot write the lock {path} ({error.strerror or error})"
            raise GcjaxError(f"{text}; make room there, or take a --workdir that can be written") from error
        yield
    finally:
        left.set()
        if heart.is_alive():
            heart.join(BEAT)
        with contextlib.suppress(OSError):
            if _holds(_read(path), own):
                path.unlink()


def _refusal(directory: Path, holder: _Holder) -> GcjaxError:
    return GcjaxError(f"{directory} is in use by {holder}; wait for it or stop it, then run this command again")


def _others(directory: Path, n: int) -> list[tuple[Path, int]]:
    """The locks that exclude one of n shares (0: the whole), other than its own; each with its own n."""
    found = ((path, NAME.fullmatch(path.name)) for path in directory.iterdir())
    locks = ((path, int(name[2] or 0)) for path, name in found if name)
    return [(path, of) for path, of in locks if of != n]


def _settle(path: Path, own: _Holder, say: Say) -> _Holder | None:
    """Who holds the lock `path`. None: nobody; or a process that is gone, and then the lock is removed."""
    while (holder := _read(path)) is not None:
        running = _running(holder)
        if running is None:
            say(f"{path} is held by {holder}; watching for up to {BEAT * WATCH:.0f} s whether that still runs")
            running = _changes(path, holder)
        if running:
            return _read(path)
        if _remove(path, holder, own):
            say(f"{path} was left by {holder}, which is gone; taking over")
    return None


def _changes(path: Path, holder: _Holder) -> bool:
    for _ in range(WATCH):
        time.sleep(BEAT)
        if _read(path) != holder:
            return True
    return False


def _remove(path: Path, dead: _Holder, own: _Holder) -> bool:
    """Remove the lock of a process that is gone, if it is still there, and whether this process did that.

    A process that was slow to find out would remove its successor's lock. So only who holds the guard, a lock that is named
    after the dead one's token, looks whose the lock is and removes it.
    """
    guard = path.with_name(f"{path.name}.{dead.token}")
    if not _create(guard, own):
        if _settle(guard, own, lambda _: None) is not None:
            time.sleep(PATIENCE / 50)
        return False
    try:
        if found := _holds(_read(path), dead):
            path.unlink()
        return found
    finally:
        guard.unlink(missing_ok=True)


def _create(path: Path, own: _Holder) -> bool:
    """Write a lock, whole or not at all; False where there is one. Raises OSError."""
    scratch = path.with_name(f"{path.name}.{own.token}.new")
    try:
        scratch.write_bytes(_encode(own))
        try:
            os.link(scratch, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            with open(path, "xb", buffering=0) as file:
                try:
                    file.write(_encode(own))
                except OSError:
                    path.unlink()
                    raise
    except FileExistsError:
        return _holds(_read(path), own)  # a file server that was asked twice denies what it has done
    finally:
        scratch.unlink(missing_ok=True)
    return True


def _beat(path: Path, own: _Holder, left: threading.Event, say: Say) -> None:
    """Change the held lock every `BEAT` seconds, until `left` is set or the lock is another's."""
    for count in itertools.count(1):
        if left.wait(BEAT):
            return
        try:
            with open(path, "r+b", buffering=0) as file:  # in place: what was put here meanwhile is not overwritten
                held = _holds(_decode(file.read()), own)
                if held:
                    file.seek(0)
                    file.write(_encode(own._replace(beats=_count(count))))
        except FileNotFoundError:
            held = False
        except OSError:
            continue  # a file server out of reach, which may come back
        if not held:
            say(f"{path} was removed or taken over; make sure that no other command works on {path.parent}")
            return


def _count(beats: int) -> str:
    return f"{beats:012}"


def _encode(holder: _Holder) -> bytes:
    return json.dumps(holder._asdict()).encode()


def _decode(content: bytes) -> _Holder:
    try:
        return _Holder(**json.loads(content))
    except (TypeError, ValueError):  # damaged; or half-written, where there are no links
        token = hashlib.sha256(content).hexdigest()[:16]
        return _Holder("an unknown host", "", 0, 0, "unreadable", token, "")


def _read(path: Path) -> _Holder | None:
    try:
        return _decode(path.read_bytes())  # opened anew: NFS looks at the server then, and at its cache otherwise
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise


def _holds(found: _Holder | None, holder: _Holder) -> bool:
    return found is not None and found.token == holder.token


def _machine() -> str:
    """This boot of this machine and its space of process numbers, as a container has one; "" where that cannot be told."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks; None where there is no such process that still runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in b"ZX" else int(fields[19])  # of a killed process, a zombie may stay


def _running(holder: _Holder) -> bool | None:
    """Whether the process of a lock still runs; None where that cannot be seen from here."""
    if not holder.machine or (holder.host, holder.machine) != (socket.gethostname(), _machine()):
        return None
    if (start := _start(holder.pid)) is not None:
        return start == holder.start
    try:
        os.kill(holder.pid, 0)
    except PermissionError:  # another user's, which /proc may hide
        return None
    except ProcessLookupError:
        pass
    return False
