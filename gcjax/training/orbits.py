"""`gcjax symmetry`: a study that kept its snapshots -> `symmetry.nc`: the loss along moves that may leave the functions as they
are (`gcjax.geometry.symmetry`), how much of training went along them, and what undoing them gives back.

WORKDIR/symmetry/RUN.npz   what was measured of a run; the same command takes up what is there
"""

import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from ml_collections import ConfigDict, FrozenConfigDict
from rich.console import Console
from rich.progress import track

from gcjax import results
from gcjax.data import images
from gcjax.errors import GcjaxError, Stopped
from gcjax.geometry import spectra, symmetry
from gcjax.geometry.continuity import cosines
from gcjax.lock import locked
from gcjax.models import mlp
from gcjax.provenance import origin
from gcjax.training import checkpoint, problem, sweep
from gcjax.workdir import load_part, save_part

IMAGES = 256  # the first of the training set; the same for every run
DRAWS = 4  # directions of each family
FINITE = 0.01  # of the weights' norm
ALGEBRAS = ("general", "rotation")  # whose share of the motion is solved for
ITERATIONS = 60  # of the conjugate gradients, at most
SWEEPS = 40  # over the gauges
RANDOM = "random"


def measure(workdir: Path, stop: threading.Event | None = None) -> xr.Dataset:
    """Measure every finished run of the study in `workdir`, write `symmetry.nc` there and return it.

    Interrupted, the same call goes on with the run it was at. Raises `GcjaxError` where there are no results, no snapshots, or
    no MLP without biases; `Stopped` where `stop` was set.
    """
    console = Console(stderr=True)
    ds = results.load(workdir)
    if ds.attrs["kind"] != "study" or "vocabulary" in json.loads(ds.attrs["config"])["model"]:
        raise GcjaxError(f"{workdir} holds no study of the MLP; gcjax symmetry knows the moves of no other network")
    config = ConfigDict(json.loads(ds.attrs["config"]))
    if not config.checkpoint.get("keep_snapshots", False):
        raise GcjaxError(f"the study in {workdir} kept no snapshots; train it with --config.checkpoint.keep_snapshots=True")
    record = json.loads((workdir / "record.json").read_text())
    packs = sweep.packs(sweep.runs(config), record["vmap_width"])
    arrays, _ = problem.load_data(packs[0].runs[0].config)
    x_NI, y_N = arrays["train_x"][:IMAGES], arrays["train_y"][:IMAGES]
    begun, parts = time.monotonic(), []
    places = {(run.point, run.seed): (pack, i) for pack in packs for i, run in enumerate(pack.runs)}
    with locked(workdir, None, partial(console.print, highlight=False, markup=False)):
        for r in track(range(ds.sizes["run"]), "runs", console=console, disable=not console.is_terminal):
            run = ds.isel(run=r)
            pack, i = places[str(run.point.values), int(run.seed)]
            part = workdir / "symmetry" / f"{pack.name}-{i:04d}.npz"
            if not part.exists():
                found = of_run(workdir / "packs" / pack.name, i, pack.runs[i].config, run, x_NI, y_N)
                save_part(part, found)
                console.print(f"{r + 1}/{ds.sizes['run']} {pack.runs[i].point}, seed {pack.runs[i].seed}", highlight=False)
            parts.append(load_part(part))
            if stop is not None and stop.is_set():
                raise Stopped(f"stopped on a signal; the same command goes on from {workdir / 'symmetry'}")
    variables = {name: np.stack([part[name] for part in parts]) for name in parts[0]}
    coords = {name: ("run", ds[name].values) for name in results.RUN_COORDS} | {
        "moment": list(results.MOMENTS),
        "family": [*symmetry.FAMILIES, RANDOM],
        "algebra": list(ALGEBRAS),
        "gauge": list(results.GAUGES),
        "space": list(results.SPACES),
    }
    attrs = {name: ds.attrs[name] for name in ("study", "config", "data")} | origin()
    found = results.dataset(variables, coords, attrs | {"wall_seconds": time.monotonic() - begun}, kind="symmetry")
    results.save(found, workdir / "symmetry.nc")
    return found


def moments(run: xr.Dataset) -> tuple[dict[str, int], dict[str, int]]:
    """The steps of a run's moments among its kept snapshots, and of the snapshot before each (the start has none)."""
    steps = run.full_step.values.tolist()
    v1 = run.cosine.sel(source="weight", space="input", rank=1, step=steps).isel(matrix=0).mean("pair").values
    level, peak = float(run.cosine_null.sel(space="input")[0]), int(np.nanargmax(v1))
    down = [i for i in range(peak + 1, len(steps)) if v1[i] <= (v1[peak] + level) / 2]
    half = down[0] if down else int(np.abs(np.asarray(steps) - (steps[peak] + steps[-1]) / 2).argmin())
    chosen = dict(zip(results.MOMENTS, (0, peak, half, len(steps) - 1)))
    return {name: steps[i] for name, i in chosen.items()}, {name: steps[i - 1] for name, i in chosen.items() if i > 0}


def of_run(pack: Path, index: int, config: ConfigDict, run: xr.Dataset, x_NI: np.ndarray, y_N: np.ndarray) -> dict[str, Any]:
    """Every variable of `results.SYMMETRY` of one run, without its run axis; NaN throughout for a run that did not finish."""
    families = (*symmetry.FAMILIES, RANDOM)
    known = symmetry.symmetries(config.model)
    section = FrozenConfigDict(config.model)
    directions = (len(results.MOMENTS), len(families), DRAWS)
    motion = (len(results.MOMENTS), len(ALGEBRAS))
    shapes = dict.fromkeys(symmetry.Response._fields, directions)
    shapes |= dict.fromkeys(("motion_share", "motion_random", "motion_unsolved"), motion)
    shapes |= {"moment_step": directions[:1], "gauge_distance": (directions[0], len(results.GAUGES))}
    found: dict[str, Any] = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
    found["gauge_continuity"] = np.full((directions[0], len(results.GAUGES), len(results.SPACES)), np.nan)
    found["exact"] = np.asarray([family in known for family in families], np.int8)
    if str(run.status.values) != "finished":
        return found
    model = mlp.build(config.model, images.PIXELS, images.CLASSES)
    form = symmetry.Form(float(config.model.residual), config.model.residual_scale)
    like = jax.eval_shape(model.init, jax.random.key(0))

    def weights(step: int, dtype: Any) -> dict[str, jax.Array]:
        kept = checkpoint.kept(pack, step, like)
        if set(kept) != {"input", "hidden", "readout"}:
            raise GcjaxError(
                f"{run.point.values!s} has {', '.join(kept)}; gcjax symmetry knows input, hidden and readout alone"
            )
        return {name: jnp.asarray(value[index], dtype) for name, value in kept.items()}

    steps, before = moments(run)
    peak = weights(steps["peak"], jnp.float32)
    for m, name in enumerate(results.MOMENTS):
        found["moment_step"][m] = steps[name]
        with jax.enable_x64(True):
            params = weights(steps[name], jnp.float64)
            for f, family in enumerate(families):
                for d in range(DRAWS):
                    along = _along(form, family, params, jax.random.key(100 * f + d))
                    for label, value in _response(section, form, along, params, x_NI, y_N)._asdict().items():
                        found[label][m, f, d] = value
        params = weights(steps[name], jnp.float32)
        if name in before:
            change = jax.tree.map(jnp.subtract, params, weights(before[name], jnp.float32))
            chance = symmetry.like(jax.random.key(m), change)
            for a, algebra in enumerate(ALGEBRAS):
                share, unsolved = _share(params, form, change, algebra)
                found["motion_share"][m, a], found["motion_unsolved"][m, a] = share, unsolved
                found["motion_random"][m, a] = _share(params, form, chance, algebra)[0]
        if config.model.activation == "none" and config.model.normalization == "none":
            for g, gauge in enumerate(results.GAUGES):
                moved = _undone(params, form, peak, gauge, jax.random.key(m))
                found["gauge_continuity"][m, g] = _continuity(model.stacks(moved)["hidden"])
                found["gauge_distance"][m, g] = symmetry.norm(jax.tree.map(jnp.subtract, moved, peak)) / symmetry.norm(peak)
    return found


def _along(form: symmetry.Form, family: str, params: Any, key: Any) -> Any:
    """A random direction of a family, or weights for a straight line, that moves the weights by their own norm a unit of t."""
    direction = symmetry.generators(key, "general" if family == RANDOM else family, params)
    moved = symmetry.tangent(params, form, direction)
    if family == RANDOM:
        direction = moved = symmetry.like(key, moved)  # as long in every array as a general move is
    return jax.tree.map(lambda x: x * symmetry.norm(params) / symmetry.norm(moved), direction)


@partial(jax.jit, static_argnums=(0, 1))
def _response(section: FrozenConfigDict, form: symmetry.Form, along: Any, params: Any, x_NI: Any, y_N: Any) -> Any:
    apply = mlp.build(section, images.PIXELS, images.CLASSES).apply
    if isinstance(along, dict):

        def path(t: Any) -> Any:
            return jax.tree.map(lambda w, x: w + t * x, params, along)

        far = path(FINITE)
    else:
        path, far = partial(symmetry.curve, params, form, along), symmetry.finite(params, form, along, FINITE)
    return symmetry.respond(path, far, lambda w: apply(w, x_NI), y_N)


_share = jax.jit(partial(symmetry.share_of_motion, iterations=ITERATIONS), static_argnums=(1, 3))


@partial(jax.jit, static_argnums=(1, 3))
def _undone(params: Any, form: symmetry.Form, peak: Any, gauge: str, key: Any) -> Any:
    shape = (len(params["hidden"]) + 1, *params["hidden"].shape[1:])
    if gauge == "none":
        return params
    start = jnp.broadcast_to(jnp.eye(shape[-1]), shape)
    if gauge == "random":
        start = jnp.linalg.qr(jax.random.normal(key, shape))[0]
    return symmetry.move(params, form, symmetry.gauges(params, form, peak, start, SWEEPS))


@jax.jit
def _continuity(w_LOI: jax.Array) -> jax.Array:
    t = spectra.triplets(w_LOI, "gram", 1)
    return jnp.stack([cosines(x)[:, 0].mean() for x in (t.v_LIK, t.u_LOK)])
