"""The portraits of all layers -> the dataset of a measurement (`gcjax.results.MEASURED`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from scipy import special

from gcjax import results
from gcjax.geometry import nulls, sketch
from gcjax.geometry.continuity import FLAG_ANGLE, FLAG_GAP, angle_bound, cosines, overlaps
from gcjax.geometry.sketch import Sketch
from gcjax.geometry.spectra import Triplets
from gcjax.pretrained.architectures import Matrix, Plan
from gcjax.pretrained.options import Options
from gcjax.pretrained.portrait import Portrait
from gcjax.pretrained.rounding import angle
from gcjax.provenance import origin

SIDES = ("v", "u")  # singular vectors in the input and in the output space
_ABSENT = {"flagged": 1, "method": -1}  # of a matrix that was not measured, where it is not NaN; these are int8


def collect(plan: Plan, load: Callable[[Matrix], Portrait], options: Options, attributes: Mapping[str, Any]) -> xr.Dataset:
    """One dataset of every matrix of the plan; `load` gives a portrait, and those of one projection are held at once.
    `attributes` go into it as they are."""
    matrices = list(dict.fromkeys(unit.projection for unit in plan.matrices))
    layers = sorted({unit.layer for unit in plan.matrices})
    dims = {"form": results.FORMS, "matrix": matrices, "space": results.SPACES, "pair": layers[1:], "layer": layers,
            "layer_other": layers, "rank": np.arange(1, options.rank + 1), "quantile": results.QUANTILES}  # fmt: skip
    variables: dict[str, np.ndarray] = {
        name: np.full([len(dims[dim]) for dim in axes], _ABSENT.get(name, np.nan), np.float32)
        for name, axes in results.MEASURED.items()
    }
    for m, matrix in enumerate(matrices):
        own = [unit for unit in plan.matrices if unit.projection == matrix]
        shape, portraits = own[0].shape, [load(unit) for unit in own]
        variables["dimension"][m] = shape[::-1]
        for a, d in enumerate(shape[::-1]):
            variables["overlap_null"][m, a] = nulls.overlap_mean(dims["rank"], d)
        places = np.searchsorted(layers, [unit.layer for unit in own])
        for place, portrait in zip(places, portraits):
            variables["rounding_angle"][m, :, place] = _rounding(portrait, shape)
        for f, form in enumerate(results.FORMS):
            stack = [_of_form(portrait, form) for portrait in portraits]
            for name, value in _stack(stack, shape, options).items():
                index = [places[1:] - 1 if dim == "pair" else places if dim.startswith("layer") else np.arange(size)
                         for dim, size in zip(results.MEASURED[name][2:], value.shape)]  # fmt: skip
                variables[name][f, m][np.ix_(*index)] = value
    variables |= {name: variables[name].astype(np.int8) for name in _ABSENT}
    return results.dataset(
        variables, {name: list(value) for name, value in dims.items()}, {**origin(), **attributes}, "measurement"
    )


def _of_form(portrait: Portrait, form: str) -> Portrait | None:
    """One form's part of a portrait, the raw one where there is no other; None for a matrix that could not be measured."""
    if portrait["state"] != "measured":
        return None
    form = form if f"{form}/u" in portrait else "raw"
    found = {name.partition("/")[2]: value for name, value in portrait.items() if name.startswith(f"{form}/")}
    drawn = {name: value for name, value in portrait.items() if name.startswith(("null/", "raw/"))}
    return found | (drawn if form == "effective" else {})


def _stack(stack: Sequence[Portrait | None], shape: tuple[int, int], options: Options) -> dict[str, np.ndarray]:
    """Every variable of one matrix and form, over its own layers; NaN (flagged: 1) where a layer could not be measured."""
    o, i = shape
    layers, rank = len(stack), min(options.rank, o, i)
    t = Triplets(
        jnp.asarray(np.stack([_padded(p, "u", (o, rank)) for p in stack])),
        jnp.asarray(np.stack([_padded(p, "s", (rank,)) for p in stack])),
        jnp.asarray(np.stack([_padded(p, "v", (i, rank)) for p in stack])),
        jnp.asarray(np.stack([_padded(p, "residual", ()) for p in stack])),
    )
    s_LK = np.asarray(t.s_LK, np.float64)
    energy_L = np.stack([_padded(p, "energy", ()) for p in stack]).astype(np.float64)
    gap_L, bound_L = s_LK[:, 0] / s_LK[:, 1], np.asarray(angle_bound(t))
    doubt_L = ~((bound_L <= FLAG_ANGLE) & (gap_L >= FLAG_GAP))
    share_LK = s_LK**2 / energy_L[:, None]
    void_LK = ~(s_LK > np.finfo(np.float32).eps * max(shape) * s_LK[:, :1])  # beyond the numerical rank
    lost_PK = np.where(void_LK[1:] | void_LK[:-1], np.nan, 0.0)
    cosine_APK, overlap_APK, layer_ALL = (np.asarray(x) for x in _compared(t.v_LIK, t.u_LOK))
    found = {
        "cosine": cosine_APK + lost_PK,
        "overlap": overlap_APK + lost_PK,
        "layer_cosine": layer_ALL,
        "sigma": s_LK,
        "captured": share_LK.sum(axis=1),
        "gap": gap_L,
        "angle_bound": bound_L,
        "flagged": (doubt_L[1:] | doubt_L[:-1]).astype(np.float32),
        "method": np.array([-1 if p is None else results.METHODS.index(str(p["method"])) for p in stack]),
        "passes": np.stack([_padded(p, "passes", ()) for p in stack]),
    }
    weights_PK = (share_LK[1:] + share_LK[:-1]) / 2
    aligned = np.full((4, 2, layers - 1), np.nan)  # gram, its error, sigma2, its missing part
    probes = [np.asarray(sketch.probes(d, options.probes, options.seed)) for d in (i, o)]
    for p, (a, b) in enumerate(zip(stack, stack[1:])):
        if a is None or b is None:
            continue
        if "gram" in b:
            aligned[:, :, p] = b["gram"], (0, 0), b["sigma2"], (0, 0)
            continue
        for s, (side, space) in enumerate(zip(SIDES, results.SPACES)):
            above, below = (Sketch(one[f"probed_{space}"], one[side], one["s"][:rank]) for one in (a, b))
            aligned[:2, s, p] = sketch.alignment(above, below, probes[s])
            aligned[2:, s, p] = weights_PK[p] @ cosine_APK[s, p], max(0.0, 1 - weights_PK[p].sum())
    found |= dict(zip(("gram_alignment", "gram_error", "sigma2_alignment", "sigma2_missing"), aligned))
    levels = [_null([None if p is None else p.get(f"null/{space}") for p in stack], d)
              for space, d in zip(results.SPACES, (i, o))]  # fmt: skip
    found["cosine_null"] = np.array([level for level, _ in levels])
    found["cosine_mean_null_quantile"] = np.array([quantiles for _, quantiles in levels])
    found["gram_null"] = np.array([_gram_null(stack, s, shape, probes[s]) for s in range(len(results.SPACES))])
    return found


def _gram_null(stack: Sequence[Portrait | None], s: int, shape: tuple[int, int], z_DN: np.ndarray) -> float:
    """Chance level of the mean gram alignment in space number `s`: what the gains give there in random frames, else 0."""
    space, side, d = results.SPACES[s], SIDES[s], shape[::-1][s]
    own = [p for p in stack if p is not None and f"null/{space}" in p]
    if len(own) < len(stack):
        return 0.0

    def fourth(p: Portrait) -> float:
        if "raw/fourth" in p:
            return float(p["raw/fourth"])
        x_DK = p[f"raw/{side}"]
        one = Sketch(p[f"raw/probed_{space}"], x_DK, p["raw/s"][: x_DK.shape[1]])
        return sketch.square_norm(one, z_DN) + float(p["raw/energy"]) ** 2 / d

    gain_LD, energy_L = np.stack([p["null/gain"] for p in own]), np.array([float(p["raw/energy"]) for p in own])
    return float(nulls.gram_alignment_of_gains(gain_LD, energy_L, np.array([fourth(p) for p in own])).mean())


def _rounding(portrait: Portrait, shape: tuple[int, int]) -> list[float]:
    """What storage may have moved the leading vectors by, (input, output)."""
    if portrait["state"] != "measured":
        return [np.nan, np.nan]
    eta, s_K, energy = float(portrait["rounding"]), portrait["raw/s"], float(portrait["raw/energy"])
    return [angle(eta, s_K, energy, min(shape), d) for d in shape[::-1]]


def _padded(portrait: Portrait | None, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The portrait's array cut to `shape`; NaN where there is no portrait."""
    if portrait is None:
        return np.full(shape, np.nan, np.float32)
    return np.asarray(portrait[name][tuple(map(slice, shape))], np.float32)


@jax.jit
def _compared(*spaces: jax.Array) -> tuple[jax.Array, ...]:
    with jax.default_matmul_precision("highest"):
        cosine = jnp.stack([cosines(x_LDK) for x_LDK in spaces])
        overlap = jnp.stack([overlaps(x_LDK) for x_LDK in spaces])
        return cosine, overlap, jnp.stack([jnp.abs(x_LDK[..., 0] @ x_LDK[..., 0].T) for x_LDK in spaces])


def _null(drawn: Sequence[np.ndarray | None], d: int) -> tuple[float, np.ndarray]:
    """Chance level of a pair's cosine, and quantiles of the mean over pairs: of the gains in random frames where they were
    drawn for every layer (`[N, D]` each), else of random directions in d dimensions."""
    vectors_LND = [x_ND for x_ND in drawn if x_ND is not None]
    if len(vectors_LND) < max(len(drawn), 2):
        return nulls.cosine_mean(d), nulls.cosine_mean_quantile(results.QUANTILES, d, max(len(drawn) - 1, 1))
    cosine_PN = np.abs(np.einsum("pnd,pnd->pn", np.stack(vectors_LND[1:]), np.stack(vectors_LND[:-1])))
    mean_N = cosine_PN.mean(axis=0)
    # A few draws give the mean and the spread; the mean over many pairs is nearly normal.
    return float(mean_N.mean()), mean_N.mean() + mean_N.std(ddof=1) * special.ndtri(results.QUANTILES)
