"""Several gcjax processes on this host that work on one command together: `python -m gcjax.launch_local -n 2 train ...`.

The first process's output is shown as it comes; that of the others when a process fails. All children are one process group,
around a guard that kills the group when this process is gone, however it went.
"""

import argparse
import contextlib
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import IO

from gcjax.errors import REQUEUE, GcjaxError

DESCRIPTION = """Start N gcjax processes on this host that work on one command together, each on its share of the cores. The
output of the first is shown; that of the others only when one fails, which ends them all. SIGINT, SIGTERM and SIGUSR1 are
passed on to all. The exit status is that of the process that failed first; 75 when all stopped on a signal and saved."""
EXAMPLES = """examples:
  python -m gcjax.launch_local -n 2 train --config configs/mlp_ablation.py:quick --workdir runs/mlp
  python -m gcjax.launch_local -n 4 train --config configs/llama_wikitext.py:mini --workdir runs/llama-mini"""
GUARD = """import os, signal, sys
for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
sys.stdin.buffer.read()
os.kill(0, signal.SIGKILL)"""
Child = subprocess.Popen[bytes]
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def launch(commands: Sequence[Sequence[str]], grace: float = 10.0) -> int:
    """Run one or more commands side by side until all have ended, and return an exit status: that of the first to fail (128 +
    n: killed by signal n), else `REQUEUE` where any ended with that, else 0.

    When one fails the others are told by SIGTERM, and after `grace` seconds in which none ends, all that is left is killed.
    To be called from the main thread. Raises `GcjaxError` for a command that cannot be started.
    """
    ended = queue.SimpleQueue[tuple[int, int]]()
    children, codes, asked = list[Child](), dict[int, int](), list[int]()
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [child.wait() for child in children])  # after the group was killed
        logs: list[IO[bytes] | None] = [None, *(stack.enter_context(tempfile.TemporaryFile()) for _ in commands[1:])]
        group = stack.enter_context(_process_group())
        for command, cores, log in zip(commands, _cores(len(commands)), logs):
            children.append(_start(command, cores, log, group))

        def pass_on(number: int, _: object) -> None:
            asked.append(number)
            _signal(children, number)

        for number in FORWARDED:
            stack.callback(signal.signal, number, signal.signal(number, pass_on))
        for index, child in enumerate(children):
            threading.Thread(target=lambda i=index, c=child: ended.put((i, c.wait())), daemon=True).start()
        first = quiet = None  # to fail; whether that was the signal's doing
        while len(codes) < len(children):
            try:
                index, code = ended.get(timeout=None if first is None else grace)
            except queue.Empty:
                os.killpg(group, signal.SIGKILL)
                continue
            codes[index] = code
            if first is None and code not in (0, REQUEUE):
                first, quiet = index, code in {status for number in asked for status in (-number, 128 + number)}
                if not quiet:
                    _tell(index, code, logs)
                    _signal(children, signal.SIGTERM)
        if first is None:
            return max(codes.values())
        if not quiet:
            _tell_others(first, logs)
        return codes[first] if codes[first] > 0 else 128 - codes[first]


@contextlib.contextmanager
def _process_group() -> Iterator[int]:
    """A new process group's number; in the end, or when this process is gone, all in it are killed."""
    command = [sys.executable, "-I", "-S", "-c", GUARD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0) as guard:
        try:
            yield guard.pid
        finally:
            with contextlib.suppress(PermissionError):  # which macOS says of a group that was killed before
                os.killpg(guard.pid, signal.SIGKILL)


def _start(command: Sequence[str], cores: set[int], log: IO[bytes] | None, group: int) -> Child:
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # what a killed process said is not lost
    errors = None if log is None else subprocess.STDOUT
    before = os.sched_getaffinity(0) if cores else set()
    try:
        if cores:
            os.sched_setaffinity(0, cores)  # children inherit it; nothing else starts meanwhile
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=errors, env=environment,
                                process_group=group)  # fmt: skip
    except OSError as error:
        raise GcjaxError(f"cannot start {shlex.join(command)}: {error.strerror or error}") from error
    finally:
        if cores:
            os.sched_setaffinity(0, before)


def _cores(count: int) -> list[set[int]]:
    """Each process's share of the cores that this one may use: neighbours; all, where there are too few; empty: any."""
    if not hasattr(os, "sched_getaffinity"):
        return [set()] * count
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        return [set(cores)] * count
    return [set(cores[i * len(cores) // count : (i + 1) * len(cores) // count]) for i in range(count)]


def _signal(children: Sequence[Child], number: int) -> None:
    for child in children:
        child.send_signal(number)  # does nothing where it has ended


def _tell(index: int, code: int, logs: Sequence[IO[bytes] | None]) -> None:
    how = f"ended with status {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
    _say(f"process {index} of {len(logs)} {how}, which ends the others. " + _tail(logs[index], 200))


def _tell_others(first: int, logs: Sequence[IO[bytes] | None]) -> None:
    for index, log in enumerate(logs):
        if index != first and log is not None:
            _say(f"process {index} of {len(logs)}, ended after that. " + _tail(log, 20))


def _tail(log: IO[bytes] | None, most: int) -> str:
    if log is None:
        return "Its output stands above."
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    if not lines:
        return "It said nothing."
    return "\n".join([f"It said{', in the end' if len(lines) > most else ''}:", *lines[-most:]])


def _say(text: str) -> None:
    print(f"launch_local: {text}", file=sys.stderr, flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def commands(count: int, arguments: Sequence[str]) -> list[list[str]]:
    """The command lines of `count` gcjax processes that find each other on a free port of this host."""
    shared = [sys.executable, "-m", "gcjax", *arguments, "--coordinator", f"127.0.0.1:{free_port()}"]
    return [[*shared, "--num-processes", str(count), "--process-id", str(index)] for index in range(count)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m gcjax.launch_local",
        usage="%(prog)s [-h] -n N VERB ...",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-n", "--processes", type=int, required=True, metavar="N", help="how many")
    parser.add_argument("verb", metavar="VERB", help="gcjax's own arguments from here on; see gcjax --help")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.processes < 1:
        raise GcjaxError(f"-n {options.processes} starts nothing; give the number of processes, from 1")
    return launch(commands(options.processes, [options.verb, *options.rest]))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except GcjaxError as error:
        sys.exit(f"launch_local: {error}")
    except KeyboardInterrupt:  # before it could be passed on
        sys.exit(130)
