"""A workdir belongs to one study or one measurement: `record.json` in it says which."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gcjax import config as configs
from gcjax import results
from gcjax.errors import GcjaxError

RENDERED = ("results.nc", "claims.md", "claims.csv", "summary.csv", "figures", "record.json")  # beside a verb's own files


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
        old = json.loads(kept.read_text()) if kept.exists() else None
        if old is None and any(not path.name.startswith(".record.json") for path in workdir.iterdir()):
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
