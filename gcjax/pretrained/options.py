"""What the numbers of `gcjax measure` and `gcjax compress` depend on beside the checkpoint; without JAX, for the command line
reads it too."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from gcjax.errors import GcjaxError


def _option(default: Any, low: float, high: float, text: str, kind: type | None = None) -> Any:
    """A field that takes one value, or of a tuple several, each of `kind`."""
    kind = kind or type(default[0] if isinstance(default, tuple) else default)
    return dataclasses.field(default=default, metadata={"bounds": (low, high), "help": text, "kind": kind})


class _Bounded:
    """Raises `GcjaxError` for a value out of range, of which an option that takes several may have none."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value, (low, high) = getattr(self, field.name), field.metadata["bounds"]
            for one in value if isinstance(value, tuple) else (value,):
                if not (isinstance(one, str) or low <= one <= high):
                    raise GcjaxError(f"--{field.name.replace('_', '-')} {one} is outside {low}..{high}")


@dataclasses.dataclass(frozen=True)
class Options(_Bounded):
    """Of `gcjax measure`."""

    rank: int = _option(16, 2, 16, "leading singular triplets of every matrix")  # at most a block of Krylov iteration
    draws: int = _option(4, 2, 1000, "random frames for the null of the effective form")
    probes: int = _option(16, 2, 1024, "probes for the gram alignment of a large matrix")
    tolerance: float = _option(1e-4, 1e-7, 0.1, "angle to which a large matrix's leading vectors are computed, radians")
    exact_below: int = _option(768, 0, 10**9, "matrices up to this smaller dimension are decomposed whole")
    seed: int = _option(0, 0, 2**32 - 1, "of random frames, probes and starting vectors")


@dataclasses.dataclass(frozen=True)
class Compression(_Bounded):
    """Of `gcjax compress`."""

    windows: tuple[int, ...] = _option((2, 3, 4), 2, 10**6, "how many adjacent layers share a basis")
    ratios: tuple[float, ...] = _option(tuple(i / 10 for i in range(1, 10)), 0, 1, "shares of the parameters to keep: errors")
    tested: tuple[float, ...] = _option(
        (0.9, 0.8, 0.6), 0, 1, "shares of the parameters to keep: perplexity, in the first windows"
    )
    pruned: tuple[int, ...] = _option((1, 2, 4, 8), 1, 10**6, "how many layers to leave out")
    draws: int = _option(5, 2, 1000, "random sets of layers to leave out, of each number")
    files: tuple[str, ...] = _option((), 0, 0, "text and Parquet files, or patterns, in place of the asset wiki-summaries", str)
    calibration: int = _option(8192, 1, 10**9, "tokens whose activations weight the errors")
    held_out: int = _option(2048, 1, 10**9, "tokens of the perplexity")
    length: int = _option(256, 2, 10**6, "tokens of a sequence")
    valid_fraction: float = _option(0.05, 1e-6, 0.5, "of the documents that are held out, where the text has no split")
    ridge: float = _option(1e-6, 1e-9, 1.0, "added to second moments, in units of their mean eigenvalue")
    seed: int = _option(0, 0, 2**31 - 1, "of random frames, sets of layers and the choice of documents")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ratios", "tested"):
            for ratio in getattr(self, name):
                if not 0 < ratio < 1:
                    raise GcjaxError(f"--{name} {ratio:g} is outside (0, 1), the shares of the parameters to keep")
        for name in ("windows", "ratios", "tested", "pruned"):
            if not getattr(self, name) or len(set(getattr(self, name))) < len(getattr(self, name)):
                raise GcjaxError(f"--{name} needs one value at least, and each once")


QUICK = Compression(
    windows=(2,), ratios=(0.25, 0.5, 0.75), tested=(0.8,), pruned=(2, 4), draws=2, calibration=2048, held_out=1024
)


def add_to(verb: argparse.ArgumentParser, defaults: Any) -> None:
    """An option for each field of `defaults`; absent, it is None."""
    for field in dataclasses.fields(defaults):
        default, kind = getattr(defaults, field.name), field.metadata["kind"]
        several = isinstance(default, tuple)
        shown = (",".join(map(str, default)) or "none") if several else default
        verb.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=_several(kind) if several else kind,
            metavar=kind.__name__.upper() + (",..." if several else ""),
            help=f"{field.metadata['help']} (default: {shown})",
        )


def given(arguments: argparse.Namespace, defaults: Any) -> Any:
    """`defaults` with what the command line gives in their place."""
    named = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(defaults)}
    return dataclasses.replace(defaults, **{name: value for name, value in named.items() if value is not None})


def _several(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> tuple[Any, ...]:
        return tuple(kind(item) for item in text.split(",") if item)

    parse.__name__ = f"list of {kind.__name__}"  # argparse names it in its message
    return parse
