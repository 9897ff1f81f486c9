"""A workdir belongs to one study or one measurement: `record.json` in it says which. Its parts outlive an interruption."""

import contextlib
import io
import json
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gcjax import config as configs
from gcjax import processes, results
from gcjax.errors import GcjaxError
from gcjax.lock import locked

RENDERED = (
    "results.nc",
    "claims.md",
    "claims.csv",
    "summary.csv",
    "figures",
    "report.html",
    "record.json",
)  # beside a verb's own files


def check_shares(shard: tuple[int, int] | None, merge: bool, overwrite: bool) -> None:
    """Raises `GcjaxError` for a share (i, n), from 1, that does not exist, and for options that exclude each other."""
    if shard is not None and not 1 <= shard[0] <= shard[1]:
        raise GcjaxError(f"--shard {shard[0]}/{shard[1]} does not exist; shards of {shard[1]} are numbered from 1")
    if shard is not None and processes.count() > 1:
        raise GcjaxError("--shard is for processes that do not know of each other; leave it out among several that do")
    if merge and shard is not None:
        raise GcjaxError("--merge puts all shards together; leave out --shard")
    if overwrite and (merge or shard is not None):
        raise GcjaxError("--overwrite would delete what the other shards have done; delete the workdir before the first one")


def share(total: int, shard: tuple[int, int]) -> slice:
    """Which of `total` units are share (i, n)'s, i from 1: neighbours, which have most in common."""
    first, last = ((shard[0] + i) * total // shard[1] for i in (-1, 0))
    return slice(first, last)


def exclusive(
    workdir: Path, shard: tuple[int, int] | None, overwrite: bool, say: Callable[[str], object]
) -> contextlib.AbstractContextManager[None]:
    """The lock on a workdir or a share of it, of which processes that work together need one, and reading results none."""
    reads = (workdir / "results.nc").exists() and not overwrite
    return locked(workdir, shard, say) if processes.leads() and not reads else contextlib.nullcontext()


def open_workdir(
    workdir: Path, record: Mapping[str, Any], overwrite: bool, owned: Sequence[str], free: Sequence[str] = ()
) -> Path:
    """Make or reopen a workdir whose record is `record`, fields in `free` aside; its files are `owned` and RENDERED.

    Raises `GcjaxError` where it cannot be used, holds foreign files, or belongs to another record, unless `overwrite`
    allows its files to be deleted.
    """
    kept = workdir / "record.json"
    record = json.loads(json.dumps(record))
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        # In this order: another share may be writing the record.
        foreign = [path for path in workdir.iterdir() if not path.name.startswith((".record.json", ".lock"))]
        old = json.loads(kept.read_text()) if kept.exists() else None
        if old is None and foreign:
            raise GcjaxError(f"{workdir} holds files that gcjax did not write; give an empty or a new --workdir")
        differing = [line for line in configs.differences(old or record, record)
                     if line.partition(":")[0].removeprefix("config.") not in free]  # fmt: skip
        if differing and not overwrite:
            more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
            raise GcjaxError(f"{workdir} belongs to something else ({'; '.join(differing[:5])}{more}); take another --workdir, "
                             "or --overwrite to delete its results and begin anew")  # fmt: skip
        if overwrite and old is not None:
            for path in (workdir / name for name in (*owned, *RENDERED)):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if overwrite or old != record:
            results.write_whole(kept, json.dumps(record, indent=1).encode())
    except (OSError, ValueError) as error:
        raise GcjaxError(f"the workdir {workdir} cannot be used: {error}") from error
    return workdir


def save_part(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name as one .npz, whole or not at all."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # pyright: ignore[reportArgumentType]
    results.write_whole(path, buffer.getbuffer(), "; free space and run the same command again")


def load_part(path: Path) -> dict[str, Any]:
    """What `save_part` wrote; raises `GcjaxError` where it is damaged."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            return dict(stored)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise GcjaxError(f"{path} is damaged ({error}); delete it and run the same command again") from error
