"""`gcjax compress`: a checkpoint -> what its geometry is worth: bases shared by adjacent layers, and layers left out.

WORKDIR/record.json   the checkpoint, the options and the text that this workdir belongs to
WORKDIR/parts/        what an interruption leaves: errors of a window, losses without some layers, the model half-way through
WORKDIR/roots/        of the second moments of what the projections are given; deleted at the end
WORKDIR/results.nc    the dataset (`gcjax.results.COMPRESSION`, `PERPLEXITY`)

Weights are read one window of one projection at a time. Losses need the model in memory, float32: every compressed model
goes through the layers with the others, window after window, so that no window is decomposed twice and none is kept.
"""

import dataclasses
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import track

from gcjax import results
from gcjax.errors import GcjaxError, Stopped
from gcjax.geometry import sharing
from gcjax.models import llama
from gcjax.pretrained import decoder, factored, files, pruning
from gcjax.pretrained.factored import Written
from gcjax.pretrained.opened import Opened, Running, Weights, open_model
from gcjax.pretrained.options import Compression
from gcjax.provenance import origin
from gcjax.results import CHOICES, PREDICTED, SCHEMES, SPACES
from gcjax.workdir import exclusive, load_part, open_workdir, save_part

T = TypeVar("T")
Part = Mapping[str, np.ndarray]
OBJECTIVES = ("frobenius", "activations")
_PATIENCE = 30.0  # seconds between lines where there is no terminal


def windows(depth: int, size: int) -> list[range]:
    """The layers in turn, `size` or one fewer at a time, as evenly as that goes."""
    return [range(part[0], part[-1] + 1) for part in np.array_split(np.arange(depth), -(-depth // size))]


def compress(
    model: str,
    workdir: str | os.PathLike[str],
    options: Compression | None = None,
    *,
    weights_only: bool = False,
    overwrite: bool = False,
    out: Written | None = None,
    stop: threading.Event | None = None,
    console: Console | None = None,
) -> xr.Dataset:
    """Measure what sharing and pruning cost `model` (see `sources.resolve`), write `results.nc` into `workdir` and return it.

    Interrupted at any moment, the same call resumes. Where the model cannot be run (an unknown family, no tokenizer, too
    little memory), and with `weights_only`, only the errors of weights are measured, and it says so.

    With `out`, the model compressed by the scheme of least perplexity is written too, in windows of the first size.

    Raises `GcjaxError` for a checkpoint that cannot be read, for options that do not fit it, a text that is too short, an
    `out` that is not new, and a workdir that belongs to something else (unless `overwrite`) or that another process works on;
    `Stopped`.
    """
    console, options, begun = console or Console(stderr=True), options or Compression(), time.monotonic()
    say = partial(console.print, highlight=False, markup=False)
    workdir, target = Path(workdir), Path(workdir) / "results.nc"
    opened = open_model(model, options, weights_only, say)
    if out is not None:
        out = _checked(out, options, opened)
    data = {} if opened.running is None else dict(opened.running.text.provenance)
    record = {
        "format": results.FORMAT,
        "fingerprint": files.fingerprint(opened.checkpoint),
        "options": dataclasses.asdict(options),
        "text": data.get("sha256", ""),
    }
    with exclusive(workdir, None, overwrite, say):
        open_workdir(workdir, record, overwrite, ("parts", "roots", "advice.json"))
        job = _Job(opened.weights, workdir, options, stop or threading.Event(), console)
        if target.exists():
            say(f"{target} is complete; nothing to measure (--overwrite begins anew)")
            found = results.load(target)
        else:
            variables, coords = _measure(job, opened.running)
            attributes = {
                "model": model,
                "family": opened.plan.family,
                "parameters": sum(math.prod(tensor.shape) for tensor in opened.checkpoint.tensors.values()),
                "fingerprint": record["fingerprint"],
                "notes": json.dumps(opened.notes),
                "options": json.dumps(record["options"]),
                "data": json.dumps(data),
                "wall_seconds": time.monotonic() - begun,
            }
            found = results.dataset(variables, coords, {**origin(), **attributes}, "compression")
            results.save(found, target)
        if out is not None and opened.running is not None:
            _write(job, opened.running, found, out)
        for folder in ("parts", "roots"):
            shutil.rmtree(workdir / folder, ignore_errors=True)
    return found


class _Job(NamedTuple):
    """What a call has to do, and where."""

    weights: Weights
    workdir: Path
    options: Compression
    stop: threading.Event
    console: Console

    def path(self, name: str) -> Path:
        return self.workdir / "parts" / f"{quote(name, safe='')}.npz"

    def root(self, name: str, place: int) -> Path:
        return self.workdir / "roots" / f"{name}-{place:04d}.npz"

    def each(self, what: str, items: Iterable[T], total: int) -> Iterable[T]:
        """`items` with progress shown, ending where it is asked to after one that is done."""
        begun = told = time.monotonic()
        for done, item in enumerate(track(items, what, total, console=self.console, disable=not self.console.is_terminal), 1):
            yield item
            if not self.console.is_terminal and (done == total or time.monotonic() - told > _PATIENCE):
                told = time.monotonic()
                self.console.print(f"{what}: {done}/{total}, {told - begun:.0f} s", highlight=False)
            if self.stop.is_set():
                raise Stopped(f"stopped on a signal with all it measured saved; the same command resumes from {self.workdir}")

    def parts(self, what: str, wanted: Mapping[str, Callable[[], Part]]) -> dict[str, Part]:
        """Each part by its name, made where it is not there yet."""
        todo = [name for name in wanted if not self.path(name).exists()]
        for name in self.each(what, todo, len(todo)):
            save_part(self.path(name), wanted[name]())
        return {name: load_part(self.path(name)) for name in wanted}


def _measure(job: _Job, running: Running | None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    options, depth = job.options, job.weights.depth
    if running is not None and max(options.pruned) >= depth:
        raise GcjaxError(f"--pruned {max(options.pruned)} leaves no layer of {depth}")
    influence_L = None if running is None else _calibrate(job, running)
    variables, coords = _errors(job, OBJECTIVES[: 1 if running is None else 2])
    coords |= {"matrix": list(job.weights.matrices), "choice": list(CHOICES)}
    if running is None or influence_L is None:
        return variables, coords
    coords |= {
        "tested": list(options.tested),
        "scheme": list(SCHEMES),
        "order": list(results.ORDERS),
        "pruned": list(options.pruned),
        "layer": list(range(depth)),
    }
    at = [coords["ratio"].index(ratio) for ratio in options.tested]
    variables |= _compressed(job, running, variables["advised"][1, :, 0, at].T)  # NumPy puts the listed axis first
    variables |= _pruned(job, running, influence_L)
    return variables, coords


def _checked(out: Written, options: Compression, opened: Opened) -> Written:
    """`out` with its ratio; raises `GcjaxError` before anything is measured where it cannot be written."""
    if opened.running is None:
        raise GcjaxError("--out needs a model that can be run; " + (opened.notes[-1] if opened.notes else "not --weights-only"))
    factored.check(out.out, opened.running.model)
    keep = sorted(options.tested)[len(options.tested) // 2] if out.keep is None else out.keep
    if keep not in options.tested:
        raise GcjaxError(
            f"--keep {keep:g} is not one of --tested {','.join(map(str, options.tested))}; measure it, or keep those"
        )
    return out._replace(keep=keep)


def _write(job: _Job, running: Running, found: xr.Dataset, out: Written) -> None:
    """The model compressed at one ratio, by the scheme that was measured to lose least."""
    _calibrate(job, running)  # what it left is gone where the results were complete
    assert out.keep is not None  # `_checked` sees to it
    advised = found.advised.isel(objective=-1, size=0).sel(ratio=out.keep)
    loss = found.nll_all.sel(tested=out.keep).mean("sequence")
    scheme = str(loss.scheme.values[int(loss.argmin())])
    chosen = {matrix: _chosen(matrix, scheme, CHOICES[int(advised.sel(matrix=matrix))]) for matrix in job.weights.matrices}
    listed, ratio = windows(job.weights.depth, job.options.windows[0]), out.keep

    def factors(matrix: str, window: range) -> sharing.Factors:
        return _factors(job, matrix, window, chosen[matrix], [ratio])[0]

    kept = factored.write(out.out, running.model, running.tokenizer, listed, job.each, factors, out.dense)
    dense = sum(
        running.model.layers[place][matrix].size for place in range(job.weights.depth) for matrix in job.weights.matrices
    )
    said = ", written out" if out.dense else ""
    job.console.print(f"{out.out}: {kept:,} of {dense:,} parameters of projections{said}; {scheme}, the scheme of least "
                      f"perplexity: {', '.join(f'{m} {c}' for m, c in chosen.items())}", highlight=False, markup=False,
                      soft_wrap=True)  # fmt: skip


def _calibrate(job: _Job, running: Running) -> np.ndarray:
    depth = job.weights.depth
    roots = [job.root(name, place) for name in set(llama.INPUT_OF.values()) for place in range(depth)]
    if not (job.path("influence").exists() and all(path.exists() for path in roots)):
        influence = []
        found = decoder.calibrate(running.model, running.text.calibration_BT, job.options.ridge)
        for place, one in enumerate(job.each("calibration, layers", found, depth)):
            influence.append(one.influence)
            for name, root_II in one.roots.items():
                save_part(job.root(name, place), {"root": root_II})
        save_part(job.path("influence"), {"influence": np.asarray(influence)})
    return load_part(job.path("influence"))["influence"]


def _roots(job: _Job, matrix: str, places: Iterable[int]) -> np.ndarray:
    return np.stack([load_part(job.root(llama.INPUT_OF[matrix], place))["root"] for place in places])


def _errors(job: _Job, objectives: Sequence[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The errors of every window, and which choice they advise."""
    options, weights = job.options, job.weights
    ratios = sorted({*options.ratios, *options.tested})
    listed = {size: windows(weights.depth, size) for size in options.windows}
    most = max(len(one) for one in listed.values())
    index = {
        (m, s, n): (matrix, window)
        for m, matrix in enumerate(weights.matrices)
        for s, size in enumerate(options.windows)
        for n, window in enumerate(listed[size])
    }
    wanted = {
        f"errors-{matrix}-{options.windows[key[1]]}-{key[2]}": partial(_of_window, job, matrix, window, ratios, objectives, key)
        for key, (matrix, window) in index.items()
    }
    parts = job.parts("windows", wanted)
    shape = (len(weights.matrices), len(options.windows), most, len(ratios), len(CHOICES))
    error, null = np.full((len(objectives), *shape), np.nan), np.full(shape, np.nan)
    for key, part in zip(index, parts.values()):
        error[:, *key], null[key] = part["error"], part["null"]
    ends = np.full((2, len(options.windows), most), -1, np.int32)
    for s, size in enumerate(options.windows):
        ends[:, s, : len(listed[size])] = np.transpose([(window[0], window[-1]) for window in listed[size]])
    variables = {
        "error": error.astype(np.float32),
        "null_error": null.astype(np.float32),
        "window_first": ends[0],
        "window_last": ends[1],
        "advised": np.argmin(np.nansum(error, axis=3), axis=-1).astype(np.int8),
    }
    coords = {"objective": list(objectives), "size": list(options.windows), "window": list(range(most)), "ratio": ratios}
    return variables, coords


def _of_window(
    job: _Job, matrix: str, window: range, ratios: Sequence[float], objectives: Sequence[str], key: tuple[int, ...]
) -> Part:
    places = [place for place in window if job.weights.has(matrix, place)]
    absent = np.full((len(ratios), len(CHOICES)), np.nan)
    if not places:
        return {"error": np.stack([absent] * len(objectives)), "null": absent}
    w_NOI = _stack(job, matrix, places)
    ranks = [sharing.ranks(w_NOI.shape, ratio) for ratio in ratios]

    def relative(curves: Mapping[str, np.ndarray]) -> np.ndarray:
        whole = curves["own"][0]
        if whole == 0:
            return absent
        return np.sqrt([[sharing.at(curves[choice], rank[choice]) / whole for choice in CHOICES] for rank in ranks])

    seed = int(np.random.SeedSequence([job.options.seed, *key]).generate_state(1)[0])
    null_NOI = sharing.random_frames(sharing.singular_values(w_NOI), w_NOI.shape[1:], seed)
    error = [
        relative(sharing.errors(w_NOI, None if name == "frobenius" else _roots(job, matrix, places))) for name in objectives
    ]
    return {"error": np.stack(error), "null": relative(sharing.errors(null_NOI))}


def _stack(job: _Job, matrix: str, places: Iterable[int]) -> np.ndarray:
    found = []
    for place in places:
        found.append(job.weights.read(matrix, place))
        if not np.isfinite(found[-1]).all():
            raise GcjaxError(f"{matrix} of layer {place} holds values that are not finite; it cannot be compressed")
    return np.stack(found)


def _chosen(matrix: str, scheme: str, advised: str) -> str:
    """The choice that a scheme makes for a projection."""
    space = PREDICTED[matrix]
    if scheme == "own" or (scheme != "advised" and space not in SPACES):
        return "own"
    return {"advised": advised, "predicted": space, "opposite": SPACES[space == SPACES[0]]}[scheme]


def _compressed(job: _Job, running: Running, advised_MR: np.ndarray) -> dict[str, np.ndarray]:
    """Losses of the model with one projection compressed, or all, window after window."""
    model, tokens_BT = running.model, running.text.held_out_BT
    matrices, tested = job.weights.matrices, job.options.tested
    single = [({matrix: choice}, r) for matrix in matrices for r in range(len(tested)) for choice in CHOICES]
    every = [
        ({matrix: _chosen(matrix, scheme, CHOICES[advised_MR[m, r]]) for m, matrix in enumerate(matrices)}, r)
        for r in range(len(tested))
        for scheme in SCHEMES
    ]
    variants = [({}, 0), *single, *every]  # the first is the model as it is
    path, listed = job.path("forward"), windows(job.weights.depth, job.options.windows[0])
    if path.exists():
        half = load_part(path)
        done, h_VBTD = int(half["done"]), half["states"]
    else:
        done, h_VBTD = 0, np.repeat(decoder.embed(model, tokens_BT)[None], len(variants), axis=0)
    for number in job.each("windows of compressed models", range(done, len(listed)), len(listed) - done):
        kernels = {matrix: _kernels(job, matrix, listed[number]) for matrix in matrices}
        for v, (chosen, r) in enumerate(variants):
            for n, place in enumerate(listed[number]):
                changed = {matrix: kernels[matrix][choice][r][n] for matrix, choice in chosen.items()}
                h_VBTD[v] = decoder.through(model, place, h_VBTD[v], changed)
        save_part(path, {"done": np.asarray(number + 1), "states": h_VBTD})
    loss_VB = np.stack([decoder.read_out(model, h_BTD, tokens_BT) for h_BTD in h_VBTD])
    return {
        "nll_dense": loss_VB[0],
        "nll": loss_VB[1 : 1 + len(single)].reshape(len(matrices), len(tested), len(CHOICES), -1),
        "nll_all": loss_VB[1 + len(single) :].reshape(len(tested), len(SCHEMES), -1),
    }


def _kernels(job: _Job, matrix: str, window: range) -> dict[str, list[np.ndarray]]:
    """For each choice and tested ratio the kernels `[N, in, out]` of a window, float32."""
    made = {choice: _factors(job, matrix, window, choice, job.options.tested) for choice in CHOICES}
    return {
        choice: [np.ascontiguousarray(one.dense().swapaxes(1, 2), np.float32) for one in every]
        for choice, every in made.items()
    }


def _factors(job: _Job, matrix: str, window: range, choice: str, ratios: Sequence[float]) -> list[sharing.Factors]:
    w_NOI, root_NII = _stack(job, matrix, window), _roots(job, matrix, window)
    ranks = [max(int(sharing.ranks(w_NOI.shape, ratio)[choice]), 1) for ratio in ratios]
    return sharing.factors(w_NOI, choice, ranks, root_NII)


def _pruned(job: _Job, running: Running, influence_L: np.ndarray) -> dict[str, np.ndarray]:
    """Losses without one layer, and without several by each order and at random."""
    model, options, depth = running.model, job.options, job.weights.depth
    tokens_BT, before = running.text.held_out_BT, []

    def without(removed_L: np.ndarray) -> Part:
        if not before:  # made once, and only where something is still to be done
            before.append(decoder.embed(model, tokens_BT))
            for place in range(depth):
                before.append(decoder.through(model, place, before[-1]))
        first = int(np.argmax(removed_L)) if removed_L.any() else depth
        h_BTD = before[first]
        for place in range(first, depth):
            h_BTD = h_BTD if removed_L[place] else decoder.through(model, place, h_BTD)
        return {"nll": decoder.read_out(model, h_BTD, tokens_BT)}

    def name(removed_L: np.ndarray) -> str:
        return f"without-{int(''.join(map(str, removed_L)), 2):x}"

    def losses(what: str, removed_SL: np.ndarray) -> np.ndarray:
        found = job.parts(what, {name(removed_L): partial(without, removed_L) for removed_L in removed_SL})
        return np.stack([found[name(removed_L)]["nll"] for removed_L in removed_SL])

    one_LB = losses("without one layer", np.eye(depth, dtype=np.int8))
    dense_B = losses("the model as it is", np.zeros((1, depth), np.int8))[0]
    continuity = job.parts(
        "continuity",
        {"continuity": lambda: {"score": pruning.continuity(range(depth), job.weights.matrices, job.weights.read)}},
    )
    score_AL = pruning.scores(continuity["continuity"]["score"], influence_L, one_LB.mean(axis=1) - dense_B.mean())
    sets = pruning.sets(score_AL, options.pruned, options.draws, options.seed)
    every = np.concatenate([sets[kind].reshape(-1, depth) for kind in ("removed", "removed_random")])
    loss_SB = losses("without several layers", every)
    split = len(results.ORDERS) * len(options.pruned)
    return {
        **sets,
        "nll_without": one_LB,
        "score": score_AL,
        "nll_pruned": loss_SB[:split].reshape(len(results.ORDERS), len(options.pruned), -1),
        "nll_random": loss_SB[split:].reshape(options.draws, len(options.pruned), -1),
    }
