"""The hand-over between the JAX half and the reporting half: one `xarray.Dataset` a study or model, saved as netCDF.

A trained study's dataset (kind "study") has these variables (float32 unless noted; `SCHEMA` holds the same as data):

| variable | dims | what |
|---|---|---|
| cosine | run step source matrix space pair rank | `|<v_k, v'_k>|` (input) or `|<u_k, u'_k>|` (output) of adjacent layers |
| overlap | run step source matrix space pair rank | `||V_k^T V'_k||_F^2 / k`, `rank` = k |
| gram_alignment | run full_step source matrix space pair | cosine of the traceless Gram matrices |
| sigma2_alignment | run full_step source matrix space pair | sigma^2-weighted cosine over the whole spectrum |
| layer_cosine | run full_step source matrix space layer layer_other | leading-vector `|cos|` of any two layers |
| sigma | run step source matrix layer rank | leading singular values |
| gap | run step source matrix layer | s_1 / s_2 |
| angle_bound | run step source matrix layer | bound on the leading vectors' numerical error, radians |
| flagged (int8) | run step source matrix pair | 1 where either layer's bound or gap forbids trust, 0 elsewhere |
| transfer | run step matrix space layer | leading-vector `|cos|` of the weight with its own cumulative gradient |
| drift | run step matrix space layer | angle to the leading vector at the run's snapshot of highest continuity, radians |
| update_ratio | run step matrix layer norm | `||W_t - W_0|| / ||W_0||`, Frobenius and spectral |
| loss, loss_max | run step | training loss since the previous snapshot, mean and maximum, nats |
| test_loss, test_accuracy | run step | on held-out data: nats (an image, a token); fraction |
| spectrum | run source matrix layer singular | all singular values at the last snapshot, then NaN where others have more |
| cosine_null | matrix space | mean of `|cos|` of two random directions |
| cosine_null_quantile | matrix space quantile | its quantiles, one pair |
| cosine_mean_null_quantile | matrix space quantile | the same for the mean over all pairs of one run |
| overlap_null | matrix space rank | k / d |
| gram_null_quantile | run source matrix space quantile | gram alignment, mean over pairs: final spectra in Haar frames |
| containment | run full_step matrix space layer layer_other rank | `||V'_k^T v_1||^2`: of the weights' leading vector, in the |
| | | leading k-dimensional subspace of the other layer; `rank` = k |
| layer_overlap | run full_step matrix space layer layer_other rank | overlap, as above, of the weights of any two layers |
| activity | run step matrix layer quantity | measures of `gcjax.geometry.activity`, where the study takes them |

The last three are missing in results of earlier versions.

Coordinates on `run`: `point` (the sweep's name for it), `variant`, `seed`, `status` (finished, diverged, unfinished) and every
swept hyperparameter under its dotted config path. A diverged run keeps NaN from the snapshot at which it diverged on; NaN
cosines of a finite run belong to zero matrices (the update and the cumulative gradient at step 0). Attributes are strings or
numbers: `config`, `versions`, `data`, `throughput` and `sweep` (the swept paths) are JSON.

A measured checkpoint's dataset (kind "measurement"; `MEASURED`). `form` is raw (as stored) or effective (the norm's gains
folded in; equal to raw where there are none). A pair is labelled by its second layer, and is of the layer before it that has
this matrix:

| variable | dims | what |
|---|---|---|
| cosine, overlap | form matrix space pair rank | as above |
| gram_alignment | form matrix space pair | as above; of large matrices sketched |
| gram_error | form matrix space pair | its standard error; 0 where exact |
| sigma2_alignment | form matrix space pair | as above; of large matrices the leading ranks' part S of it |
| sigma2_missing | form matrix space pair | the whole is between S and S + this; 0 where exact |
| layer_cosine | form matrix space layer layer_other | as above |
| sigma | form matrix layer rank | as above |
| captured | form matrix layer | share of `||W||_F^2` in the leading ranks |
| gap, angle_bound | form matrix layer | as above |
| flagged (int8) | form matrix pair | as above; 1 too where a matrix is zero or not finite |
| method (int8) | form matrix layer | how it was decomposed: an index into METHODS; -1 where it was not |
| passes | form matrix layer | passes over the matrix by Krylov iteration; 0 where it was decomposed whole |
| rounding_angle | matrix space layer | rms turn of the leading raw vectors that storage may have made, radians |
| cosine_null | form matrix space | chance level: analytic, or of the effective form that of its gains in random frames |
| gram_null | form matrix space | of gram_alignment: 0, or of the effective form that of its gains in random frames |
| cosine_mean_null_quantile | form matrix space quantile | cosine_null's quantiles, for the mean over all pairs |
| overlap_null | matrix space rank | k / d |
| dimension | matrix space | d |

A series of checkpoints of one training run (kind "series") has the same variables with `step` in front.

Attributes: `model`, `family`, `parameters` (their number), `fingerprint`, `notes` (JSON list), `options` (JSON).

Beside it, in `circuits.nc`, the rotation-free products of its attention heads (kind "circuits"; `CIRCUITS`): OV, `W_O W_V`
(input: what is read; output: what is written), and QK, `W_Q^T W_K` (input: the keys' side; output: the queries'), of raw
weights. Pairs are labelled as above; those without `head_` are of OV summed over heads:

| variable | dims | what |
|---|---|---|
| cosine | space pair rank | as above |
| sigma | layer rank | as above |
| gap | layer | as above |
| flagged (int8) | pair | as above |
| cosine_null, cosine_null_quantile, cosine_mean_null_quantile | space; with quantile | as above |
| head_cosine | circuit space pair head | leading-vector `|cos|` of a head of the second layer with its partner in the first |
| partner (int16) | circuit pair head | that partner: heads are matched for the largest sum of both spaces' mean; -1: none |
| head_gap | circuit layer head | s_1 / s_2 |
| head_flagged (int8) | circuit pair head | 1 where either gap forbids trust, or there is no partner |
| head_null | circuit space | mean over heads of `|cos|`, of both layers' heads in random relative frames, matched likewise |
| head_null_quantile, head_mean_null_quantile | circuit space quantile | its quantiles, one pair; the mean over all pairs |
| dimension | circuit space | d |

Its attributes are a measurement's.

What sharing and pruning cost a checkpoint (kind "compression", `COMPRESSION`; with `PERPLEXITY` where the model could be run
on text). A window is of `size` adjacent layers or one fewer, `ratio` the share of its parameters that is kept:

| variable | dims | what |
|---|---|---|
| error | objective matrix size window ratio choice | relative error of a window's outputs: square root of the share lost |
| null_error | matrix size window ratio choice | frobenius, of the same spectra in random frames |
| window_first, window_last (int32) | size window | its layers, by place; -1: there is no such window |
| advised (int8) | objective matrix size ratio | the choice of least mean error over windows: an index into CHOICES |
| nll | matrix tested choice sequence | loss on held-out text, nats a token, of the model with that projection compressed |
| nll_all | tested scheme sequence | the same with all of them compressed |
| nll_dense | sequence | of the model as it is |
| nll_without | layer sequence | of the model without that layer |
| score | order layer | highest is removed first |
| nll_pruned, removed (int8) | order pruned sequence; layer | loss without so many layers; 1 at those removed |
| nll_random, removed_random (int8) | draw pruned sequence; layer | the same of random layers |

`objective`: frobenius, weights alone; activations, outputs on real inputs, for which `nll` is compressed, in windows of the
first `size`. `scheme`: each layer its own basis; shared in the space that the paper predicts; in the other one (V, of which it
predicts none, its own in both); as advised. `order`: mean continuity with the layers beside, in the predicted spaces; the last
but one first; least block influence (arXiv 2403.03853); least measured rise of the loss. Attributes: a measurement's, and
`data` (JSON): of the text.

Beside a study that kept its snapshots, in `symmetry.nc`, what `gcjax.training.orbits` measured (kind "symmetry"; `SYMMETRY`),
each run at four moments: start, the snapshot of highest continuity (peak), the first one half-way down from there to chance
(half; where none is so far down, half the time to the end), end. t is in units of the weights' norm:

| variable | dims | what |
|---|---|---|
| moment_step | run moment | the training step |
| loss | run moment family draw | training loss, on the images that the next four are of too, nats |
| slope | run moment family draw | dL/dt along a random direction of a family of moves |
| gauss_newton | run moment family draw | mean of g^T H g: g the logits' derivative, H the loss's second one by logits |
| curvature | run moment family draw | d^2 L/dt^2 along the curve of moves |
| finite | run moment family draw | L(t) - L(0) at t = 0.01 |
| exact (int8) | run family | 1 where the family leaves the run's function unchanged |
| motion_share | run moment algebra | share of the weights' change since the snapshot before that lies along such moves |
| motion_random | run moment algebra | the same of a random change with each array's norm |
| motion_unsolved | run moment algebra | relative residual at which its solver stopped: the share is at least that large |
| gauge_continuity | run moment gauge space | v1, u1: mean over pairs, as they are (none) and after undoing gauges |
| gauge_distance | run moment gauge | distance to the weights at the peak, over their norm |

`family`: those of `gcjax.geometry.symmetry`, and random (a straight line). `gauge`: none; the orthogonal matrices at every
boundary that bring the weights nearest to those at the peak, sought from the identity and from random ones.
"""

import io
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from gcjax.errors import GcjaxError

SOURCES = ("weight", "update", "gradient", "cumulative_gradient")
SPACES = ("input", "output")
NORMS = ("frobenius", "spectral")
QUANTILES = (0.025, 0.5, 0.975)
STATUSES = ("finished", "diverged", "unfinished")
FORMAT = 3

_PAIRS = ("run", "step", "source", "matrix", "space", "pair")
_LAYERS = ("run", "step", "source", "matrix", "layer")
SCHEMA: Mapping[str, tuple[str, ...]] = {
    "cosine": (*_PAIRS, "rank"),
    "overlap": (*_PAIRS, "rank"),
    "gram_alignment": ("run", "full_step", "source", "matrix", "space", "pair"),
    "sigma2_alignment": ("run", "full_step", "source", "matrix", "space", "pair"),
    "layer_cosine": ("run", "full_step", "source", "matrix", "space", "layer", "layer_other"),
    "sigma": (*_LAYERS, "rank"),
    "gap": _LAYERS,
    "angle_bound": _LAYERS,
    "flagged": ("run", "step", "source", "matrix", "pair"),
    "transfer": ("run", "step", "matrix", "space", "layer"),
    "drift": ("run", "step", "matrix", "space", "layer"),
    "update_ratio": ("run", "step", "matrix", "layer", "norm"),
    "loss": ("run", "step"),
    "loss_max": ("run", "step"),
    "test_loss": ("run", "step"),
    "test_accuracy": ("run", "step"),
    "spectrum": ("run", "source", "matrix", "layer", "singular"),
    "cosine_null": ("matrix", "space"),
    "cosine_null_quantile": ("matrix", "space", "quantile"),
    "cosine_mean_null_quantile": ("matrix", "space", "quantile"),
    "overlap_null": ("matrix", "space", "rank"),
    "gram_null_quantile": ("run", "source", "matrix", "space", "quantile"),
}
_LAYER_MAPS = ("run", "full_step", "matrix", "space", "layer", "layer_other", "rank")
OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "containment": _LAYER_MAPS,
    "layer_overlap": _LAYER_MAPS,
    "activity": ("run", "step", "matrix", "layer", "quantity"),
}
FORMS = ("raw", "effective")
METHODS = ("gram64", "krylov", "krylov+gram64")  # of gcjax.geometry.decompose
_FORM_PAIRS = ("form", "matrix", "space", "pair")
_FORM_LAYERS = ("form", "matrix", "layer")
MEASURED: Mapping[str, tuple[str, ...]] = {
    "cosine": (*_FORM_PAIRS, "rank"),
    "overlap": (*_FORM_PAIRS, "rank"),
    "gram_alignment": _FORM_PAIRS,
    "gram_error": _FORM_PAIRS,
    "sigma2_alignment": _FORM_PAIRS,
    "sigma2_missing": _FORM_PAIRS,
    "layer_cosine": ("form", "matrix", "space", "layer", "layer_other"),
    "sigma": (*_FORM_LAYERS, "rank"),
    "captured": _FORM_LAYERS,
    "gap": _FORM_LAYERS,
    "angle_bound": _FORM_LAYERS,
    "flagged": ("form", "matrix", "pair"),
    "method": _FORM_LAYERS,
    "passes": _FORM_LAYERS,
    "rounding_angle": ("matrix", "space", "layer"),
    "cosine_null": ("form", "matrix", "space"),
    "gram_null": ("form", "matrix", "space"),
    "cosine_mean_null_quantile": ("form", "matrix", "space", "quantile"),
    "overlap_null": ("matrix", "space", "rank"),
    "dimension": ("matrix", "space"),
}
PRODUCTS = ("ov", "qk")  # the values of `circuit`
CIRCUITS: Mapping[str, tuple[str, ...]] = {
    "cosine": ("space", "pair", "rank"),
    "sigma": ("layer", "rank"),
    "gap": ("layer",),
    "flagged": ("pair",),
    "cosine_null": ("space",),
    "cosine_null_quantile": ("space", "quantile"),
    "cosine_mean_null_quantile": ("space", "quantile"),
    "head_cosine": ("circuit", "space", "pair", "head"),
    "partner": ("circuit", "pair", "head"),
    "head_gap": ("circuit", "layer", "head"),
    "head_flagged": ("circuit", "pair", "head"),
    "head_null": ("circuit", "space"),
    "head_null_quantile": ("circuit", "space", "quantile"),
    "head_mean_null_quantile": ("circuit", "space", "quantile"),
    "dimension": ("circuit", "space"),
}
MOMENTS = ("start", "peak", "half", "end")
GAUGES = ("none", "identity", "random")
_ALONG = ("run", "moment", "family", "draw")
_MOTION = ("run", "moment", "algebra")
SYMMETRY: Mapping[str, tuple[str, ...]] = {
    "moment_step": ("run", "moment"),
    "loss": _ALONG,
    "slope": _ALONG,
    "gauss_newton": _ALONG,
    "curvature": _ALONG,
    "finite": _ALONG,
    "exact": ("run", "family"),
    "motion_share": _MOTION,
    "motion_random": _MOTION,
    "motion_unsolved": _MOTION,
    "gauge_continuity": ("run", "moment", "gauge", "space"),
    "gauge_distance": ("run", "moment", "gauge"),
}
CHOICES = ("own", "input", "output")  # of gcjax.geometry.sharing
SCHEMES = ("own", "predicted", "opposite", "advised")
ORDERS = ("continuity", "depth", "influence", "measured")
# The space in which a projection is continuous, according to the paper (arXiv 2605.04971).
PREDICTED = {"q": "input", "k": "input", "v": "neither", "o": "output", "gate": "input", "up": "input", "down": "output"}
_SHARED = ("matrix", "size", "window", "ratio", "choice")
COMPRESSION: Mapping[str, tuple[str, ...]] = {
    "error": ("objective", *_SHARED),
    "null_error": _SHARED,
    "window_first": ("size", "window"),
    "window_last": ("size", "window"),
    "advised": ("objective", "matrix", "size", "ratio"),
}
PERPLEXITY: Mapping[str, tuple[str, ...]] = {
    "nll": ("matrix", "tested", "choice", "sequence"),
    "nll_all": ("tested", "scheme", "sequence"),
    "nll_dense": ("sequence",),
    "nll_without": ("layer", "sequence"),
    "score": ("order", "layer"),
    "nll_pruned": ("order", "pruned", "sequence"),
    "removed": ("order", "pruned", "layer"),
    "nll_random": ("draw", "pruned", "sequence"),
    "removed_random": ("draw", "pruned", "layer"),
}
RUN_COORDS = ("point", "variant", "seed", "status")
_ORIGIN = ("format", "kind", "versions", "device", "git_revision", "wall_seconds")
ATTRIBUTES = (*_ORIGIN, "study", "config", "sweep", "data", "throughput")


class Kind(NamedTuple):
    """What a dataset of a kind must hold, and may."""

    schema: Mapping[str, tuple[str, ...]]
    coords: tuple[str, ...]
    attributes: tuple[str, ...]
    optional: Mapping[str, tuple[str, ...]] = {}


_MODEL = (*_ORIGIN, "model", "family", "parameters", "fingerprint", "notes", "options")
KINDS = {
    "study": Kind(SCHEMA, RUN_COORDS, ATTRIBUTES, OPTIONAL),
    "measurement": Kind(MEASURED, (), _MODEL),
    "series": Kind({name: ("step", *dims) for name, dims in MEASURED.items()}, ("step", "checkpoint"), _MODEL),
    "circuits": Kind(CIRCUITS, (), _MODEL),
    "compression": Kind(COMPRESSION, (), (*_MODEL, "data"), PERPLEXITY),
    "symmetry": Kind(SYMMETRY, RUN_COORDS, (*_ORIGIN, "study", "config", "data")),
}


def dataset(
    variables: Mapping[str, np.ndarray], coords: Mapping[str, Any], attrs: Mapping[str, Any], kind: str = "study"
) -> xr.Dataset:
    """Name the axes of `variables` after the kind's schema; raises `GcjaxError` where a name or an axis does not fit."""
    schema = {**KINDS[kind].schema, **KINDS[kind].optional}
    unknown = sorted(set(variables) - set(schema))
    if unknown:
        raise GcjaxError(f"results of kind {kind} have no variable {', '.join(unknown)}; gcjax/results.py lists them")
    data = {name: (schema[name], value) for name, value in variables.items()}
    result = xr.Dataset(data, coords=dict(coords), attrs={"format": FORMAT, "kind": kind, **attrs})
    return check(result, "these results")


def check(result: xr.Dataset, origin: str) -> xr.Dataset:
    """Return `result` when it follows the schema; raises `GcjaxError` naming `origin` and what is missing."""
    if result.attrs.get("format") != FORMAT:
        raise GcjaxError(f"{origin} is not a gcjax result of format {FORMAT}: its attribute 'format' is "
                         f"{result.attrs.get('format')!r}")  # fmt: skip
    kind = KINDS.get(str(result.attrs.get("kind")))
    if kind is None:
        raise GcjaxError(f"{origin} is of no kind that gcjax knows: {result.attrs.get('kind')!r}")
    missing = [f"attribute {name}" for name in kind.attributes if name not in result.attrs]
    missing += [f"coordinate {name}" for name in kind.coords if name not in result.coords]
    wanted = {**kind.schema, **{name: dims for name, dims in kind.optional.items() if name in result}}
    missing += [f"variable {name} over {dims}" for name, dims in wanted.items() if _dims(result, name) != dims]
    if missing:
        raise GcjaxError(f"{origin} is not a complete gcjax result; missing: {'; '.join(missing)}")
    return result


def _dims(result: xr.Dataset, name: str) -> tuple[str, ...] | None:
    return tuple(map(str, result[name].dims)) if name in result else None


def save(result: xr.Dataset, path: str | os.PathLike[str]) -> Path:
    """Write `result` as compressed netCDF, whole or not at all; raises `GcjaxError` when the disk refuses it."""
    path = Path(path)
    encoding = {str(name): {"zlib": True, "complevel": 4} for name, value in result.data_vars.items() if value.ndim}
    buffer = io.BytesIO()
    result.to_netcdf(buffer, engine="h5netcdf", encoding=encoding)  # HDF5 itself crashes on a full disk
    advice = "; free space or permissions, then run the same command again: the finished runs are kept"
    return write_whole(path, buffer.getbuffer(), advice)


def write_whole(path: Path, content: bytes | memoryview, advice: str = "") -> Path:
    """Write a file whole or not at all; raises `GcjaxError`, ending in `advice`, when the disk refuses it."""
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with open(handle, "wb") as file:
            file.write(content)
            os.fsync(handle)
        os.chmod(scratch, 0o644)  # mkstemp made it private
        os.replace(scratch, path)
    except OSError as error:
        raise GcjaxError(f"cannot write {path}: {error.strerror or error}{advice}") from error
    finally:
        if scratch is not None:
            Path(scratch).unlink(missing_ok=True)
    return path


def load(path: str | os.PathLike[str]) -> xr.Dataset:
    """Read a study's results into memory; raises `GcjaxError` when the file is missing, damaged or not ours."""
    path = Path(path)
    if path.is_dir():
        path = path / "results.nc"
    if not path.exists():
        raise GcjaxError(f"{path} does not exist; 'gcjax train' and 'gcjax measure' write it at their end")
    try:
        with xr.open_dataset(path, engine="h5netcdf") as handle:
            result = handle.load()
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise GcjaxError(f"{path} cannot be read as netCDF ({error})") from error
    return check(result, str(path))
