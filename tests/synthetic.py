"""Studies made up for tests: complete datasets of the results' schema whose curves are known beforehand."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy import special, stats

from gcjax import results

Array = NDArray[Any]
ELEMENTWISE = ("Res+ReLU", "Res+GELU", "Res+SiLU")
CLAIMS: dict[str, Any] = {
    "min_seeds": 3,
    "confidence": 0.95,
    "spike": 1.0,
    "no_residual": {"variants": ("NoRes+tanh", "NoRes+None"), "margin": 0.05, "twin_min": 0.5},
    "residual_linear": {
        "variant": "Res+None",
        "reference": "Res+ReLU",
        "peak_min": 0.9,
        "drop_min": 0.2,
        "behind_min": 0.2,
        "gradient_min": 0.75,
    },
    "residual_radial": {
        "variant": "Res+Radial",
        "reference": "Res+ReLU",
        "peak_min": 0.9,
        "drop_min": 0.2,
        "behind_min": 0.2,
    },
    "residual_elementwise": {"variants": ELEMENTWISE, "end_min": 0.9, "drop_max": 0.1},
    "concentration": {
        "activation": "Res+ReLU",
        "layernorm": "Res+LN+None",
        "both": "Res+LN+ReLU",
        "dominance_min": 0.3,
    },
    "gradient_first": {"variants": ("Res+None", "Res+Radial", *ELEMENTWISE), "gradient_min": 0.5, "margin": 0.05},
    "transfer": {"variants": ELEMENTWISE, "end_min": 0.5, "crossing": 0.5, "ratio_low": 0.5, "ratio_high": 2.0},
    "optimizer_free": {"upper": "Res+ReLU", "lower": ("Res+None", "Res+Radial"), "margin": 0.1, "min_settings": 2},
    "symmetry_breaking": {"lower": "Res+None", "variants": ELEMENTWISE, "margin": 0.2},
}
TRANSFORMER_CLAIMS: dict[str, Any] = {
    "min_seeds": 3,
    "confidence": 0.95,
    "spike": 8.0,
    "projections": {"variant": "SiLU", "margin": 0.1},
    "gate_ablation": {"with": "SiLU", "without": "None", "drop_min": 0.1, "stay_within": 0.1},
    "gradient_first": {"variants": ("SiLU", "None"), "gradient_min": 0.5, "margin": 0.05},
    "transfer": {"variants": ("SiLU",), "end_min": 0.5, "crossing": 0.5, "ratio_low": 0.5, "ratio_high": 2.0},
}
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
WIDTH, MLP_WIDTH = 256, 688


def chance(d: int) -> float:
    """Mean |cos| of two random directions in d dimensions."""
    return float(np.exp(special.gammaln(d / 2) - special.gammaln((d + 1) / 2)) / np.sqrt(np.pi))


CHANCE = chance(WIDTH)
SPEED = {
    "steps_per_second": 1.25,
    "tokens_per_second": 2560.0,
    "flops_per_token": 13418496.0,
    "model_flops_utilisation": 0.413,
}
STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 250, 500, 750, 1000, 1500, 2000, 2500, 3000, 3500, 4000)
FULL_STEPS = (0, 8, 64, 500, 2000, 4000)
SNAPSHOTS = {"finished": len(STEPS), "diverged": 11, "unfinished": 8}  # that a run of each status has


@dataclass(frozen=True)
class Point:
    """What the runs of one point look like; the defaults are a residual ReLU net's.

    `start`, `peak`, `end`: weight v1; `output`: weight u1 at the end; `others`: cosine of ranks 2..K; `gradient_start`,
    `gradient`: gradient v1 first and last; `transfer_start`, `transfer`: first, last; `ratio`: Frobenius update ratio
    where transfer crosses 0.5; `noise`: standard deviation between seeds; `statuses`: of the first seeds, the others
    finish; `spiked`: how many of the first seeds have a late loss spike. Where `space` is output, v1 and u1 change places;
    `matrices`: what differs in a matrix by its name.
    """

    variant: str
    swept: Mapping[str, Any] = field(default_factory=dict)
    start: float = CHANCE
    peak: float = 0.96
    end: float = 0.96
    output: float = 0.5
    others: float = 0.3
    gradient_start: float = 0.9
    gradient: float = 0.95
    transfer_start: float = CHANCE
    transfer: float = 0.9
    ratio: float = 1.0
    accuracy: float = 0.95
    noise: float = 0.004
    statuses: Sequence[str] = ()
    spiked: int = 0
    space: str = "input"
    matrices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def matrix(self, name: str) -> "Point":
        """The point as this matrix shows it."""
        return replace(self, **self.matrices.get(name, {}))

    def status(self, seed: int) -> str:
        """How the run with this seed ended."""
        return self.statuses[seed] if seed < len(self.statuses) else "finished"


def at_chance(variant: str, level: float = CHANCE) -> Point:
    """A point whose weights stay at `level` with its gradients, at chance in the output space and beyond rank 1."""
    blind = Point(variant, output=CHANCE, others=CHANCE, gradient_start=CHANCE, transfer=0.6)
    return replace(blind, peak=level, end=level, gradient=level)


def paper() -> list[Point]:
    """The paper's variants as they came out in trials: controls without residuals at init gain 1, the rest at 0.1."""
    residual = [
        Point("Res+None", end=0.52, gradient=0.94, noise=0.03, accuracy=0.91),
        Point("Res+Radial", end=0.4, gradient=0.4, noise=0.05, accuracy=0.92, spiked=2),
        Point("Res+ReLU"),
        Point("Res+GELU", peak=0.97, end=0.97),
        Point("Res+SiLU", peak=0.95, end=0.93),
        Point("Res+tanh", peak=0.97, end=0.26, gradient=0.59, noise=0.04),
        Point("Res+LN+None", peak=0.91, end=0.8, others=0.68, gradient=0.91),
        Point("Res+LN+ReLU", others=0.35, gradient=0.98),
        Point("Res+LNa+None", peak=0.91, end=0.8, others=0.68, gradient=0.91),
        Point("Res+LNa+ReLU", others=0.35, gradient=0.98),
    ]
    without = [at_chance("NoRes+tanh"), at_chance("NoRes+None"), at_chance("NoRes+ReLU", 0.45)]
    twin = Point("Res+tanh", end=0.4, gradient=0.6, noise=0.03)
    at_one = [replace(point, swept={"model.init_gain": 1.0}) for point in (*without, twin)]
    return [*at_one, *(replace(point, swept={"model.init_gain": 0.1}) for point in residual)]


def transformer(variant: str, matrices: Mapping[str, Mapping[str, Any]] | None = None) -> Point:
    """A transformer with the paper's pattern; `matrices`: what differs in a matrix."""
    blind = {"peak": CHANCE, "end": CHANCE, "others": CHANCE, "output": CHANCE}
    pattern = {"v": blind, "o": {"space": "output"}, "down": {"space": "output"}}
    own = {name: {**pattern.get(name, {}), **(matrices or {}).get(name, {})} for name in PROJECTIONS}
    return Point(variant, peak=0.8, end=0.8, output=CHANCE, others=0.2, matrices=own)


def ablated(variant: str = "None", **changes: Mapping[str, Any]) -> Point:
    """`transformer` with an MLP without activation: Gate and Up fall behind; `changes`: what else differs, by matrix."""
    fallen = {"peak": 0.75, "end": 0.4}
    return transformer(variant, {"gate": fallen, "up": fallen, **changes})


def study(
    points: Sequence[Point],
    *,
    seeds: int = 5,
    layers: int = 8,
    ranks: int = 4,
    matrices: Sequence[str] = ("hidden",),
    claims: Mapping[str, Any] | None = CLAIMS,
    language: bool = False,
) -> xr.Dataset:
    """A study of `points`, each with `seeds` runs; `claims=None` leaves the thresholds out of its config.

    In a `language` study losses are a language model's, and there is a throughput.
    """
    runs = [(point, seed) for point in points for seed in range(seeds)]
    by_matrix = []
    for matrix in matrices:
        made = [_run(point.matrix(matrix), seed, layers, ranks) for point, seed in runs]
        stacked = {name: np.stack([run[name] for run in made]).astype(np.float32) for name in made[0]}
        by_matrix.append(stacked | _nulls(matrix, len(runs), ranks, layers))
    variables: dict[str, Array] = {}
    for name, dims in results.SCHEMA.items():
        values = [stacked[name] for stacked in by_matrix]
        variables[name] = np.stack(values, dims.index("matrix")) if "matrix" in dims else values[0]
    if language:
        floor = np.float32(3.5)
        for name in ("loss", "loss_max", "test_loss"):
            variables[name] = floor + variables[name] * np.float32((np.log(4096) - floor) / 2.3)
    variables["flagged"] = np.nan_to_num(variables["flagged"]).astype(np.int8)
    swept = list(dict.fromkeys(path for point in points for path in point.swept))
    coords = {
        "point": ("run", [" ".join([p.variant, *(f"{k}={v}" for k, v in p.swept.items())]) for p, _ in runs]),
        "variant": ("run", [point.variant for point, _ in runs]),
        "seed": ("run", [seed for _, seed in runs]),
        "status": ("run", [point.status(seed) for point, seed in runs]),
        "model.activation": ("run", [point.variant.split("+")[-1].lower() for point, _ in runs]),
        **{path: ("run", [point.swept[path] for point, _ in runs]) for path in swept},
        "step": list(STEPS),
        "full_step": list(FULL_STEPS),
        "source": list(results.SOURCES),
        "matrix": list(matrices),
        "space": list(results.SPACES),
        "norm": list(results.NORMS),
        "quantile": list(results.QUANTILES),
        "rank": np.arange(1, ranks + 1),
    }
    attrs = {
        "study": "synthetic",
        "config": json.dumps(_config(points, language) | ({} if claims is None else {"claims": claims})),
        "sweep": json.dumps(["model.activation", *swept]),
        "versions": json.dumps({"gcjax": "0"}),
        "device": "none",
        "git_revision": "0000000",
        "data": json.dumps({"name": "synthetic"}),
        "throughput": json.dumps(SPEED if language else {"steps_per_second": None}),
        "wall_seconds": 1.0,
    }
    return results.dataset(variables, coords, attrs)


def _config(points: Sequence[Point], language: bool) -> dict[str, Any]:
    """A config whose own values are the first point's."""
    config: dict[str, Any] = {"model": {"activation": "none"} | ({"vocabulary": 4096} if language else {})}
    for point in points:
        for path, value in point.swept.items():
            section, name = path.split(".")
            config.setdefault(section, {}).setdefault(name, value)
    return config


def _rise(start: float, end: float, half_way: float) -> Array:
    """Over STEPS from exactly `start` to `end` in log time."""
    with np.errstate(divide="ignore"):
        return start + (end - start) * special.expit(2.5 * np.log(np.array(STEPS) / half_way))


def _run(point: Point, seed: int, layers: int, ranks: int) -> dict[str, Array]:
    """One run's variables without the axes `run` and `matrix`."""
    step, full, sources = np.array(STEPS, float), np.searchsorted(STEPS, FULL_STEPS), len(results.SOURCES)
    shift = point.noise * np.random.default_rng([*point.variant.encode(), seed]).standard_normal(6)
    undefined = np.where(step > 0, 0, np.nan)  # the update and the cumulative gradient are zero at step 0
    fall = np.clip((step - 700) / 3300, 0, 1) ** 0.7
    weight = _rise(point.start, point.peak, 20) + (point.end - point.peak + shift[0]) * fall + shift[1] / 4
    transfer = _rise(point.transfer_start, point.transfer, 60) + shift[3] + undefined
    leading = {
        "weight": weight,
        "update": weight + undefined,
        "gradient": _rise(point.gradient_start, 0.8 * point.gradient, 500) + shift[2],
        "cumulative_gradient": _rise(point.gradient_start, point.gradient, 40) + shift[2] + undefined,
    }
    profile = np.empty((len(step), sources, 2, 1, ranks))
    for i, name in enumerate(results.SOURCES):
        profile[:, i, 0, :, 0] = leading[name][:, None]
        profile[:, i, 0, :, 1:] = _rise(CHANCE, point.others, 30)[:, None, None]
        profile[:, i, 1] = _rise(CHANCE, point.output, 200)[:, None, None]
        profile[:, i] += 0 * leading[name][:, None, None, None]
    wave = 1 + 0.02 * np.cos(np.arange(layers - 1) + seed)
    cosine = np.abs(profile * (wave / wave.mean())[:, None]).clip(0, 1)
    distance = np.abs(np.subtract.outer(np.arange(layers), np.arange(layers)))
    near = cosine[full, ..., 0].mean(-1)[..., None, None]
    half = np.interp(0.5, np.maximum.accumulate(transfer[1:]), np.log(step[1:]))
    growth = point.ratio * np.exp(shift[4]) * (step / np.exp(half)) ** 0.6
    gap = np.tile((1.05 + _rise(0, 4 * max(point.end - point.others, 0), 200))[:, None, None], (1, sources, layers))
    loss = 0.05 + 2.25 * np.exp(-step / 150)
    spike = np.where((np.arange(len(step)) == len(step) - 5) & (seed < point.spiked), 3.0, 0.0)
    angle = np.arccos(np.clip(weight / weight.max(), 0, 1))
    run = {
        "cosine": cosine,
        "overlap": np.cumsum(cosine**2, -1) / np.arange(1, ranks + 1),
        "gram_alignment": 0.8 * cosine[full, ..., 0],
        "sigma2_alignment": 0.7 * cosine[full, ..., 0],
        "layer_cosine": np.maximum(near**distance, CHANCE) + 0 * near,
        "sigma": gap[..., None] * 0.9 ** np.arange(ranks),
        "gap": gap,
        "angle_bound": np.full(gap.shape, 1e-3),
        "flagged": (gap[..., 1:] < 1.01).astype(float),
        "transfer": np.tile(np.stack([transfer, CHANCE + undefined], -1)[..., None], (1, 1, layers)),
        "drift": np.tile(angle[:, None, None], (1, 2, layers)),
        "update_ratio": np.tile(np.stack([growth, 1.5 * growth], -1)[:, None], (1, layers, 1)),
        "loss": loss,
        "loss_max": np.maximum(1.5 * loss, spike),
        "test_loss": loss,
        "test_accuracy": _rise(0.1, point.accuracy, 50) + shift[5] / 10,
    }
    if point.space == "output":
        for name, value in run.items():
            dims = [dim for dim in results.SCHEMA[name][1:] if dim != "matrix"]
            run[name] = np.flip(value, dims.index("space")).copy() if "space" in dims else value
    lost = np.array(STEPS) > STEPS[SNAPSHOTS[point.status(seed)] - 1]
    for name, value in run.items():
        value[lost[full] if results.SCHEMA[name][1] == "full_step" else lost] = np.nan
    return run | {"spectrum": np.tile(0.97 ** np.arange(32), (sources, layers, 1))}


def _dimensions(matrix: str) -> tuple[int, int]:
    """Of its input and its output space."""
    return (MLP_WIDTH if matrix == "down" else WIDTH, MLP_WIDTH if matrix in ("gate", "up") else WIDTH)


def _nulls(matrix: str, runs: int, ranks: int, layers: int) -> dict[str, Array]:
    """The chance levels without the axis `matrix`; the mean over pairs by its normal limit."""
    quantiles, both = np.array(results.QUANTILES), _dimensions(matrix)
    spreads = [np.sqrt((1 / d - chance(d) ** 2) / (layers - 1)) for d in both]
    return {
        "cosine_null": np.array([chance(d) for d in both]),
        "cosine_null_quantile": np.stack([np.sqrt(stats.beta(0.5, (d - 1) / 2).ppf(quantiles)) for d in both]),
        "cosine_mean_null_quantile": np.stack(
            [chance(d) + spread * stats.norm.ppf(quantiles) for d, spread in zip(both, spreads)]
        ),
        "overlap_null": np.stack([np.arange(1, ranks + 1) / d for d in both]),
        "gram_null_quantile": np.tile(0.01 * stats.norm.ppf(quantiles), (runs, len(results.SOURCES), 2, 1)),
    }
