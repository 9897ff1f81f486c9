"""`gcjax train`: a config and a workdir -> the study's results, resumable at any moment.

WORKDIR/record.json   the config and the data this workdir belongs to
WORKDIR/packs/        checkpoints of packs in training, histories of those that have ended
WORKDIR/results.nc    the dataset, once every run has ended
WORKDIR/partial.nc    the dataset of what an interrupted study has, for a report on it
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xarray as xr
from ml_collections import ConfigDict
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gcjax import config as configs
from gcjax import processes, results
from gcjax.errors import GcjaxError, Stopped, nearest, some
from gcjax.geometry.spectra import SOLVERS, check_rank
from gcjax.training import checkpoint, executor, feed, optim, problem, sweep, workers
from gcjax.training.assemble import assemble
from gcjax.workdir import check_shares, exclusive, open_workdir, share

FREE = ("executor.workers", "checkpoint.seconds")  # may change between resumes: they do not reach the results
SHARED = (
    "train.steps",
    "train.chunk",
    "train.window",
    "model.depth",
    "model.width",
    "measure",
    "data",
    "executor",
    "checkpoint",
)


def train(
    config: ConfigDict,
    workdir: str | os.PathLike[str],
    *,
    shard: tuple[int, int] | None = None,
    merge: bool = False,
    overwrite: bool = False,
    stop: threading.Event | None = None,
    console: Console | None = None,
) -> xr.Dataset | None:
    """Train every run of `config`, write `results.nc` into `workdir` and return it.

    Interrupted at any moment, the same call resumes; done already, it returns what is there. `shard` (i, n) trains the i-th
    of n shares of the packs, from 1, and returns None until all are there; `merge` trains nothing and puts them together.
    Processes that joined others (`gcjax.processes`) all call this with a workdir that all see; the first returns the
    dataset, the others None. Set `stop`, from a signal's handler or another thread, to end after the steps under way.

    Raises `GcjaxError` for a config that cannot run (before anything is trained), for a workdir that belongs to another
    config (unless `overwrite`) or that another process works on, for a merge of an incomplete set and for a disk that
    refuses to take the results; `Stopped`.
    """
    console = console or Console(stderr=True, quiet=not processes.leads())
    stop = stop or threading.Event()
    check_shares(shard, merge, overwrite)
    listed = check(config)
    executor.groups(config)
    say = partial(console.print, highlight=False, markup=False)
    arrays, provenance = processes.in_turn(lambda: problem.load_data(listed[0].config, say))
    width, workdir = executor.vmap_width(config), Path(workdir)
    feed.check(config, arrays, width)
    path, packs = workdir / "results.nc", sweep.packs(listed, width)
    with exclusive(workdir, shard, overwrite, say):
        if processes.leads():
            open_workdir(
                workdir, _record(config, provenance, width), overwrite, ("packs", "partial.nc", "symmetry", "symmetry.nc"), FREE
            )
        processes.wait()
        if processes.of_first(path.exists()):
            say(f"{path} is complete; nothing to train (--overwrite begins anew)")
            return results.load(path) if processes.leads() else None
        begun = time.monotonic()
        own = () if merge else packs
        if executor.span_processes(config):
            processes.connect()
        else:
            own = own[share(len(own), shard or (processes.index() + 1, processes.count()))]
        _train(own, config, arrays, workdir, stop, console)
        processes.wait()
        if not processes.leads():
            return None
        missing = [pack.name for pack in packs if not checkpoint.finished(workdir / "packs" / pack.name)]
        if missing:
            text = f"{len(missing)} of {len(packs)} packs are missing in {workdir / 'packs'} ({some(missing)})"
            if shard is None:
                raise GcjaxError(f"{text}; " + ("train them before --merge" if merge else "all processes must see one workdir"))
            say(f"{text}; when they are there, --merge puts all together")
            return None
        histories = [checkpoint.history(workdir / "packs" / pack.name) for pack in packs]
        result = assemble(config, packs, histories, provenance, time.monotonic() - begun)
        results.save(result, path)
        (workdir / "partial.nc").unlink(missing_ok=True)
        return result


def so_far(workdir: Path) -> Path:
    """Write what an interrupted study has, up to each pack's newest checkpoint, to `partial.nc`: runs short of their end are
    *unfinished*. Raises `GcjaxError` where nothing has been measured.
    """
    record = json.loads((workdir / "record.json").read_text())
    config, width = ConfigDict(record["config"]), record["vmap_width"]
    packs = sweep.packs(sweep.runs(config), width)
    found = [checkpoint.newest_history(workdir / "packs" / pack.name) for pack in packs]
    known = next((history for history in found if history is not None), None)
    if known is None:
        raise GcjaxError(f"no run in {workdir} has a checkpoint yet; the command that began it goes on")
    histories = [_blank(known, len(pack.runs)) if history is None else history for pack, history in zip(packs, found)]
    result = assemble(config, packs, histories, record["data"], float("nan"))
    going = {run[:3] for pack in packs for run in pack.runs if not checkpoint.finished(workdir / "packs" / pack.name)}
    short = [run[:3] in going for run in sweep.runs(config)]
    result["status"] = result.status.where(~np.asarray(short), "unfinished")  # else what has no end yet counts as diverged
    return results.save(result, workdir / "partial.nc")


def _blank(like: checkpoint.History, runs: int) -> checkpoint.History:
    """The history of a pack that has not begun."""
    blank = {}
    for name, value in like.items():
        axis = 0 if name.rpartition("/")[2] in executor.LAST_ONLY else 1
        shape = (*value.shape[:axis], runs, *value.shape[axis + 1 :])
        blank[name] = np.full(shape, 1 if value.dtype == np.int8 else np.nan, value.dtype)
    return blank


def _train(
    packs: Sequence[sweep.Pack], config: ConfigDict, arrays: Any, workdir: Path, stop: threading.Event, console: Console
) -> None:
    with watch(console, packs, config.train.steps) as report:
        try:
            if jax.default_backend() == "cpu" and config.executor.run_devices * config.executor.data_devices == 1:
                workers.train_on_cores(packs, config, workdir, report, stop)
            else:
                executor.train_on_devices(packs, config, arrays, workdir / "packs", report, stop)
        except KeyboardInterrupt:
            raise GcjaxError(f"stopped; the same command resumes from {workdir / 'packs'}") from None
        except Stopped:
            raise Stopped(f"stopped on a signal and saved; the same command resumes from {workdir / 'packs'}") from None


def check(config: ConfigDict) -> list[sweep.Run]:
    """The runs of a config that can run; raises `GcjaxError` with the field at fault otherwise."""
    listed = sweep.runs(config)
    for path in sweep.swept(listed):
        if path.startswith(SHARED):
            raise GcjaxError(f"the points of one study must share {path}: it shapes the results; run one study for each")
    for run in listed[:: config.seeds]:
        _check_run(run.config)
    return listed


def _check_run(config: ConfigDict) -> None:
    least = {"train.steps": 1, "train.batch_size": 1, "train.chunk": 1, "measure.every": 1, "measure.full": 1,
             "model.depth": 2, "model.width": 2, "executor.vmap_width": 0, "executor.workers": 0,
             "executor.run_devices": 1, "executor.data_devices": 1}  # fmt: skip
    least |= {"train.window": 1, "train.microbatches": 1, "measure.valid_windows": 1} if "window" in config.train else {}
    for path, low in least.items():
        if configs.get(config, path) < low:
            raise GcjaxError(f"{path}={configs.get(config, path)} is too small; it must be at least {low}")
    if min(config.measure.early, default=0) < 0:
        raise GcjaxError(f"measure.early={config.measure.early} holds a negative step; steps count from 0")
    if config.measure.solver not in SOLVERS:
        raise GcjaxError(f"measure.solver={config.measure.solver!r} does not exist; {nearest(config.measure.solver, SOLVERS)}")
    if config.optim.weight_decay and config.optim.name not in optim.DECAYING:
        raise GcjaxError(f"optim.weight_decay={config.optim.weight_decay} does nothing under optim.name={config.optim.name!r}; "
                         f"the optimizers that decay weights are {', '.join(optim.DECAYING)}")  # fmt: skip
    size, devices, parts = config.train.batch_size, config.executor.data_devices, config.train.get("microbatches", 1)
    if size % (devices * parts):
        raise GcjaxError(f"train.batch_size={size} cannot be divided into train.microbatches={parts} equal parts on "
                         f"executor.data_devices={devices}")  # fmt: skip
    if config.executor.fsdp and devices == 1:
        raise GcjaxError("executor.fsdp=True shards parameters over executor.data_devices, of which there is 1; set more")
    built = problem.build(config)
    optim.build(config.optim, config.train.steps, built.roles)
    for name, stack in jax.eval_shape(lambda: built.stacks(built.init(jax.random.key(0)))).items():
        try:
            check_rank(stack.shape, config.measure.rank)
        except GcjaxError as error:
            raise GcjaxError(f"measure.rank: {error}, as {name}'s are") from error


def _record(config: ConfigDict, provenance: Mapping[str, Any], width: int) -> dict[str, Any]:
    """What a workdir belongs to: everything that its results depend on."""
    return {"config": config.to_dict(), "data": dict(provenance), "vmap_width": width}


@contextlib.contextmanager
def watch(console: Console, packs: Sequence[sweep.Pack], steps: int) -> Iterator[executor.Report]:
    """Progress of a study: bars for all of it and for each pack in training, or, unwatched, a line for each pack that ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f} run-steps"),
               TextColumn("{task.fields[rate]}"), TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    total, done, ended = sum(len(pack.runs) for pack in packs) * steps, dict[str, int](), set[str]()
    tasks: dict[str, TaskID] = {}
    lock, begun = threading.Lock(), time.monotonic()
    first: dict[str, int] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        whole = progress.add_task("all runs", total=total, rate="")

        def report(pack: sweep.Pack, now: int) -> None:
            with lock:
                first.setdefault(pack.name, now)
                done[pack.name] = now * len(pack.runs)
                fresh = sum(done.values()) - sum(first[p.name] * len(p.runs) for p in packs if p.name in first)
                rate = f"{fresh / max(time.monotonic() - begun, 1e-9):.0f}/s"
                progress.update(whole, completed=sum(done.values()), rate=rate)
                label = f"{pack.runs[0].point}, seed {', '.join(str(run.seed) for run in pack.runs)}"
                if pack.name not in tasks:
                    tasks[pack.name] = progress.add_task(label, total=steps, rate="")
                progress.update(tasks[pack.name], completed=now, visible=now < steps)
                if now == steps and pack.name not in ended:
                    ended.add(pack.name)
                    if not console.is_terminal:
                        console.print(f"{len(ended)}/{len(packs)} {label}: {steps} steps, {rate} overall", highlight=False)

        yield report
