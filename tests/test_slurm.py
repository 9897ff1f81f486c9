"""launch/slurm.sbatch on a real Slurm of one node: several processes, arrays of shares, requeues; all as the local run."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm
import xarray as xr
from toys import MLP, TOY_MLP, write_checkpoint

from gcjax import config as configs
from gcjax import results
from gcjax.pretrained.measure import measure
from gcjax.pretrained.options import Options
from gcjax.training import study

SCRIPT = str(Path(__file__).parent.parent / "launch" / "slurm.sbatch")
HERE = ("--gres=none", "--cpus-per-task=1", "--time=10")  # no GPUs
STUDY = (*TOY_MLP, "seeds=4", "train.steps=120", "train.chunk=20", "measure.every=60", "executor.workers=1")
TRAIN = ("train", "--config", MLP, "--formats=", *(f"--config.{override}" for override in STUDY))
SECONDS = 300  # for a job to end: on a busy machine it takes many times what it takes on a quiet one

pytestmark = pytest.mark.skipif(slurm.refusal() is not None, reason=f"no Slurm to be had here ({slurm.refusal()})")


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Cluster]:
    """A Slurm whose jobs run this interpreter's gcjax."""
    with slurm.cluster(VENV=sys.prefix) as found:
        yield found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> xr.Dataset:
    """The study without Slurm."""
    found = study.train(configs.load(MLP, STUDY), tmp_path_factory.mktemp("local") / "w")
    assert found is not None
    return found


def _same(workdir: Path, expected: xr.Dataset) -> None:
    xr.testing.assert_equal(results.load(workdir).drop_attrs(), expected.drop_attrs())


def test_an_array_of_shares_is_one_study(cluster: slurm.Cluster, trained: xr.Dataset, tmp_path: Path) -> None:
    job = slurm.submit(cluster, tmp_path, *HERE, "--array=1-2", SCRIPT, *TRAIN, "--workdir", "w")
    assert len(slurm.finish(cluster, job, tmp_path, SECONDS)) == 2  # tasks
    _same(tmp_path / "w", trained)
    assert "files in w: results.nc" in slurm.printed(tmp_path)  # the last one to end put them together


def test_two_processes_find_each_other_and_when_their_time_is_up_they_save_and_are_requeued(
    cluster: slurm.Cluster, trained: xr.Dataset, tmp_path: Path
) -> None:
    job = slurm.submit(cluster, tmp_path, *HERE, "--ntasks=2", SCRIPT, *TRAIN, "--workdir", "w")
    deadline = time.monotonic() + SECONDS
    while not list(tmp_path.glob("w/packs/*/running/*[0-9]")):
        assert time.monotonic() < deadline, slurm.printed(tmp_path)
        time.sleep(0.01)
    slurm.run(cluster, "scancel", "--batch", "--signal=USR1", str(job))  # as --signal=B:USR1 does before its time is up
    (found,) = slurm.finish(cluster, job, tmp_path, SECONDS)
    assert found.restarts == 1
    _same(tmp_path / "w", trained)
    text = slurm.printed(tmp_path)
    assert "ended with code 75; the job is requeued" in text
    assert "2/2 Res+ReLU" in text  # of four packs: the first process trains its half, and it alone speaks
    assert "/4 Res+ReLU" not in text


def test_an_array_of_shares_is_one_measurement(cluster: slurm.Cluster, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", width=32, hidden=48, layers=2)
    options = ("--rank=4", "--draws=2", "--workdir", "w", "--formats=")
    job = slurm.submit(cluster, tmp_path, *HERE, "--array=1-2", SCRIPT, "measure", "model", *options)
    assert len(slurm.finish(cluster, job, tmp_path, SECONDS)) == 2
    local = measure(str(tmp_path / "model"), tmp_path / "local", Options(rank=4, draws=2))
    assert local is not None
    _same(tmp_path / "w", local)


STAND_IN = """#!/bin/sh
[ ! -e "$1" ] || exit 0
trap 'exit 75' TERM
touch "$1"
case "$1" in [0-9]*) exit "$1" ;; esac
while true; do sleep 0.1; done
"""


def test_a_job_is_requeued_once_where_it_was_stopped_not_where_it_failed_or_was_cancelled(
    cluster: slurm.Cluster, tmp_path: Path
) -> None:
    """With a stand-in for gcjax that leaves a file, and then ends with the status of that name or waits for signals."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gcjax").write_text(STAND_IN)
    (tmp_path / "bin" / "gcjax").chmod(0o755)
    here = cluster._replace(environment=cluster.environment | {"VENV": "."})

    def started(name: str) -> int:
        job, deadline = slurm.submit(here, tmp_path, *HERE, SCRIPT, name), time.monotonic() + SECONDS
        while not (tmp_path / name).exists():
            assert time.monotonic() < deadline, slurm.printed(tmp_path)
            time.sleep(0.02)
        return job

    saved, failed, starting = started("75"), started("1"), started("starting")
    slurm.run(here, "scancel", "--batch", "--signal=USR1", str(starting))  # which it cannot handle yet
    slurm.run(here, "scancel", str(cancelled := started("cancelled")))
    slurm.run(here, "scontrol", "requeue", str(preempted := started("preempted")))
    again = [slurm.finish(here, job, tmp_path, SECONDS)[0].restarts for job in (saved, starting, preempted)]
    assert again == [1, 1, 1]
    assert slurm.jobs(here, failed) == [slurm.Job("FAILED", "1:0", 0)]
    assert slurm.jobs(here, cancelled) == [slurm.Job("CANCELLED", "75:0", 0)]
