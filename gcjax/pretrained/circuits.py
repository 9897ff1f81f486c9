"""The rotation-free products of attention: OV, `W_O W_V`, and QK, `W_Q^T W_K`, head by head, OV also summed over heads.

Any orthogonal change of frame inside a head leaves them as they are, so they tell whether a projection's low continuity is
only a choice of such frames. Conventions: `W_O W_V` maps the residual stream ("input", v) to what heads write into it
("output", u); `W_Q^T W_K` maps the side of the keys ("input", v) to that of the queries ("output", u). Query head h uses
key/value head `h // (H / N)`. Raw weights alone: no norm gains, biases or q/k norms; QK at position difference 0, where
rotary embeddings cancel. GGUF's order of W_q's and W_k's rows (`Plan.rotary_permuted`) is one permutation inside every head,
of both alike, and drops out of the product too.

No D x D product is ever formed: `A B^T` of tall A and B has the singular values of the small core `R_A R_B^T` of their QR
factors (Golub and Van Loan, Matrix Computations, 8.6), in float64 on the host.

Heads have no identity across layers: those of adjacent layers are matched one to one so that the sum of their scores, the
mean of both spaces' |cos|, is largest. Their null keeps each layer's heads as they lie to one another and puts the two
layers' spaces into random (Haar) relative frames, which are matched in the same way.

A portrait of a layer (all float32):

| name | shape | what |
|---|---|---|
| u, s, v | D K, K + 1, D K | leading triplets of OV summed over heads |
| CIRCUIT/u, CIRCUIT/v, CIRCUIT/gap | H D, H D, H | of each head's ov or qk: leading vectors, s_1 / s_2 |

What is zero or not finite has NaN there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from gcjax import results
from gcjax.geometry import nulls
from gcjax.geometry.continuity import FLAG_GAP
from gcjax.pretrained.architectures import Heads, Matrix, Plan
from gcjax.pretrained.options import Options
from gcjax.provenance import origin

PROJECTIONS = ("q", "k", "v", "o")
DRAWS = 200  # of random frames, a pair of layers
Layer = Mapping[str, np.ndarray]  # a portrait
Array = np.ndarray


class Factor(NamedTuple):
    """A tall matrix and the triangular factor of its QR decomposition."""

    x_DM: Float[Array, "D M"]
    r_RM: Float[Array, "R M"]  # R = min(D, M)


class Leading(NamedTuple):
    """The leading triplets of a product; NaN where it is zero or not finite, vectors also beyond its numerical rank."""

    u_OK: Float[Array, "O K"]
    s_S: Float[Array, "S"]  # S = K + 1: one more than vectors, for the gap
    v_IK: Float[Array, "I K"]


class Match(NamedTuple):
    """Heads of a layer with their partners in the layer before, in the first axis A = (input, output)."""

    head_M: Int[Array, "M"]
    partner_M: Int[Array, "M"]
    cosine_AM: Float[Array, "A M"]


def units(plan: Plan) -> dict[int, dict[str, Matrix]]:
    """The layers that have all of q, k, v and o, in order."""
    found: dict[int, dict[str, Matrix]] = {layer: {} for layer in plan.layers}
    for unit in plan.matrices:
        found[unit.layer][unit.projection] = unit
    return {layer: one for layer, one in found.items() if set(PROJECTIONS) <= set(one)}


def refusal(plan: Plan) -> str | None:
    """Why the circuits of a checkpoint cannot be measured, in a sentence; None where they can."""
    start = f"circuits are not measured: family {plan.family}"
    shapes = {unit.projection: unit.shape for unit in plan.matrices}
    if missing := [name for name in PROJECTIONS if name not in shapes]:
        return f"{start} has no plain {', '.join(missing)} here"
    if plan.heads is None:
        return f"{start} has an unknown number of attention heads here"
    query, key_value, _ = plan.heads
    if query % key_value:
        return f"{start} has {query} query heads, which do not share {key_value} key/value heads evenly"
    (rows, _), (_, columns) = shapes["v"], shapes["o"]
    if rows % key_value or rows // key_value * query != columns:
        return f"{start} has v {shapes['v']} and o {shapes['o']}, which do not fit {query} query and {key_value} value heads"
    if len(units(plan)) < 2:
        return f"{start} has fewer than two layers with all of q, k, v and o"
    return None


def factor(x_DM: Float[Array, "D M"]) -> Factor:
    """In float64; NaN where anything is not finite."""
    x_DM = np.asarray(x_DM, np.float64)
    if not np.isfinite(x_DM).all():
        return Factor(x_DM, np.full((min(x_DM.shape), x_DM.shape[1]), np.nan))
    return Factor(x_DM, _triangle(x_DM))


def _triangle(x_DM: Float[Array, "D M"]) -> Float[Array, "R M"]:
    return np.asarray(np.linalg.qr(x_DM, mode="r"))


def leading(left: Factor, right: Factor, rank: int) -> Leading:
    """The leading `rank` triplets of `left right^T`, never formed."""
    u_OK, s_S, v_IK = (np.full(shape, np.nan) for shape in ((len(left.x_DM), rank), rank + 1, (len(right.x_DM), rank)))
    core_RR = left.r_RM @ right.r_RM.T
    if not np.isfinite(core_RR).all():
        return Leading(u_OK, s_S, v_IK)
    x_RR, s_R, y_RR = np.linalg.svd(core_RR, full_matrices=False)
    rounding = np.finfo(np.float64).eps * max(core_RR.shape) * np.linalg.norm(left.r_RM) * np.linalg.norm(right.r_RM)
    if s_R[0] > rounding:
        s_S[: len(s_R)] = s_R[: rank + 1]
        own = s_R[:rank] > max(rounding, np.finfo(np.float32).eps * max(len(u_OK), len(v_IK)) * s_R[0])
        k = int(own.sum())
        # left right^T v = s u with v = Q_B y, and so left (R_B^T y) = s u: the Q factors are never needed.
        u_OK[:, :k] = left.x_DM @ (right.r_RM.T @ y_RR[:k].T) / s_R[:k]
        v_IK[:, :k] = right.x_DM @ (left.r_RM.T @ x_RR[:, :k]) / s_R[:k]
    return Leading(u_OK, s_S, v_IK)


def summed_ov(v_MI: Float[Array, "M I"], o_OM: Float[Array, "O _"], heads: Heads, rank: int) -> Leading:
    """Leading triplets of `sum_h W_O[h] W_V[h // (H/N)]`: the blocks of W_O that share a value head are summed first."""
    group = heads.query // heads.key_value
    o_ONGd = o_OM.reshape(len(o_OM), heads.key_value, group, -1)
    return leading(factor(o_ONGd.sum(axis=2, dtype=np.float64).reshape(len(o_OM), -1)), factor(v_MI.T), rank)


def per_head(
    lefts_H: Sequence[Float[Array, "O d"]], right_MI: Float[Array, "M I"]
) -> tuple[Float[Array, "H O"], Float[Array, "H I"], Float[Array, "H"]]:
    """u_1, v_1 and the gap of `lefts_H[h] W[h // (H/N)]` for every query head h; the rows of `right_MI` are the N heads W."""
    found = []
    key_value = len(right_MI) // lefts_H[0].shape[1]
    group = len(lefts_H) // key_value
    for n, right_dI in enumerate(np.split(right_MI, key_value)):
        right = factor(right_dI.T)
        found += [leading(factor(left_Od), right, 1) for left_Od in lefts_H[n * group : (n + 1) * group]]
    u_HO, v_HI = np.stack([one.u_OK[:, 0] for one in found]), np.stack([one.v_IK[:, 0] for one in found])
    return u_HO, v_HI, np.array([_gap(one.s_S) for one in found])


def _gap(s_S: Float[Array, "S"]) -> float:
    """s_1 / s_2: infinite for a product of rank one, NaN for one that could not be decomposed."""
    second = 0.0 if np.isnan(s_S[1]) else s_S[1]
    return float(s_S[0] / second) if second > 0 else float(s_S[0] * np.inf)


def draw(read: Mapping[str, Callable[[], Array]], heads: Heads, rank: int) -> dict[str, Array]:
    """The portrait of a layer; `read` gives each of its q, k, v and o, of which two are held at once."""
    found = _ov(read["v"](), read["o"](), heads, rank) | _qk(read["q"](), read["k"](), heads)
    return {name: np.asarray(x, np.float32) for name, x in found.items()}


def _ov(v_MI: Array, o_OM: Array, heads: Heads, rank: int) -> dict[str, Array]:
    summed = dict(zip("usv", summed_ov(v_MI, o_OM, heads, rank)))
    return summed | _named("ov", np.split(o_OM, heads.query, axis=1), v_MI)


def _qk(q_MI: Array, k_MI: Array, heads: Heads) -> dict[str, Array]:
    return _named("qk", np.split(q_MI.T, heads.query, axis=1), k_MI)


def _named(circuit: str, lefts_H: Sequence[Array], right_MI: Array) -> dict[str, Array]:
    return {f"{circuit}/{name}": x for name, x in zip(("u", "v", "gap"), per_head(lefts_H, right_MI))}


def match(cosine_AHJ: Float[Array, "A H J"]) -> tuple[Int[Array, "M"], Int[Array, "M"]]:
    """Rows and columns matched one to one, M = min(H, J), for the largest sum of the spaces' mean."""
    from scipy.optimize import linear_sum_assignment  # slow to import, and few measure circuits

    return linear_sum_assignment(cosine_AHJ.mean(axis=0), maximize=True)


def matched(x_AHD: Sequence[Float[Array, "_ _"]], y_AHD: Sequence[Float[Array, "_ _"]]) -> Match:
    """Heads of a layer, `y_AHD`, matched with those of the layer before, `x_AHD`; heads with NaN take no part."""
    (before, x), (own, y) = _alive(x_AHD), _alive(y_AHD)
    cosine_AHJ = np.stack([np.abs(b @ a.T) for a, b in zip(x, y)])
    rows, columns = match(cosine_AHJ)
    return Match(own[rows], before[columns], cosine_AHJ[:, rows, columns])


def matched_null(
    x_AHD: Sequence[Float[Array, "_ _"]], y_AHD: Sequence[Float[Array, "_ _"]], draws: int, rng: np.random.Generator
) -> Float[Array, "N A"]:
    """Mean matched |cos| in each space, of the same two layers' heads in random relative frames; one row a draw."""
    x, y = _alive(x_AHD)[1], _alive(y_AHD)[1]
    if not (len(x[0]) and len(y[0])):
        return np.full((draws, len(x)), np.nan)
    spaces = []
    for a_HD, b_JD in zip(x, y):
        # In an orthonormal basis of each layer's span, the other frame's rotation is a corner of a Haar matrix.
        a_RH, b_RJ = (_triangle(one.T) for one in (a_HD, b_JD))
        size = max(len(a_RH), len(b_RJ))
        corner_NRR = haar_corners(a_HD.shape[1], size, draws, rng)[:, : len(b_RJ), : len(a_RH)]
        spaces.append(np.abs(b_RJ.T @ corner_NRR @ a_RH))
    cosine_NAHJ = np.stack(spaces, axis=1)
    return np.stack([one[(slice(None), *match(one))].mean(axis=1) for one in cosine_NAHJ])


def haar_corners(d: int, r: int, draws: int, rng: np.random.Generator) -> Float[Array, "N r r"]:
    """Leading r x r corners of `draws` Haar-random orthogonal d x d matrices, whose cost hardly depends on d.

    The first r columns are `G C^-T` with G Gaussian `[d, r]` and `C C^T = G^T G`; what the rows beyond r add to `G^T G` is a
    Wishart matrix, drawn by its triangular factor (Bartlett 1933).
    """
    top = rng.standard_normal((draws, r, r))
    if d - r < r:
        rest = rng.standard_normal((draws, d - r, r))
    else:
        rest = np.triu(rng.standard_normal((draws, r, r)), 1)
        rest[:, range(r), range(r)] = np.sqrt(rng.chisquare(d - r - np.arange(r), (draws, r)))
    c = np.linalg.cholesky(top.swapaxes(1, 2) @ top + rest.swapaxes(1, 2) @ rest)
    return np.linalg.solve(c, top.swapaxes(1, 2)).swapaxes(1, 2)


def _alive(x_AHD: Sequence[Float[Array, "_ _"]]) -> tuple[Int[Array, "_"], list[Float[Array, "_ _"]]]:
    """The heads without NaN, and their vectors in float64."""
    alive = np.flatnonzero(np.all([np.isfinite(x_HD).all(axis=1) for x_HD in x_AHD], axis=0))
    return alive, [x_HD[alive].astype(np.float64) for x_HD in x_AHD]


def collect(plan: Plan, load: Callable[[int], Layer], options: Options, attributes: Mapping[str, Any]) -> xr.Dataset:
    """The dataset (`gcjax.results.CIRCUITS`) of a plan that is not refused; `load` gives a layer's portrait, and two are
    held at once."""
    own, heads = units(plan), plan.heads
    assert heads is not None
    layers, spaces = list(own), results.SPACES
    shapes = {name: unit.shape for name, unit in own[layers[0]].items()}
    dims = {"circuit": list(results.PRODUCTS), "space": list(spaces), "pair": layers[1:], "layer": layers,
            "rank": list(range(1, options.rank + 1)), "head": list(range(heads.query)),
            "quantile": list(results.QUANTILES)}  # fmt: skip
    variables = {
        name: np.full([len(dims[dim]) for dim in axes], 1 if "flagged" in name else -1 if name == "partner" else np.nan)
        for name, axes in results.CIRCUITS.items()
    }
    dimension = {"ov": (shapes["v"][1], shapes["o"][0]), "qk": (shapes["k"][1], shapes["q"][1])}
    variables["dimension"][:] = [dimension[circuit] for circuit in results.PRODUCTS]
    for a, d in enumerate(dimension["ov"]):
        variables["cosine_null"][a] = nulls.cosine_mean(d)
        variables["cosine_null_quantile"][a] = nulls.cosine_quantile(results.QUANTILES, d)
        variables["cosine_mean_null_quantile"][a] = nulls.cosine_mean_quantile(results.QUANTILES, d, len(layers) - 1)
    null_CPNA = np.full((len(results.PRODUCTS), len(layers) - 1, DRAWS, len(spaces)), np.nan)
    before: Layer | None = None
    for place, layer in enumerate(layers):
        one = load(layer)
        variables["sigma"][place] = one["s"][: options.rank]
        variables["gap"][place] = _gap(one["s"])
        for c, circuit in enumerate(results.PRODUCTS):
            variables["head_gap"][c, place] = one[f"{circuit}/gap"]
        if before is not None:
            _compare(before, one, place - 1, variables)
            for c, circuit in enumerate(results.PRODUCTS):
                x, y = (_vectors(portrait, circuit) for portrait in (before, one))
                null_CPNA[c, place - 1] = matched_null(x, y, DRAWS, np.random.default_rng([options.seed, layer, c]))
        before = one
    for c, null_PNA in enumerate(null_CPNA):
        null_PNA = null_PNA[np.isfinite(null_PNA[:, 0, 0])]
        if len(null_PNA):
            variables["head_null"][c] = null_PNA.mean(axis=(0, 1))
            variables["head_null_quantile"][c] = np.quantile(null_PNA, results.QUANTILES, axis=(0, 1)).T
            variables["head_mean_null_quantile"][c] = np.quantile(null_PNA.mean(axis=0), results.QUANTILES, axis=0).T
    kinds = {"flagged": np.int8, "head_flagged": np.int8, "partner": np.int16}
    typed = {name: value.astype(kinds.get(name, np.float32)) for name, value in variables.items()}
    return results.dataset(typed, dims, {**origin(), **attributes}, "circuits")


def _vectors(portrait: Layer, circuit: str) -> tuple[Float[Array, "H I"], Float[Array, "H O"]]:
    return portrait[f"{circuit}/v"], portrait[f"{circuit}/u"]


def _compare(before: Layer, one: Layer, pair: int, variables: Mapping[str, Array]) -> None:
    """Fill in what is measured of a pair of adjacent layers. The factored form is exact to rounding, so that the gap alone
    decides about flags."""
    for a, side in enumerate(("v", "u")):
        variables["cosine"][a, pair] = np.abs(np.einsum("dk,dk->k", before[side].astype(np.float64), one[side]))
    variables["flagged"][pair] = not all(_gap(portrait["s"]) >= FLAG_GAP for portrait in (before, one))
    for c, circuit in enumerate(results.PRODUCTS):
        found = matched(_vectors(before, circuit), _vectors(one, circuit))
        variables["partner"][c, pair, found.head_M] = found.partner_M
        variables["head_cosine"][c, :, pair, found.head_M] = found.cosine_AM.T
        sure_M = (one[f"{circuit}/gap"][found.head_M] >= FLAG_GAP) & (before[f"{circuit}/gap"][found.partner_M] >= FLAG_GAP)
        variables["head_flagged"][c, pair, found.head_M] = ~sure_M
