"""The paper's claims as predicates over a study's results (arXiv 2605.04971).

A claim is a pure function of one setting's runs that returns checks; what they are held against stands in the config's
`claims` section, fixed before the study ran; a study is judged by the claims that have thresholds there. A *string* names a
variant that the claim needs, a *list of strings* variants of which those that ran are judged. A new claim is a function, a
section of thresholds and a line in `CLAIMS`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import xarray as xr

from gcjax.errors import GcjaxError
from gcjax.reporting import measures, projection_claims, spaces
from gcjax.reporting.checks import Check, Setting

Rule = Mapping[str, Any]
Verdict = Literal["reproduced", "not reproduced", "not tested"]
UNPREDICTED = "the paper predicts continuity of V in neither space; its numbers are of the input space"
GENERAL = ("min_seeds", "confidence", "spike")  # keys of the config's section that belong to no claim


@dataclass(frozen=True)
class Claim:
    """A claim of the paper in one setting: its checks, the verdict, what was missing and which runs did not finish."""

    id: str
    statement: str
    setting: str
    verdict: Verdict
    checks: tuple[Check, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Definition:
    """A claim as the paper states it.

    `across`: one verdict over all settings instead of one for each. `matrices`: those that it is about, together; other
    claims are judged matrix by matrix.
    """

    id: str
    statement: str
    checks: Callable[[Setting, Rule], list[Check]]
    across: bool = False
    matrices: tuple[str, ...] = ()

    @property
    def section(self) -> str:
        """The claim's section of thresholds in the config."""
        return self.id.replace("-", "_")


def no_residual(setting: Setting, rule: Rule) -> list[Check]:
    """Gradients and weights at chance; the gradients of the residual twin, where it ran, are not."""
    checks = []
    for variant in rule["variants"]:
        twin = variant.replace("NoRes", "Res", 1)
        ran = setting.runs(twin).sizes["run"] > 0
        note = "" if ran else f"no finished run of its residual twin {twin} in this setting"
        for measure, detail in (("cumulative_end", note), ("weight_end", "")):
            limit = setting.null(variant, measure) + rule["margin"]
            checks.append(setting.check(variant, measure, at_most=limit, detail=detail))
        if ran:
            checks.append(setting.check(twin, "cumulative_end", at_least=rule["twin_min"]))
    return checks


def _forms_then_loses(setting: Setting, rule: Rule, **how: Any) -> list[Check]:
    return [
        setting.check(rule["variant"], "weight_peak", at_least=rule["peak_min"], **how),
        setting.check(rule["variant"], "weight_drop", at_least=rule["drop_min"], **how),
        setting.lead(rule["reference"], rule["variant"], "weight_end", at_least=rule["behind_min"], **how),
    ]


def residual_linear(setting: Setting, rule: Rule) -> list[Check]:
    """Weights form continuity, lose it and end behind the reference, while the gradients keep theirs."""
    gradient = setting.check(rule["variant"], "cumulative_end", at_least=rule["gradient_min"])
    return [*_forms_then_loses(setting, rule), gradient]


def residual_radial(setting: Setting, rule: Rule) -> list[Check]:
    """The same of the weights under the radial activation; shown again without the runs whose loss spiked late."""
    checks = _forms_then_loses(setting, rule)
    if setting.runs(rule["variant"]).spiked.any():
        calm = _forms_then_loses(setting.without_spikes(), rule, decides=False)
        checks += [replace(check, name=f"{check.name}, unspiked") for check in calm]
    return checks


def residual_elementwise(setting: Setting, rule: Rule) -> list[Check]:
    """Continuity is high at the end, and little below its peak."""
    checks = []
    for variant in rule["variants"]:
        checks.append(setting.check(variant, "weight_end", at_least=rule["end_min"]))
        checks.append(setting.check(variant, "weight_drop", at_most=rule["drop_max"]))
    return checks


def concentration(setting: Setting, rule: Rule) -> list[Check]:
    """The first vector's lead over ranks 2..K: wide with an activation, narrow with LayerNorm alone, wide with both."""
    return [
        setting.check(rule["activation"], "dominance_end", at_least=rule["dominance_min"]),
        setting.check(rule["layernorm"], "dominance_end", at_most=rule["dominance_min"]),
        setting.check(rule["both"], "dominance_end", at_least=rule["dominance_min"]),
    ]


def gradient_first(setting: Setting, rule: Rule) -> list[Check]:
    """Before the first step gradients cohere and weights are at chance."""
    checks = []
    for variant in rule["variants"]:
        limit = setting.null(variant, "weight_start") + rule["margin"]
        checks.append(setting.check(variant, "gradient_start", at_least=rule["gradient_min"]))
        checks.append(setting.check(variant, "weight_start", at_most=limit))
    return checks


def transfer(setting: Setting, rule: Rule) -> list[Check]:
    """Weights end on the cumulative gradient's leading vector, from where the update is about as large as W_0."""
    checks, bounds = [], {"at_least": rule["ratio_low"], "at_most": rule["ratio_high"]}
    for variant in rule["variants"]:
        checks.append(setting.check(variant, "transfer_end", at_least=rule["end_min"]))
        checks += [setting.ratio_at_crossing(variant, norm, **bounds) for norm in ("frobenius", "spectral")]
    return checks


def optimizer_free(setting: Setting, rule: Rule) -> list[Check]:
    """The elementwise variant ends above the rotation-equivariant ones."""
    lower = rule["lower"]
    return [setting.lead(rule["upper"], variant, "weight_end", at_least=rule["margin"]) for variant in lower]


def symmetry_breaking(setting: Setting, rule: Rule) -> list[Check]:
    """Every activation that breaks the rotation symmetry ends ahead of the linear network; again without loss spikes."""
    checks = [setting.lead(name, rule["lower"], "weight_end", at_least=rule["margin"]) for name in rule["variants"]]
    calm, spiked = setting.without_spikes(), set(setting.numbers.variant.values[setting.numbers.spiked.values])
    for name, check in zip(rule["variants"], list(checks)):
        if spiked & {name, rule["lower"]}:
            again = calm.lead(name, rule["lower"], "weight_end", at_least=rule["margin"], decides=False)
            checks.append(replace(again, name=f"{check.name}, unspiked"))
    return checks


CLAIMS = (
    Definition(
        "no-residual",
        "Without residual connections gradients stay at chance, and weights form no continuity.",
        no_residual,
    ),
    Definition(
        "residual-linear",
        "With residuals alone gradients cohere; weights form continuity early, then lose it by rotational drift.",
        residual_linear,
    ),
    Definition(
        "residual-radial",
        "A nonlinear but rotation-equivariant activation, x tanh(norm(x)), does not keep it either.",
        residual_radial,
    ),
    Definition(
        "residual-elementwise",
        "Elementwise activations (ReLU, GELU, SiLU) break the rotational symmetry and keep it.",
        residual_elementwise,
    ),
    Definition(
        "concentration",
        "Activation concentrates continuity in the first vector, LayerNorm spreads it; together the first dominates.",
        concentration,
    ),
    Definition(
        "gradient-first",
        "Gradients cohere at initialization, before any weight does.",
        gradient_first,
    ),
    Definition(
        "transfer",
        "Weights take the cumulative gradient's structure once the update outgrows the initial weights, near ratio 1.",
        transfer,
    ),
    Definition(
        "optimizer-free",
        "The order of the variants is the same for every optimizer and initial scale.",
        optimizer_free,
        across=True,
    ),
    Definition(
        "symmetry-breaking",
        "Breaking the rotational symmetry is what keeps continuity: every activation that does so keeps it.",
        symmetry_breaking,
    ),
    Definition(
        "projections",
        spaces.PATTERN,
        projection_claims.projections,
        matrices=tuple(spaces.PREDICTED),
    ),
    Definition(
        "gate-ablation",
        "Without the MLP's activation Gate and Up lose their input-space continuity; Q, K, O and Down keep theirs.",
        projection_claims.gate_ablation,
        matrices=(*projection_claims.LOSE, *projection_claims.STAY),
    ),
)


def evaluate(ds: xr.Dataset) -> list[Claim]:
    """Every claim with thresholds, in every setting in which one of its variants ran; a single row, not tested, where none did.

    Several matrices are judged one by one, unless the claim is about them together. Raises `GcjaxError` where the config
    has thresholds for no claim, or for one that is not known.
    """
    rules = measures.thresholds(ds)
    unknown = set(rules) - {claim.section for claim in CLAIMS} - set(GENERAL)
    judged = [claim for claim in CLAIMS if claim.section in rules]
    if unknown:
        raise GcjaxError(f"the results' config sets thresholds for claims that are not known: {', '.join(sorted(unknown))}")
    if not judged:
        raise GcjaxError("the results' config sets thresholds for no claim in its section 'claims'")
    confidence, each = rules["confidence"], {}
    together: dict[str, dict[str, Setting]] = {}
    for matrix, of_matrix in measures.matrices(ds).items():
        numbers = measures.per_run(of_matrix, rules)
        for label in measures.distinct(numbers.setting):
            inside = numbers.isel(run=(numbers.setting == label).values)
            each[matrix, label] = Setting(measures.labelled(matrix, label), inside, confidence)
            named = Setting(label, inside, confidence, subject=matrix.capitalize())
            together.setdefault(label, {})[str(inside.attrs["matrix"])] = named
    whole = [replace(next(iter(of.values())), subject="", matrices=of) for of in together.values()]
    return [row for claim in judged for row in _judge(claim, whole if claim.matrices else list(each.values()), rules)]


@dataclass(frozen=True)
class _Outcome:
    """What one setting says: checks, what a verdict of *reproduced* lacks there, and what else a reader should know."""

    checks: tuple[Check, ...]
    lacking: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """A claim is a conjunction: one failed check settles it, whatever is missing; else what is missing does."""
        deciding = [check for check in self.checks if check.decides]
        if not all(check.passed for check in deciding):
            return "not reproduced"
        return "not tested" if self.lacking or not deciding else "reproduced"


def _judge(claim: Definition, settings: Sequence[Setting], rules: Rule) -> list[Claim]:
    rule = rules[claim.section]
    wanted = [name for names in _variants(rule).values() for name in names]
    covered = [setting for setting in settings if not set(wanted).isdisjoint(setting.variants)]
    outcomes = {setting.label: _outcome(claim, setting, rule, rules["min_seeds"]) for setting in covered}
    if not outcomes:
        outcomes = {"any": _Outcome((), (f"no run of {', '.join(wanted)}",), ())}
    elif claim.across:
        outcomes = {"all settings": _join(covered, outcomes, rule)}
    return [
        Claim(claim.id, claim.statement, label, one.verdict, one.checks, one.lacking + one.notes)
        for label, one in outcomes.items()
    ]


def _variants(rule: Rule) -> dict[str, list[str]]:
    lists = {key: names for key, names in rule.items() if isinstance(names, list)}
    return {key: [name] for key, name in rule.items() if isinstance(name, str)} | lists


def _outcome(claim: Definition, setting: Setting, rule: Rule, min_seeds: int) -> _Outcome:
    ran = setting.variants
    finished = {variant: setting.runs(variant).sizes["run"] for variant in ran}
    lacking, notes, judged = [], [], {}
    for key, names in _variants(rule).items():
        judged[key] = [name for name in names if name in ran and finished[name] >= min_seeds]
        missing = [name for name in names if name not in ran]
        if missing:
            (lacking if missing == names else notes).append(f"no run of {', '.join(missing)}")
        for name in names:
            if name not in ran:
                continue
            count = setting.count(name)
            if name not in judged[key]:
                lacking.append(count or f"{name}: {finished[name]} runs finished, {min_seeds} needed")
            elif count:
                notes.append(count)
    absent = [name for name in claim.matrices if name not in setting.matrices]
    if absent:
        lacking.append(f"no projection {', '.join(absent)}")
    checks = []
    if all(judged.values()) and not absent:
        lists = {key: names for key, names in judged.items() if isinstance(rule[key], list)}
        checks = claim.checks(setting, {**rule, **lists})
        if not claim.matrices and spaces.PREDICTED.get(setting.numbers.attrs["matrix"]) == "neither":
            notes.append(UNPREDICTED)
    few = [check for check in checks if check.decides and check.n < min_seeds]
    lacking += [f"{check.name}: {check.n} runs, {min_seeds} needed" for check in few]
    return _Outcome(tuple(check for check in checks if check not in few), tuple(lacking), tuple(notes))


def _join(settings: Sequence[Setting], outcomes: Mapping[str, _Outcome], rule: Rule) -> _Outcome:
    """One outcome of all settings; what is lacking in one of them is noted, as long as enough others were judged."""
    judged = [setting for setting in settings if outcomes[setting.label].checks]
    checks = [
        replace(check, name=f"{setting.label}: {check.name}") for setting in judged for check in outcomes[setting.label].checks
    ]
    notes = [f"{label}: {text}" for label, one in outcomes.items() for text in one.lacking + one.notes]
    kinds, needed = len({_optimizer_and_scale(setting) for setting in judged}), rule["min_settings"]
    lacking = () if kinds >= needed else (f"settings that differ in optimizer or init gain: {kinds}, {needed} needed",)
    return _Outcome(tuple(checks), lacking, tuple(notes))


def _optimizer_and_scale(setting: Setting) -> tuple[Any, ...]:
    swept = json.loads(setting.numbers.attrs["sweep"])
    doses = [path for path in swept if path.startswith("optim.") or path == "model.init_gain"]
    return tuple(setting.numbers[path].values[0] for path in doses)
