"""Render a study's results: claims and summary on the terminal, as Markdown and CSV, and the figures."""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xarray as xr
from matplotlib.figure import Figure
from rich.console import Console

from gcjax import results
from gcjax.errors import GcjaxError
from gcjax.reporting import figures, measures, panels, tables
from gcjax.reporting.claims import Claim, evaluate
from gcjax.reporting.summary import BASELINE, LEGEND, Row, summary

WIDTH = 100
DPI = 200


def report(path: str | os.PathLike[str], *, formats: Sequence[str] = ("svg", "png"), echo: bool = True) -> list[Path]:
    """Write `claims.md`, `claims.csv`, `summary.csv` and `figures/` beside a study's `results.nc`; return their paths.

    `path` is the study's directory or its results file; no `formats`, no figures; `echo` prints both tables. Needs no
    JAX, and works on a study with unfinished runs. Every file is written whole or not at all. Raises `GcjaxError` when
    the results are missing, damaged or foreign, a format is unknown, or a file cannot be written.
    """
    known = Figure().canvas.get_supported_filetypes()
    unknown = [name for name in formats if name not in known]
    if unknown:
        raise GcjaxError(f"figures cannot be written as {', '.join(unknown)}; choose from {', '.join(sorted(known))}")
    ds = results.load(path)
    claims, rows = evaluate(ds), summary(ds)
    if echo:
        _print(ds, claims, rows)
    drawn, skipped = figures.draw(ds) if formats else ({}, {})
    pictures = {name: " ".join(f"[{kind}](figures/{name}.{kind})" for kind in formats) for name in drawn}
    pictures |= {name: f"not drawn, {reason}" for name, reason in skipped.items()}
    files = {
        "claims.md": _markdown(ds, claims, rows, pictures).encode(),
        "claims.csv": _csv(tables.claims_csv(claims)),
        "summary.csv": _csv(tables.summary_csv(rows)),
    }
    files |= {f"figures/{name}.{kind}": _render(figure, kind) for name, figure in drawn.items() for kind in formats}
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    written = [results.write_whole(folder / name, content) for name, content in files.items()]
    for stale in (folder / "figures" / f"{name}.{kind}" for name in skipped for kind in formats):
        stale.unlink(missing_ok=True)  # of an earlier report, on other results
    return written


def _head(ds: xr.Dataset) -> str:
    counts = {status: int((ds.status == status).sum()) for status in results.STATUSES}
    ended = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    sure = measures.thresholds(ds)["confidence"]
    return f"{ds.sizes['run']} runs: {ended}. Means are over finished runs, in brackets their {100 * sure:.3g}% interval."


def _legend(ds: xr.Dataset) -> str:
    return LEGEND.format(rank=ds.sizes["rank"])


def _print(ds: xr.Dataset, claims: Sequence[Claim], rows: Sequence[Row]) -> None:
    console = Console(width=WIDTH)
    console.print(f"Study {ds.attrs['study']}. {_head(ds)}", markup=False, highlight=False)
    console.print(tables.claims_table(claims))
    console.print(tables.summary_table(rows))
    console.print(_legend(ds), style="dim", markup=False, highlight=False)


def _markdown(ds: xr.Dataset, claims: Sequence[Claim], rows: Sequence[Row], pictures: Mapping[str, str]) -> str:
    """`pictures`: a Markdown line for each figure, drawn or not."""
    origin = "\n".join(f"- {name}: `{ds.attrs[name]}`" for name in ("data", "device", "git_revision", "versions"))
    baseline = f"\n\n† {BASELINE}." if any(row.baseline for row in rows) else ""
    parts = [
        f"# Study {ds.attrs['study']}",
        f"{_head(ds)}\n\n{origin}",
        f"## Claims\n\n{tables.claims_markdown(claims)}",
        f"## Summary\n\n{tables.markdown(tables.summary_cells(rows, 3))}\n\n{_legend(ds)}{baseline}",
    ]
    if pictures:
        parts.append("## Figures\n\n" + "\n".join(f"- {name}: {picture}" for name, picture in pictures.items()))
    return "\n\n".join(parts) + "\n"


def _csv(rows: Sequence[Sequence[Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


@panels.styled
def _render(figure: Figure, kind: str) -> bytes:
    """The figure as a file's content; without a date, so that the same results give the same SVG."""
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=DPI, metadata={"Date": None} if kind == "svg" else None)
    return content.getvalue()
