"""A Slurm of one node for tests: munged, slurmctld and slurmd as root, on loopback, all they write in a directory of its own.

By hand: `python tests/slurm.py sbatch --wait launch/slurm.sbatch ...` runs one command beside such a Slurm.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PACKAGES = "slurmctld slurmd slurm-client munge"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "setpriv")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
# The node is called localhost, which every machine can resolve. Two processors are promised, whatever there is. A requeued
# job waits for cred_expire (5 s is the least), one that is told to end is killed after KillWait. proctrack/pgid is an
# alternative that takes 3 s more to end a job.
CONFIG = """
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
FirstJobId={controller}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=10
SlurmUser=root
SlurmdParameters=config_overrides
SlurmdSpoolDir={directory}/node
StateSaveLocation={directory}/controller
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster(NamedTuple):
    """A running Slurm."""

    directory: Path
    environment: dict[str, str]  # in which its commands find it


class Job(NamedTuple):
    """A job, or a task of an array, as `scontrol` shows it."""

    state: str
    code: str  # status:signal
    restarts: int


def refusal() -> str | None:
    """Why no Slurm can be started here; None where one can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install {PACKAGES}"
    return None if os.getuid() == 0 else "slurmd starts jobs as root only"


@contextlib.contextmanager
def cluster(**variables: str) -> Iterator[Cluster]:
    """A Slurm whose jobs get this process's environment and `variables`; it and its jobs have ended afterwards.

    Raises RuntimeError, with the daemons' logs, where it does not come up.
    """
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))  # a short name: it holds a socket
        environment = os.environ | {"PATH": _path(), "SLURM_CONF": f"{directory}/slurm.conf"} | variables
        found = Cluster(directory, environment)
        host = socket.gethostname().partition(".")[0]
        controller, node = _free_ports(2)
        for name in ("node", "controller"):
            (directory / name).mkdir()
        (directory / "slurm.conf").write_text(CONFIG.format(host=host, directory=directory, controller=controller, node=node))
        (directory / "munge.key").write_bytes(os.urandom(128))
        (directory / "munge.key").chmod(0o600)
        stack.callback(_kill_all, directory)
        munge = [f"--{name}-file={directory}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        _start(stack, found, "munged", "--foreground", "--force", f"--socket={directory}/munge.socket", *munge)
        _until(found, lambda: (directory / "munge.socket").exists())
        _start(stack, found, "slurmctld", "-D")
        _start(stack, found, "slurmd", "-D", "-N", "localhost")
        _until(found, lambda: run(found, "sinfo", "--noheader", "--format=%t") == "idle")
        stack.callback(_cancel_all, found)
        yield found


def run(cluster: Cluster, *command: str) -> str:
    """What one of Slurm's commands says; nothing, where it fails."""
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def submit(cluster: Cluster, folder: Path, *command: str) -> int:
    """`sbatch command` in `folder`, where the job's output goes -> the job's number."""
    done = subprocess.run(
        ("sbatch", "--parsable", *command), cwd=folder, env=cluster.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def jobs(cluster: Cluster, number: int) -> list[Job]:
    """The job, or the tasks of the array, of that number."""
    lines = run(cluster, "scontrol", "show", "job", "--oneliner", str(number)).splitlines()
    fields = [dict(re.findall(r"(JobState|ExitCode|Restarts)=(\S*)", line)) for line in lines]
    return [Job(found["JobState"], found["ExitCode"], int(found["Restarts"])) for found in fields]


def finish(cluster: Cluster, number: int, folder: Path, seconds: float) -> list[Job]:
    """Wait until the job has ended well, all tasks of it; raises AssertionError, with what was printed, where it has not."""
    deadline = time.monotonic() + seconds
    while not ((found := jobs(cluster, number)) and all(job.state in ENDED for job in found)):
        assert time.monotonic() < deadline, f"{found} after {seconds} s\n{printed(folder)}"
        time.sleep(0.1)
    assert {(job.state, job.code) for job in found} == {("COMPLETED", "0:0")}, f"{found}\n{printed(folder)}"
    return found


def printed(folder: Path) -> str:
    """What the jobs that were submitted in `folder` have printed so far."""
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.out")))


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _start(stack: contextlib.ExitStack, cluster: Cluster, *command: str) -> None:
    """Start a daemon that ends with the stack, and with this process however that ends."""
    whole = ("setpriv", "--pdeathsig", "TERM", *command)
    with open(cluster.directory / f"{command[0]}.out", "wb") as log:
        process = subprocess.Popen(whole, env=cluster.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def stop() -> None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(stop)


def _until(cluster: Cluster, ready: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{path}:\n{path.read_text()}" for path in sorted(cluster.directory.glob("*.out")))
            raise RuntimeError(f"no Slurm after {seconds:.0f} s\n{logs}")
        time.sleep(0.05)


def _cancel_all(cluster: Cluster) -> None:
    run(cluster, "scancel", "--user=root")
    deadline = time.monotonic() + 10
    while run(cluster, "squeue", "--noheader") and time.monotonic() < deadline:
        time.sleep(0.1)


def _kill_all(directory: Path) -> None:
    """Kill what is left: slurmd leaves a process beside each job that outlives it. All have its configuration's name."""
    own = f"SLURM_CONF={directory}/slurm.conf".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if own in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def main(command: Sequence[str]) -> int:
    if why := refusal():
        sys.exit(why)
    with cluster() as found:
        return subprocess.run(command, env=found.environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
