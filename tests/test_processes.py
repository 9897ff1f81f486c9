"""Two processes on one host do what one does: packs that they divide, and packs that they train together."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from toys import LLAMA, MLP, TOY_LLAMA, TOY_MLP, write_checkpoint, write_prose

from gcjax import config as configs
from gcjax import launch_local, processes, results
from gcjax.errors import REQUEUE, GcjaxError, Stopped
from gcjax.pretrained.measure import measure
from gcjax.pretrained.options import Options
from gcjax.reporting.claims import evaluate
from gcjax.training import study


def _train(where: str, workdir: str, config: str, *overrides: str) -> None:
    """A child: the study, as one of the processes that `where` (coordinator, count, index) says."""
    coordinator, count, index = where.split(",")
    stop = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: stop.set())
    processes.join(coordinator, int(count), int(index))
    try:
        found = study.train(configs.load(config, overrides), workdir, stop=stop)
    except Stopped:
        sys.exit(REQUEUE)
    assert (found is not None) == processes.leads()


def _together(workdir: Path, *arguments: str) -> int:
    """Two processes' exit status."""
    port = launch_local.free_port()
    command = [sys.executable, __file__]
    return launch_local.launch([[*command, f"127.0.0.1:{port},2,{i}", str(workdir), *arguments] for i in range(2)])


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> xr.Dataset:
    found = study.train(configs.load(MLP, TOY_MLP), tmp_path_factory.mktemp("alone") / "w")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("prose")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GCJAX_CACHE", str(folder / "cache"))
        yield f"data.files={write_prose(folder)}"


@pytest.fixture(scope="module")
def llama(prose: str, tmp_path_factory: pytest.TempPathFactory) -> xr.Dataset:
    found = study.train(configs.load(LLAMA, (*TOY_LLAMA, prose)), tmp_path_factory.mktemp("alone") / "w")
    assert found is not None
    return found


def _agree(found: xr.Dataset, alone: xr.Dataset) -> None:
    """Equal but for the rounding of sums that were added up in another order."""
    assert found.point.values.tolist() == alone.point.values.tolist()
    assert found.seed.values.tolist() == alone.seed.values.tolist()
    assert found.status.values.tolist() == alone.status.values.tolist()
    early = {"step": alone.step.values[alone.step.values <= 20]}
    for name in ("loss", "test_loss"):
        np.testing.assert_allclose(found[name].sel(early), alone[name].sel(early), rtol=0, atol=1e-4, err_msg=name)
    for source, error in (("weight", 1e-5), ("gradient", 2e-3)):  # gradients are equal but for rounding, weights are equal
        begun = {"step": 0, "source": source}
        np.testing.assert_allclose(found.sigma.sel(begun), alone.sigma.sel(begun), rtol=min(error, 1e-4), atol=1e-6)
        sure = alone.flagged.sel(begun) == 0
        cosines = (ds.cosine.sel(begun).where(sure) for ds in (found, alone))
        np.testing.assert_allclose(*cosines, rtol=0, atol=error, err_msg=source)
    verdicts, others = ([(one.id, one.setting, one.verdict) for one in evaluate(ds)] for ds in (found, alone))
    assert verdicts == others


def test_processes_that_divide_packs_end_with_the_bits_of_one(mlp: xr.Dataset, tmp_path: Path) -> None:
    assert _together(tmp_path / "w", MLP, *TOY_MLP) == 0
    xr.testing.assert_equal(results.load(tmp_path / "w" / "results.nc"), mlp)


def test_processes_that_train_packs_together_agree_with_one(mlp: xr.Dataset, tmp_path: Path) -> None:
    """Three runs on two devices: the fourth, which fills the program, is nowhere in the results."""
    assert _together(tmp_path / "w", MLP, *TOY_MLP, "executor.run_devices=2", "executor.vmap_width=3") == 0
    _agree(results.load(tmp_path / "w" / "results.nc"), mlp)


SHARED = ("executor.data_devices=2", "executor.fsdp=True", "data.device_bytes=0")  # the corpus stays on the host


@pytest.fixture(scope="module")
def shared(prose: str, tmp_path_factory: pytest.TempPathFactory) -> xr.Dataset:
    """The transformer, its batch and its parameters shared by two processes."""
    workdir = tmp_path_factory.mktemp("shared") / "w"
    assert _together(workdir, LLAMA, *TOY_LLAMA, prose, *SHARED) == 0
    return results.load(workdir / "results.nc")


def test_a_transformer_s_batch_and_parameters_are_shared_by_processes(llama: xr.Dataset, shared: xr.Dataset) -> None:
    _agree(shared, llama)


@pytest.mark.skipif("GCJAX_SLOW" not in os.environ, reason="it takes a quiet minute; GCJAX_SLOW=1")
def test_processes_that_train_together_stop_and_resume_together(shared: xr.Dataset, prose: str, tmp_path: Path) -> None:
    """Signalled in the middle, then run to the end: as uninterrupted."""
    how, parts = (LLAMA, *TOY_LLAMA, prose, *SHARED, "checkpoint.seconds=0.0"), tmp_path / "parts"

    def interrupt() -> None:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and not list(parts.glob("packs/*/running/*")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    try:
        assert _together(parts, *how) == REQUEUE
    finally:
        watcher.join()
    assert not (parts / "results.nc").exists()
    assert list(parts.glob("packs/*/running/*")), "nothing was saved"
    assert _together(parts, *how) == 0
    xr.testing.assert_equal(results.load(parts / "results.nc"), shared)


def test_processes_that_divide_a_model_s_matrices_measure_it_as_one(tmp_path: Path) -> None:
    """By the command line; only the first process speaks."""
    write_checkpoint(tmp_path / "model")
    alone = measure(str(tmp_path / "model"), tmp_path / "alone", Options(rank=4, draws=2))
    options = ("--workdir", str(tmp_path / "w"), "--rank", "4", "--draws", "2", "--formats=")
    arguments = ["measure", str(tmp_path / "model"), *options]
    assert launch_local.launch(launch_local.commands(2, arguments)) == 0
    xr.testing.assert_equal(results.load(tmp_path / "w" / "results.nc"), alone)
    assert not list((tmp_path / "w").glob(".lock*"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("127.0.0.1:1", None, None), "belong together"),
        (("127.0.0.1:1", 2, 2), r"--process-id 2 does not exist; 2 processes are numbered 0 to 1"),
        ((None, None, None), r"cannot join the other processes .*; start it by srun, or .* give --coordinator"),
    ],
)
def test_who_cannot_join_is_told_what_to_give(given, message: str) -> None:
    with pytest.raises(GcjaxError, match=message):
        processes.join(*given)


if __name__ == "__main__":
    _train(*sys.argv[1:])
