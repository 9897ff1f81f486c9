"""A config's sweep -> runs -> groups that share a compiled program -> packs that train side by side.

A run is one point with one seed. Runs that differ only in their seed and in `TRACED` fields share a program. A pack is up
to `vmap_width` runs of a group; packs depend on the config alone, never on what has already finished or on the machine's
device count, so a resumed study computes what the uninterrupted one would have.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict, FrozenConfigDict

from gcjax import config as configs
from gcjax.errors import GcjaxError, nearest

TRACED = (
    "model.init_gain",
    "model.init_std",
    "model.residual_scale",
    "model.activation_scale",
    "model.activation_shift",
    "model.negative_slope",
    "optim.lr",
    "optim.b1",
    "optim.b2",
    "optim.momentum",
    "optim.weight_decay",
)
# What makes up the sweep and the machine it runs on, not a run; the rest of a config is a run's own.
STUDY_FIELDS = ("points", "only", "seeds", "first_seed", "preset", "variant", "executor", "checkpoint", "claims")


class Run(NamedTuple):
    point: str
    variant: str
    seed: int
    config: ConfigDict  # the base with the point's changes


class Pack(NamedTuple):
    name: str
    static: FrozenConfigDict  # of all its runs, TRACED fields blanked: equal packs share a program
    runs: tuple[Run, ...]

    def traced(self) -> dict[str, list[float]]:
        """The traced hyperparameters, a list over runs for each dotted path."""
        return {path: [float(configs.get(run.config, path)) for run in self.runs] for path in traced(self.runs[0].config)}


def runs(config: ConfigDict) -> list[Run]:
    """Every run of the study, points in the config's order, each with all its seeds.

    A config without points is one point, itself. Raises `GcjaxError` for a name in `only` that is no point, for a field of
    a point that the config does not have, and for a study without seeds.
    """
    if config.seeds < 1:
        raise GcjaxError(f"seeds={config.seeds} leaves nothing to run; give at least 1")
    points = list(config.points) or [{"point": config.variant or "base"}]
    names = [point.get("point") for point in points]
    if None in names or len(set(names)) < len(names):
        raise GcjaxError(f"every point needs a name of its own, as 'point'; these have {', '.join(map(repr, names))}")
    for name in config.only:
        if name not in names:
            raise GcjaxError(f"only={name!r} is not a point of this study; {nearest(name, names)}")
    listed = []
    for name, point in zip(names, points):
        if config.only and name not in config.only:
            continue
        own = config.copy_and_resolve_references()
        with own.unlocked():
            del own.points, own.claims
        _apply(own, {key: value for key, value in point.items() if key != "point"}, name)
        listed += [Run(name, own.variant or name, config.first_seed + i, own) for i in range(config.seeds)]
    return listed


def _apply(config: Any, changes: Mapping[str, Any], point: str, prefix: str = "") -> None:
    for key, value in changes.items():
        if key not in config:
            raise GcjaxError(f"point {point!r} sets {prefix}{key}, which the config does not have; {nearest(key, config)}")
        if isinstance(value, Mapping) and isinstance(config[key], ConfigDict):
            _apply(config[key], value, point, f"{prefix}{key}.")
            continue
        try:
            config[key] = value
        except TypeError as error:
            was = config[key]
            raise GcjaxError(f"point {point!r} sets {prefix}{key}={value!r}; it must be like {was!r}") from error


def swept(listed: list[Run]) -> list[str]:
    """The dotted paths in which the runs differ, the seed and the variant's name aside."""
    if not listed:
        return []
    flat = [dict(configs.leaves(run.config)) for run in listed]
    return [path for path in flat[0] if path != "variant" and any(other[path] != flat[0][path] for other in flat)]


def packs(listed: list[Run], vmap_width: int) -> list[Pack]:
    """Runs grouped by program, each group cut into packs of `vmap_width` in the order of the runs."""
    groups: dict[FrozenConfigDict, list[Run]] = {}
    for run in listed:
        groups.setdefault(static(run.config), []).append(run)
    return [
        Pack(f"{g:03d}-{start:04d}", key, tuple(members[start : start + vmap_width]))
        for g, (key, members) in enumerate(groups.items())
        for start in range(0, len(members), vmap_width)
    ]


def static(config: ConfigDict) -> FrozenConfigDict:
    """The hashable part of a run's config: TRACED fields blanked, fields of the study left out."""
    plain = json.loads(configs.to_json(config))  # a frozen tuple and a frozen list are not equal
    kept = ConfigDict({key: value for key, value in plain.items() if key not in STUDY_FIELDS})
    for path in traced(config):
        configs.put(kept, path, 0.0)
    return FrozenConfigDict(kept)


def traced(config: Any) -> list[str]:
    """The TRACED fields that this config's model and optimizer have."""
    return [path for path in TRACED if path.partition(".")[2] in config[path.partition(".")[0]]]


def bind(frozen: FrozenConfigDict, traced: Mapping[str, Any]) -> ConfigDict:
    """`frozen` with its traced fields put back, as numbers or as tracers."""
    bound = ConfigDict(frozen.to_dict(), type_safe=False)
    for path, value in traced.items():
        configs.put(bound, path, value)
    return bound
