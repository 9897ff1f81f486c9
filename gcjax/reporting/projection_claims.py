"""The paper's claims about a transformer's projections that a study trained: the pattern, and what ablating the gate does.

Both read the end of training. Where the numbers peaked on the way, and when, is shown beside them and decides nothing: the
best moment of several is high by selection alone.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from gcjax.reporting import pattern, spaces
from gcjax.reporting.checks import Check, Setting

Rule = Mapping[str, Any]
LOSE = ("gate", "up")
STAY = ("q", "k", "o", "down")


def projections(setting: Setting, rule: Rule) -> list[Check]:
    """Every projection of the variant: mean over pairs in each run, interval over runs, against the paper's prediction."""
    variant, checks = rule["variant"], []
    for matrix, predicted in spaces.PREDICTED.items():
        one = setting.matrices[matrix]
        own = spaces.own(matrix)
        measures = {own: "weight_end", spaces.other(own): "weight_other_end"}
        cosine = {space: one.runs(variant)[name] for space, name in measures.items()}
        chance = {space: one.null(variant, name) for space, name in measures.items()}
        name = f"{variant}: {one.subject} weight "
        checks += pattern.checks(name, predicted, cosine, chance, rule["margin"], one.confidence)
    for matrix in (*LOSE, "v"):
        checks.append(_peak(setting.matrices[matrix], variant, "weight_peak"))
    return [*checks, _peak(setting.matrices["v"], variant, "weight_other_peak")]


def gate_ablation(setting: Setting, rule: Rule) -> list[Check]:
    """From the variant with the MLP's activation to that without, paired by seed: Gate and Up fall, the others stay."""
    pair, checks = (rule["with"], rule["without"]), []
    for matrix in LOSE:
        checks.append(setting.matrices[matrix].lead(*pair, "weight_end", at_least=rule["drop_min"]))
    bounds = {"at_least": -rule["stay_within"], "at_most": rule["stay_within"]}
    checks += [setting.matrices[matrix].lead(*pair, "weight_end", **bounds) for matrix in STAY]
    return checks + [_peak(setting.matrices[matrix], variant, "weight_peak") for matrix in LOSE for variant in pair]


def _peak(setting: Setting, variant: str, measure: str) -> Check:
    """The highest value on the way, and at which step."""
    steps = setting.runs(variant)[f"{measure}_step"].values
    first, last = f"{np.nanmin(steps):g}", f"{np.nanmax(steps):g}"
    detail = f"at step {first}" if first == last else f"at step {np.nanmedian(steps):g}, in single runs {first} to {last}"
    return setting.check(variant, measure, decides=False, detail=detail)
