"""Trees of arrays on disk, whole or not at all. The only file that knows orbax and tensorstore.

`read` gives back a tree; `describe` and `entry` take one array of it, or one layer of a stack, without reading the rest.
Where several processes work together, an array that spans them is written by all of them, each its own part.
"""

import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from gcjax.errors import GcjaxError

_FILE = 64 << 20  # bytes of a data file; what orbax has encoded and not yet written stays below a few of them
_orbax = threading.Lock()  # threads of one process may write at the same time; orbax's savers are not made for that


def write(path: Path, tree: Any, *, by_layer: bool, advice: str, together: bool = False) -> None:
    """Write `tree`, a dict of host or device arrays, dicts of them and so on, in place of what `path` holds.

    `by_layer` stores each entry of the arrays' first axis by itself, so that `entry` reads no more than it. `together`: every
    process calls this, with the same host arrays and its part of the device arrays.
    Raises `GcjaxError`, ending in `advice`, when the disk refuses; what was there before may be gone then.
    """
    how = jax.tree.map(lambda _: ocp.SaveArgs(shard_axes=(0,) if by_layer else ()), tree)
    try:
        with _orbax, _checkpointer(together) as writer:
            saved = ocp.args.PyTreeSave(tree, save_args=how, ocdbt_target_data_file_size=_FILE)
            writer.save(path.absolute(), saved, force=True)
    except (OSError, ValueError) as error:
        raise GcjaxError(f"cannot write {path}: {str(error).splitlines()[0]}; {advice}") from error


def read(path: Path) -> Any:
    """The tree that `write` wrote, of numpy arrays. Raises whatever damage leads orbax to, nothing of its own."""
    with _orbax, _checkpointer(together=False) as reader:
        saved = reader.metadata(path.absolute()).item_metadata
        # Else what was written as a device array would come back as one, on the devices that it was on.
        how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved.tree)
        return reader.restore(path.absolute(), ocp.args.PyTreeRestore(restore_args=how))


def describe(path: Path, name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the array `name` of the tree at `path`; raises what tensorstore does where there is none."""
    store = _open(path, name)
    return tuple(store.shape), store.dtype.numpy_dtype


def entry(path: Path, name: str, index: int) -> np.ndarray:
    """Entry `index` of the first axis of the array `name` of the tree at `path`; raises what tensorstore does."""
    return _open(path, name)[index].read().result()


def _checkpointer(together: bool) -> ocp.Checkpointer:
    # The processes by their numbers even where it is all of them: for "all", orbax waits by a collective, which gives up.
    lead, names = (0, set(range(jax.process_count()))) if together else (jax.process_index(), {jax.process_index()})
    among = ocp.options.MultiprocessingOptions(primary_host=lead, active_processes=names)
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(multiprocessing_options=among), multiprocessing_options=among)


def _open(path: Path, name: str) -> tensorstore.TensorStore:
    # What orbax writes: arrays in zarr, all of a tree's in one OCDBT store, each under its name.
    store = {"driver": "ocdbt", "base": f"file://{path.absolute()}/", "path": f"{name}/"}
    return tensorstore.open({"driver": "zarr", "kvstore": store}, open=True, read=True).result()
