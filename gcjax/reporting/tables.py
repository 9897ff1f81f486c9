"""Claims and summary as tables: for the terminal (100 columns), Markdown and CSV."""

from collections.abc import Sequence
from dataclasses import astuple, fields, replace
from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gcjax.reporting.checks import UNDECIDED, Check
from gcjax.reporting.claims import Claim
from gcjax.reporting.summary import BASELINE, Row, headings

STYLES = {"reproduced": "green", "not reproduced": "red", "not tested": "yellow", "yes": "green", "no": "red"}
CHECK_WIDTHS = (1, 41, 22, 6, 11, 3, 9)
SUMMARY_WIDTHS = (12, 4, 3, 3, 4, 9, 4, 5, 4, 5, 4, 4, 4, 5, 5, 5, 4)
FREE = ("gap_end", "ratio_frobenius_end", "ratio_spectral_end", "perplexity_end")  # numbers without an upper end
FOLDED_WIDTH = 60  # characters: the names of more settings are left out
Cells = list[list[str]]


def number(value: float | None, digits: int) -> str:
    """A number for people; '-' where there is none."""
    return f"{value:z.{digits}f}" if value is not None and np.isfinite(value) else "-"


def free(value: float | None, digits: int) -> str:
    """A number without an upper end, in four characters at two digits: 1.05, 10.5, 105, 9875, 16k."""
    size = abs(value) if value is not None and np.isfinite(value) else 0.0
    if size >= 9999.5:
        return f"{size / 1e3:.0f}k"
    return number(value, max(digits - sum(size >= bound for bound in (9.995, 99.95)), 0))


def outcome(check: Check) -> str:
    """Whether the check passed, in a word."""
    if not check.decides:
        return "info"
    return "yes" if check.passed else "undecided" if check.detail.startswith(UNDECIDED) else "no"


def measured(check: Check) -> str:
    """The mean with its interval."""
    return f"{number(check.value, 3)} [{number(check.low, 3)}, {number(check.high, 3)}]"


def folded(claims: Sequence[Claim]) -> list[Claim]:
    """The same claims, those that no run tests for the same reason in several settings as one row."""
    rows = []
    for key, group in groupby(claims, lambda claim: (claim.id, claim.notes, claim.checks)):
        same = list(group)
        fold = len(same) > 1 and not key[2]
        named = ", ".join(claim.setting for claim in same)
        short = named if len(named) <= FOLDED_WIDTH else f"{len(same)} settings"
        rows += [replace(same[0], setting=short)] if fold else same
    return rows


def claims_table(claims: Sequence[Claim]) -> Group:
    """For the terminal: every claim, each setting with its verdict, and under it the checks and notes.

    Where a claim was judged in more than three settings, checks that passed are left to the files.
    """
    parts: list[RenderableType] = [_grid([["", "", "mean [interval]", "chance", "required", "n", ""]], CHECK_WIDTHS, 2)]
    for _, same in groupby(folded(claims), lambda claim: claim.id):
        rows = list(same)
        parts.append(Text.assemble(("\n" + rows[0].id, "bold"), f"  {rows[0].statement}"))
        brief = sum(bool(claim.checks) for claim in rows) > 3
        common = [note for note in rows[0].notes if brief and all(note in claim.notes for claim in rows)]
        parts += [Text(note, style="dim") for note in common]
        for claim in rows:
            parts.append(Text.assemble(f"{claim.setting}: ", (claim.verdict, f"bold {STYLES[claim.verdict]}")))
            cells = [
                ["", one.name, measured(one), number(one.null, 3), one.threshold, str(one.n), outcome(one)]
                for one in claim.checks
                if not (brief and one.passed)
            ]
            parts.append(_grid(cells, CHECK_WIDTHS, 2))
            remarks = [
                *(note for note in claim.notes if note not in common),
                *(f"{one.name}: {rest}" for one in claim.checks if (rest := one.detail.removeprefix(UNDECIDED).lstrip("; "))),
            ]
            parts += [Padding(Text(text, style="dim"), (0, 0, 0, 2)) for text in remarks]
    legend = "yes, no, undecided: the whole interval, none of it, part of it is as required; info: does not decide"
    return Group(*parts, Text(f"\n{legend}", style="dim"))


def summary_table(rows: Sequence[Row]) -> Group:
    """For the terminal: every setting with its chance levels and a line a point."""
    head, *body = summary_cells(rows, 2)
    parts: list[RenderableType] = [_grid([[name.replace(" ", "\n") for name in head]], SUMMARY_WIDTHS, 1)]
    for cells in body:
        alone = not any(cells[1:])
        parts.append(Text(f"\n{cells[0]}", style="bold") if alone else _grid([cells], SUMMARY_WIDTHS, 1))
    return Group(*parts, Text(f"† {BASELINE}" if any(row.baseline for row in rows) else ""))


def table(rows: Cells) -> Table:
    """Head and body for the terminal, columns as wide as they need to be."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for i, name in enumerate(rows[0]):
        made.add_column(name, justify="left" if i in (0, 1, len(rows[0]) - 1) else "right")
    for row in rows[1:]:
        made.add_row(*(Text(cell) for cell in row))
    return made


def _grid(rows: Cells, widths: Sequence[int], left: int) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    for i, width in enumerate(widths):
        table.add_column(width=width, justify="left" if i < left else "right")
    for row in rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    return table


def summary_cells(rows: Sequence[Row], digits: int) -> Cells:
    """Head and body for people: settings as rows of their own, each followed by its chance levels, then its points."""
    body: Cells = []
    named = headings(rows)
    for setting, group in groupby(rows, lambda row: row.setting):
        inside = list(group)
        nulls = {name: _mean([row.cells[name].null for row in inside]) for name in named}
        body.append([setting, *[""] * (3 + len(named))])
        body.append(["chance", "", "", "", *(_shown(name, level, digits) for name, level in nulls.items())])
        body += [_cells(row, digits) for row in inside]
    return [["variant", "runs", "div", "spk", *named.values()], *body]


def _mean(levels: Sequence[float | None]) -> float | None:
    known = [level for level in levels if level is not None]
    return sum(known) / len(known) if known else None


def _shown(name: str, value: float | None, digits: int) -> str:
    return free(value, digits) if name in FREE else number(value, digits)


def _cells(row: Row, digits: int) -> list[str]:
    total = row.finished + row.diverged + row.unfinished
    runs = str(total) if row.finished == total else f"{row.finished}/{total}"
    shown = {name: _shown(name, cell.found.value, digits) for name, cell in row.cells.items()}
    end = row.cells["weight_end"].found
    if np.isfinite(end.low):
        shown["weight_end"] += f"±{number((end.high - end.low) / 2, digits)}"
    counts = [str(count) if count else "" for count in (row.diverged, row.spiked)]
    return [row.variant + " †" * (row.baseline is not None), runs, *counts, *shown.values()]


def claims_csv(claims: Sequence[Claim]) -> list[list[Any]]:
    """One row a check, its columns the fields of `Check`; one row a claim without any."""
    names = [field.name for field in fields(Check)]
    body = []
    for claim in claims:
        known = [claim.id, claim.statement, claim.setting, claim.verdict]
        rows = [astuple(one) for one in claim.checks] or [("",) * len(names)]
        body += [[*known, *row, "; ".join(claim.notes)] for row in rows]
    return [["claim", "statement", "setting", "verdict", *names, "notes"], *body]


def summary_csv(rows: Sequence[Row]) -> list[list[Any]]:
    """One row a point, every measure with its interval, number of runs and chance level."""
    parts = [f"{name}{part}" for name in rows[0].cells for part in ("", "_low", "_high", "_n", "_chance")]
    body = []
    for row in rows:
        counts = [row.finished, row.diverged, row.unfinished, row.spiked]
        cells = [(c.found.value, c.found.low, c.found.high, c.found.n, c.null) for c in row.cells.values()]
        body.append(
            [
                row.matrix,
                row.space,
                row.setting,
                row.variant,
                *counts,
                row.baseline,
                *(value for cell in cells for value in cell),
            ]
        )
    head = [
        "matrix",
        "space",
        "setting",
        "variant",
        "finished",
        "diverged",
        "unfinished",
        "spiked",
        "positive_activation_baseline",
    ]
    return [[*head, *parts], *body]


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table of a head and a body."""
    head, *body = [[str(cell).replace("|", r"\|") for cell in row] for row in cells]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def claims_markdown(claims: Sequence[Claim]) -> str:
    """An overview of verdicts, then every claim with its checks."""
    rows = folded(claims)
    overview = [["claim", "in the paper", "setting", "verdict"]]
    for name, same in groupby(rows, lambda claim: claim.id):
        for i, claim in enumerate(same):
            once = ["", ""] if i else [name, claim.statement]
            overview.append([*once, claim.setting, f"**{claim.verdict}**"])
    parts = [markdown(overview)]
    for claim in rows:
        parts.append(f"### {claim.id}, {claim.setting}: {claim.verdict}\n\n{claim.statement}")
        if claim.checks:
            head = ["check", "mean [interval]", "chance", "required", "n", "passed", ""]
            body = [
                [one.name, measured(one), number(one.null, 3), one.threshold, str(one.n), outcome(one), one.detail]
                for one in claim.checks
            ]
            parts.append(markdown([head, *body]))
        if claim.notes:
            parts.append("\n".join(f"- {note}" for note in claim.notes))
    return "\n\n".join(parts)
