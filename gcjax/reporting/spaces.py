"""Input and output space: which of them each projection's continuity is read from, and what its vectors are called.

Numbers of one matrix are of its *own* space unless they say `other`. A matrix that the paper gives no space, V, and one
that is no projection, as in the MLP, is read in its input space.
"""

from collections.abc import Iterable

from gcjax.results import PREDICTED

PATTERN = "Q, K, Gate and Up are continuous in the input space, O and Down in the output space, V in neither."
LABELS = {"input": "v1", "output": "u1"}
SYMBOLS = {"input": "v₁", "output": "u₁"}


def own(matrix: str) -> str:
    """The space that a matrix's numbers are of."""
    return "output" if PREDICTED.get(matrix) == "output" else "input"


def other(space: str) -> str:
    """The space that is not `space`."""
    return "output" if space == "input" else "input"


def ordered(matrices: Iterable[str]) -> list[str]:
    """The projections in the order of their use in a layer, then whatever else there is."""
    names = list(matrices)
    return [name for name in PREDICTED if name in names] + [name for name in names if name not in PREDICTED]


def heading(matrix: str) -> str:
    """A matrix with the vectors that its numbers are of: `Gate v1`, `Down u1`."""
    return f"{matrix.capitalize()} {LABELS[own(matrix)]}"
