"""The local launcher, with small processes that know nothing of gcjax: who is shown, who is ended, what is returned."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gcjax.errors import REQUEUE, GcjaxError
from gcjax.launch_local import commands, launch, main

SLEEP = "import time; time.sleep(60)"
# Counts the signals it gets in a file, and stops 0.3 s after the first with the given status.
COUNT = """
import signal, sys, time
path, status = sys.argv[1], int(sys.argv[2])
got = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: got.append(signal.Signals(number).name))
open(path, "w").close()
while not got:
    time.sleep(0.01)
time.sleep(0.3)
open(path, "w").write(" ".join(got))
sys.exit(status)
"""
# Starts a child of its own, writes both numbers and waits.
PARENT = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", {SLEEP!r}])
open(sys.argv[1] + ".new", "w").write(f"{{os.getpid()}} {{child.pid}}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
"""
LAUNCH = "import json, sys; from gcjax.launch_local import launch; sys.exit(launch(json.loads(sys.argv[1]), grace=0.5))"


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 20
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, paths
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def assert_gone(*paths: Path) -> None:
    """No process whose number is in a file still runs, nor does for long."""
    numbers = [int(number) for path in paths for number in path.read_text().split()]
    assert len(numbers) == 2 * len(paths)
    deadline = time.monotonic() + 5
    while any(runs(number) for number in numbers):
        assert time.monotonic() < deadline, numbers
        time.sleep(0.01)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator:
    """Starts `launch` in a process of its own."""
    started = []

    def start(*lines: list[str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LAUNCH, json.dumps(lines)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_first_is_shown_and_the_others_are_not(capfd: pytest.CaptureFixture[str]) -> None:
    lines = [python(f"import sys; print('out {i}'); print('err {i}', file=sys.stderr)") for i in range(3)]
    assert launch(lines) == 0
    assert capfd.readouterr() == ("out 0\n", "err 0\n")


def test_the_first_to_fail_speaks_first_and_ends_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    held = [tmp_path / "0", tmp_path / "2"]
    last_words = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (print('told', flush=True), sys.exit(1)));"
    fails = f"""
import os, sys, time
while not all(os.path.exists(path) for path in {[str(path) for path in held]}):
    time.sleep(0.01)
sys.exit("no such layer")
"""
    waits = last_words + PARENT + SLEEP
    begun = time.monotonic()
    assert launch([python(waits, held[0]), python(fails), python(waits, held[1])], grace=20) == 1
    assert time.monotonic() - begun < 15
    shown = capfd.readouterr()
    assert shown.err.splitlines() == [
        "launch_local: process 1 of 3 ended with status 1, which ends the others. It said:",
        "no such layer",
        "launch_local: process 2 of 3, ended after that. It said:",
        "told",
    ]
    assert shown.out == "told\n"
    assert_gone(*held)  # and their children


def test_who_does_not_listen_is_killed_after_a_grace_period(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + PARENT + SLEEP
    fails = f"import os, time, sys\nwhile not os.path.exists({str(tmp_path / 'deaf')!r}): time.sleep(0.01)\nsys.exit(3)"
    begun = time.monotonic()
    assert launch([python(deaf, tmp_path / "deaf"), python(fails)], grace=0.3) == 3
    assert 0.3 < time.monotonic() - begun < 10
    assert "process 1 of 2 ended with status 3, which ends the others. It said nothing." in capfd.readouterr().err
    assert_gone(tmp_path / "deaf")


def test_of_much_output_the_end_is_shown_and_nothing_blocks(capfd: pytest.CaptureFixture[str]) -> None:
    speaks = "for i in range(20000): print('line', i, 'x' * 50)\nimport os; os.kill(os.getpid(), 9)"
    assert launch([python(SLEEP), [sys.executable, "-c", speaks]]) == 128 + 9
    shown = capfd.readouterr().err.splitlines()
    assert shown[0].endswith("process 1 of 2 was killed by SIGKILL, which ends the others. It said, in the end:")
    assert len(shown) == 201
    assert shown[-1].startswith("line 19999 ")


def test_the_first_process_has_said_it_already(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch([python("import sys; sys.exit('mine')"), python("print('theirs', flush=True);" + SLEEP)]) == 1
    shown = capfd.readouterr().err.splitlines()
    assert shown[:2] == [
        "mine",
        "launch_local: process 0 of 2 ended with status 1, which ends the others. Its output stands above.",
    ]


@pytest.mark.parametrize(
    ("statuses", "expected"), [((0, 0), 0), ((REQUEUE, REQUEUE), REQUEUE), ((0, REQUEUE), REQUEUE), ((REQUEUE, 2), 2)]
)
def test_exit_statuses(statuses: tuple[int, int], expected: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch([python(f"import sys; sys.exit({status})") for status in statuses]) == expected
    assert ("ended with status 2" in capfd.readouterr().err) == (expected == 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_each_once_and_they_take_their_time(number: signal.Signals, tmp_path: Path, launcher) -> None:
    paths = [tmp_path / str(i) for i in range(2)]
    process = launcher(*(python(COUNT, path, REQUEUE) for path in paths))
    wait_for(*paths)
    time.sleep(0.05)
    process.send_signal(number)
    shown, _ = process.communicate(timeout=20)
    assert (process.returncode, shown) == (REQUEUE, "")
    assert [path.read_text() for path in paths] == [number.name] * 2


def test_a_failure_after_a_signal_is_shown_and_a_death_by_it_is_not(tmp_path: Path, launcher) -> None:
    paths = [tmp_path / str(i) for i in range(4)]
    fails = launcher(python(COUNT, paths[0], REQUEUE), python(COUNT, paths[1], 4))
    dies = launcher(python(PARENT + SLEEP, paths[2]), python(PARENT + SLEEP, paths[3]))
    wait_for(*paths)
    time.sleep(0.05)
    for process in (fails, dies):
        process.send_signal(signal.SIGTERM)
    assert "process 1 of 2 ended with status 4" in fails.communicate(timeout=20)[0]
    assert fails.returncode == 4
    assert dies.communicate(timeout=20)[0] == ""
    assert dies.returncode == 128 + signal.SIGTERM
    assert_gone(*paths[2:])


def test_nothing_survives_a_killed_launcher(tmp_path: Path, launcher) -> None:
    paths = [tmp_path / str(i) for i in range(2)]
    process = launcher(*(python(PARENT + SLEEP, path) for path in paths))
    wait_for(*paths)
    process.kill()
    assert_gone(*paths)


def test_what_processes_leave_behind_is_ended(tmp_path: Path) -> None:
    assert launch([python(PARENT, tmp_path / "0")]) == 0
    assert_gone(tmp_path / "0")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores cannot be assigned here")
def test_each_has_its_share_of_the_cores(tmp_path: Path) -> None:
    mine = os.sched_getaffinity(0)
    code = "import os, sys; open(sys.argv[1], 'w').write(' '.join(map(str, os.sched_getaffinity(0))))"
    for count in (1, len(mine), len(mine) + 1):
        assert launch([python(code, tmp_path / str(i)) for i in range(count)]) == 0
        shares = [set(map(int, (tmp_path / str(i)).read_text().split())) for i in range(count)]
        assert set.union(*shares) == mine
        assert sum(map(len, shares)) == (len(mine) if count <= len(mine) else len(mine) * count)
        assert os.sched_getaffinity(0) == mine


def test_a_command_that_cannot_be_started_ends_those_that_were(tmp_path: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with pytest.raises(GcjaxError, match=r"cannot start .*absent: No such file"):
        launch([python(SLEEP), [str(tmp_path / "absent")]])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == handlers


def test_command_lines() -> None:
    lines = commands(2, ["train", "--config", "a b.py"])
    assert [line[:6] for line in lines] == [[sys.executable, "-m", "gcjax", "train", "--config", "a b.py"]] * 2
    assert lines[0][6:8] == lines[1][6:8]
    assert lines[0][6] == "--coordinator"
    host, _, port = lines[0][7].partition(":")
    assert host == "127.0.0.1"
    assert 1024 < int(port) < 65536
    assert [line[8:] for line in lines] == [["--num-processes", "2", "--process-id", str(i)] for i in range(2)]


def test_options_before_the_verb_are_the_launchers(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(GcjaxError, match="-n 0 starts nothing"):
        main(["-n", "0", "train"])
    for wrong in (["train"], ["-n", "2"], ["-n", "two", "train"]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "python -m gcjax.launch_local -n 2 train --config" in capfd.readouterr().out
    assert main(["-n", "1", "train", "--help"]) == 0
    assert "gcjax train --config" in capfd.readouterr().out
