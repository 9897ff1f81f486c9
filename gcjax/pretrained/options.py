"""What the numbers of `gcjax measure` depend on beside the checkpoint; without JAX, for the command line reads it too."""

import dataclasses
from typing import Any

from gcjax.errors import GcjaxError


def _option(default: Any, low: float, high: float, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"bounds": (low, high), "help": text})


@dataclasses.dataclass(frozen=True)
class Options:
    """Raises `GcjaxError` for a value out of range."""

    rank: int = _option(16, 2, 16, "leading singular triplets of every matrix")  # at most a block of Krylov iteration
    draws: int = _option(4, 2, 1000, "random frames for the null of the effective form")
    probes: int = _option(16, 2, 1024, "probes for the gram alignment of a large matrix")
    tolerance: float = _option(1e-4, 1e-7, 0.1, "angle to which a large matrix's leading vectors are computed, radians")
    exact_below: int = _option(768, 0, 10**9, "matrices up to this smaller dimension are decomposed whole")
    seed: int = _option(0, 0, 2**32 - 1, "of random frames, probes and starting vectors")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, (low, high) = getattr(self, field.name), field.metadata["bounds"]
            if not low <= value <= high:
                raise GcjaxError(f"--{field.name.replace('_', '-')} {value} is outside {low}..{high}")
