"""The paper's pattern as checks: which projection is continuous in which space, in one model or in the runs of a study."""

from collections.abc import Mapping

import xarray as xr

from gcjax.reporting import spaces
from gcjax.reporting.checks import Check, check
from gcjax.reporting.statistics import mean_interval


def checks(
    name: str, predicted: str, cosine: Mapping[str, xr.DataArray], chance: Mapping[str, float], margin: float, confidence: float
) -> list[Check]:
    """One projection's |cos| by space, over pairs or over runs, held against the prediction.

    Above chance by the margin in the predicted space, and above the other one there; at most the margin above chance in
    both where it is neither. `name` ends where the label of the space follows.
    """
    if predicted == "neither":
        return [
            check(
                f"{name}{label}",
                mean_interval(cosine[space], confidence),
                null=chance[space],
                at_most=chance[space] + margin,
            )
            for space, label in spaces.LABELS.items()
        ]
    own, other = spaces.LABELS[predicted], spaces.LABELS[spaces.other(predicted)]
    found = mean_interval(cosine[predicted], confidence)
    lead = mean_interval(cosine[predicted] - cosine[spaces.other(predicted)], confidence)
    return [
        check(f"{name}{own}", found, null=chance[predicted], at_least=chance[predicted] + margin),
        check(f"{name}{own} - {other}", lead, at_least=0.0),
    ]
