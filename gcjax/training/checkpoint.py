"""A pack's state and history on disk, together, whole or not at all.

PACK/running/STEP/   the newest checkpoints of a pack in training
PACK/final/          history, and the weights where the config keeps them, of a pack that has ended
PACK/snapshots/STEP/ the weights at the snapshots that keep whole-spectrum measures, where the config keeps them
"""

import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gcjax import processes, trees
from gcjax.errors import GcjaxError

History = dict[str, np.ndarray]
log = logging.getLogger(__name__)
ADVICE = "free space or permissions, then run the same command again: it resumes from the last good checkpoint"


def save(pack: Path, step: int, state: Any, so_far: History) -> None:
    """Write the state after `step` steps with the history so far, then drop all older checkpoints but one.

    A state that spans processes is written by all of them. Raises `GcjaxError` when the disk refuses; what was saved before
    stays.
    """
    together = spans(state)
    tree = {"state": _to_store(state, together), "history": so_far}
    trees.write(pack / "running" / str(step), tree, by_layer=False, advice=ADVICE, together=together)
    if processes.leads() or not together:
        for old in _steps(pack)[:-2]:
            shutil.rmtree(pack / "running" / str(old), ignore_errors=True)


def restore(pack: Path, like: Any) -> tuple[int, Any, History] | None:
    """The newest readable checkpoint as (step, state, history), or None; `like` is a state with the same structure.

    A damaged checkpoint is named in the log and the one before it is taken. Processes that share a state all call this: the
    first one chooses, and each puts its own part on its devices.
    """
    together = spans(like)
    if together and not processes.leads():
        chosen = processes.of_first(-1)
        saved = None if chosen < 0 else trees.read(pack / "running" / str(chosen))
        return None if saved is None else (chosen, _to_device(saved["state"], like), saved["history"])
    chosen = None
    for step in reversed(_steps(pack)):
        path = pack / "running" / str(step)
        try:
            saved = trees.read(path)
            chosen = step, _to_device(saved["state"], like), saved["history"]
            break
        except Exception as error:  # orbax and tensorstore raise whatever the damage leads them to
            log.warning("%s is damaged and left out (%s)", path, str(error).splitlines()[0] if str(error) else error)
    if together:
        processes.of_first(-1 if chosen is None else chosen[0])
    return chosen


def finish(pack: Path, whole: History, params: Any | None, together: bool) -> None:
    """Write what an ended pack leaves behind and drop its checkpoints; `together` with the other processes, or alone."""
    kept = {"history": whole} | ({} if params is None else {"params": _to_store(params, together)})
    trees.write(pack / "final", kept, by_layer=False, advice=ADVICE, together=together)
    if processes.leads() or not together:
        shutil.rmtree(pack / "running", ignore_errors=True)


def keep(pack: Path, step: int, params: Any, together: bool) -> None:
    """Write the weights after `step` steps, for good; a resumed run writes the same once more."""
    trees.write(pack / "snapshots" / str(step), _to_store(params, together), by_layer=False, advice=ADVICE, together=together)


def kept(pack: Path, step: int, like: Any) -> Any:
    """What `keep` wrote, as host arrays in the structure of `like`; raises `GcjaxError` where it cannot be read."""
    path = pack / "snapshots" / str(step)
    try:
        saved = trees.read(path)
        return jax.tree.unflatten(jax.tree.structure(like), [saved[name] for name in sorted(saved)])
    except Exception as error:
        raise GcjaxError(
            f"{path} is missing or damaged; train with --config.checkpoint.keep_snapshots=True, in a new workdir"
        ) from error


def finished(pack: Path) -> bool:
    """Whether a pack has ended."""
    return (pack / "final").is_dir()


def history(pack: Path) -> History:
    """The history of a pack that has ended; raises `GcjaxError` where it cannot be read."""
    path = pack / "final"
    try:
        return trees.read(path)["history"]
    except Exception as error:
        raise GcjaxError(f"{path} is damaged; delete it and run the same command again to train its runs anew") from error


def newest_history(pack: Path) -> History | None:
    """The history of a pack as far as it is on disk, ended or not; None where there is nothing that can be read."""
    for path in (pack / "final", *(pack / "running" / str(step) for step in reversed(_steps(pack)))):
        try:
            return trees.read(path)["history"]
        except Exception as error:
            log.info("%s is left out (%s)", path, error)
    return None


def _steps(pack: Path) -> list[int]:
    # orbax writes beside the final name and renames: other names are what a kill left behind
    return sorted(int(path.name) for path in (pack / "running").glob("*") if path.name.isdigit())


def spans(state: Any) -> bool:
    """Whether parts of a state are on other processes' devices."""
    return not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(state))


def _to_store(tree: Any, together: bool) -> dict[str, Any]:
    """The leaves under numbers, as orbax takes them: on the host, or, where they span processes, as they are."""
    leaves = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
              for x in jax.tree.leaves(tree)]  # fmt: skip
    return {f"{i:04d}": value for i, value in enumerate(leaves if together else jax.device_get(leaves))}


def _to_device(saved: dict[str, np.ndarray], like: Any) -> Any:
    def put(value: np.ndarray, old: jax.Array) -> jax.Array:
        if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(processes.place(value, old.sharding))
        if value.shape != old.shape or value.dtype != old.dtype:
            raise ValueError(f"holds {value.dtype}{value.shape} where {old.dtype}{old.shape} belongs")
        return processes.place(value, old.sharding)

    leaves, structure = jax.tree.flatten(like)
    if len(saved) != len(leaves):
        raise ValueError(f"holds {len(saved)} arrays where {len(leaves)} belong")
    return structure.unflatten([put(saved[f"{i:04d}"], old) for i, old in enumerate(leaves)])
