"""What the numbers of `gcjax measure` depend on beside the checkpoint."""

import dataclasses

from gcjax.errors import GcjaxError
from gcjax.geometry.krylov import BLOCK


@dataclasses.dataclass(frozen=True)
class Options:
    """Raises `GcjaxError` for a value out of range."""

    rank: int = 16  # leading singular triplets that are kept
    draws: int = 4  # random frames a matrix, for the null of the effective form
    probes: int = 16  # of a large matrix's gram alignment
    tolerance: float = 1e-4  # radians, of the leading vectors of a large matrix
    exact_below: int = 1024  # matrices up to this smaller dimension are decomposed whole
    seed: int = 0

    def __post_init__(self) -> None:
        bounds = {"rank": (2, BLOCK), "draws": (2, 1000), "probes": (2, 1024), "tolerance": (1e-7, 0.1),
                  "exact_below": (0, 10**9), "seed": (0, 2**32 - 1)}  # fmt: skip
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise GcjaxError(f"--{name.replace('_', '-')} {getattr(self, name)} is outside {low}..{high}")
