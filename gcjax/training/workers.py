"""A study's packs on the cores of a CPU: one worker process a core, each with one single-threaded device.

XLA's CPU backend gains little from spreading one small run over cores. Several devices in one process scale well in the
matrix products, but they share one thread pool, in which two eigensolvers at once wait for each other (slowly, or for
good). A process a core has none of that.

    python -m gcjax.training.workers WORKDIR     (started by `train`; packs on standard input, progress on standard output)
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from gcjax.errors import GcjaxError, Stopped
from gcjax.training import executor, problem, sweep
from gcjax.training.executor import Report
from gcjax.training.sweep import Pack

# One thread a worker: a program's own loops, its intra-op pool, and LAPACK under the eigensolvers.
SINGLE_THREADED = {"NPROC": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}

STOPPING = (signal.SIGTERM, signal.SIGUSR1)  # schedulers send the second to all processes of a job


def worker_environment() -> dict[str, str]:
    """The environment of a worker: this process's own, single-threaded."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    return os.environ | SINGLE_THREADED | {"XLA_FLAGS": flags}


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def train_on_cores(packs: Sequence[Pack], config: ConfigDict, workdir: Path, report: Report, stopping: threading.Event) -> None:
    """Train every pack of the study in `workdir`, a worker a core, each taking the next pack when it is free.

    On KeyboardInterrupt the workers save, end, and the interrupt goes on; where `stopping` is set they do so too, and
    `Stopped` is raised. Raises `GcjaxError` with what stopped a worker, after the others have saved and ended.
    """
    waiting, failures = deque(packs), list[str]()
    environment = worker_environment()
    count = min(config.executor.workers or cores(), len(packs))
    command = [sys.executable, "-m", __name__, str(workdir)]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(count)
    ]

    def serve(worker: subprocess.Popen[str]) -> None:
        assert worker.stdin is not None
        assert worker.stdout is not None
        with worker:
            for line in worker.stdout:
                message = json.loads(line)
                if "steps" in message:
                    report(named[message["pack"]], message["steps"])
                elif "error" in message:
                    failures.append(message["error"])
                elif waiting and not failures and not stopping.is_set():
                    worker.stdin.write(waiting.popleft().name + "\n")
                    worker.stdin.flush()
                else:
                    worker.stdin.close()
        if -worker.returncode in STOPPING:  # before it could set its handlers
            stopping.set()
        elif worker.returncode and not failures:
            failures.append(f"a worker ended with code {worker.returncode}; the same command resumes")
        if failures:
            stop()

    def stop() -> None:
        for worker in workers:
            if worker.poll() is None:
                worker.terminate()

    named = {pack.name: pack for pack in packs}
    threads = [threading.Thread(target=serve, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads) and not stopping.wait(0.1):
            pass
        if stopping.is_set():
            stop()
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        stop()
        for thread in threads:
            thread.join()
        raise
    if failures:
        raise GcjaxError(failures[0])
    if stopping.is_set():
        raise Stopped


def _say(**message: object) -> None:
    print(json.dumps(message), flush=True)


def _assigned(packs: Sequence[Pack]) -> Iterator[Pack]:
    """Ask for a pack, train it, ask for the next one, until there is none."""
    named = {pack.name: pack for pack in packs}
    _say(free=True)
    for line in sys.stdin:
        yield named[line.strip()]
        _say(free=True)


def _die_with_parent() -> None:
    if sys.platform == "linux":  # elsewhere the next progress line fails and ends the worker
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def main(workdir: Path) -> int:
    """The worker's side: train the packs that are named on standard input."""
    _die_with_parent()
    stop = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the parent's to handle
    for number in STOPPING:
        signal.signal(number, lambda *_: stop.set())
    try:
        record = json.loads((workdir / "record.json").read_text())
        config = ConfigDict(record["config"])
        listed = sweep.runs(config)
        arrays, provenance = problem.load_data(listed[0].config)
        if provenance["sha256"] != record["data"]["sha256"]:
            raise GcjaxError(f"the data changed since {workdir} was begun; take another --workdir, or --overwrite")

        def report(pack: Pack, steps: int) -> None:
            _say(pack=pack.name, steps=steps)

        assigned = _assigned(sweep.packs(listed, record["vmap_width"]))
        executor.train_queue(assigned, config, arrays, executor.groups(config)[0], workdir / "packs", report, stop)
    except Stopped:
        return 0
    except GcjaxError as error:
        _say(error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
