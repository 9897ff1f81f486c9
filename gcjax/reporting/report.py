"""Render the results of a study or a measured model: tables on the terminal, as Markdown and CSV, and the figures."""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xarray as xr
from matplotlib.figure import Figure
from rich.console import Console, RenderableType
from rich.text import Text

from gcjax import results
from gcjax.errors import GcjaxError
from gcjax.reporting import circuits, figures, measures, panels, portraits, projections, tables
from gcjax.reporting.claims import Claim, evaluate
from gcjax.reporting.summary import BASELINE, legend, summary

WIDTH = 100
DPI = 200


def report(path: str | os.PathLike[str], *, formats: Sequence[str] = ("svg", "png"), echo: bool = True) -> list[Path]:
    """Write `claims.md`, `claims.csv`, `summary.csv` and `figures/` beside a study's `results.nc`; return their paths.

    `path` is the study's directory or its results file; no `formats`, no figures; `echo` prints both tables. Needs no
    JAX, and works on a study with unfinished runs. Every file is written whole or not at all. Raises `GcjaxError` when
    the results are missing, damaged or foreign, a format is unknown, or a file cannot be written.
    """
    check_formats(formats)
    ds, folder = results.load(path), Path(path) if Path(path).is_dir() else Path(path).parent
    products = circuits.beside(ds, folder)
    told = _study(ds) if ds.attrs["kind"] == "study" else _model(portraits.latest(ds), products)
    if echo:
        console = Console(width=WIDTH)
        for part in told.terminal:
            console.print(part, markup=False, highlight=False)
    draw = figures.draw if ds.attrs["kind"] == "study" else portraits.draw
    drawn, skipped = draw(ds) if formats else ({}, {})
    drawn |= {"circuits": circuits.figure(products)} if formats and products is not None else {}
    pictures = {name: " ".join(f"[{kind}](figures/{name}.{kind})" for kind in formats) for name in drawn}
    for reason in dict.fromkeys(skipped.values()):
        pictures[", ".join(name for name in skipped if skipped[name] == reason)] = f"not drawn, {reason}"
    files = {
        "claims.md": _markdown(told.markdown, pictures).encode(),
        "claims.csv": _csv(tables.claims_csv(told.claims)),
        "summary.csv": _csv(told.summary),
    }
    for name, figure in drawn.items():
        files |= {f"figures/{name}.{kind}": content for kind, content in _render(figure, formats).items()}
    written = [results.write_whole(folder / name, content) for name, content in files.items()]
    for stale in (folder / "figures" / f"{name}.{kind}" for name in skipped for kind in formats):
        stale.unlink(missing_ok=True)  # of an earlier report, on other results
    return written


def check_formats(formats: Sequence[str]) -> None:
    """Raises `GcjaxError` for a format in which figures cannot be written."""
    known = Figure().canvas.get_supported_filetypes()
    unknown = [name for name in formats if name not in known]
    if unknown:
        raise GcjaxError(f"figures cannot be written as {', '.join(unknown)}; choose from {', '.join(sorted(known))}")


@dataclass(frozen=True)
class Told:
    """What the results say: on the terminal, as Markdown after which the pictures follow, and as the rows of CSV files."""

    terminal: tuple[RenderableType, ...]
    markdown: tuple[str, ...]
    claims: Sequence[Claim]
    summary: list[list[Any]]


def _study(ds: xr.Dataset) -> Told:
    claims, rows = evaluate(ds), summary(ds)
    counts = {status: int((ds.status == status).sum()) for status in results.STATUSES}
    ended = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    sure = measures.thresholds(ds)["confidence"]
    head = f"{ds.sizes['run']} runs: {ended}. Means are over finished runs, in brackets their {100 * sure:.3g}% interval."
    head, explained = head + _speed(ds), legend(rows, ds.sizes["rank"])
    baseline = f"\n\n† {BASELINE}." if any(row.baseline for row in rows) else ""
    return Told(
        (f"Study {ds.attrs['study']}. {head}", tables.claims_table(claims), tables.summary_table(rows), Text(explained, "dim")),
        (
            f"# Study {ds.attrs['study']}",
            f"{head}\n\n{_origin(ds, 'data')}",
            f"## Claims\n\n{tables.claims_markdown(claims)}",
            f"## Summary\n\n{tables.markdown(tables.summary_cells(rows, 3))}\n\n{explained}{baseline}",
        ),
        claims,
        tables.summary_csv(rows),
    )


def _speed(ds: xr.Dataset) -> str:
    """How fast a language model's runs went, as a sentence; '' where that is not known."""
    found = json.loads(ds.attrs["throughput"])
    if "tokens_per_second" not in found:
        return ""
    used = found["model_flops_utilisation"]
    share = "" if used is None else f", {100 * used:.3g}% of the device's peak FLOP/s"
    return f" {found['tokens_per_second']:,.0f} tokens a second and run{share}."


def _model(ds: xr.Dataset, products: xr.Dataset | None) -> Told:
    claims, rows = projections.claims(ds), projections.rows(ds)
    size, layers = float(ds.attrs["parameters"]) / 1e6, ds.sizes["layer"]
    head = f"{ds.attrs['model']}: family {ds.attrs['family']}, {layers} layers, {size:,.0f}M parameters."
    notes = "\n".join(f"- {note}" for note in json.loads(ds.attrs["notes"]))
    table = projections.cells(rows)
    more = [] if products is None else circuits.cells(products)
    return Told(
        (
            *(head, tables.table(table), Text(projections.LEGEND, "dim")),
            *([tables.table(more), Text(circuits.LEGEND, "dim")] if more else []),
            tables.claims_table(claims),
        ),
        (
            f"# {ds.attrs['model']}",
            f"{head}\n\n{_origin(ds, 'fingerprint', 'options')}\n{notes}",
            f"## Projections\n\n{tables.markdown(table)}\n\n{projections.LEGEND}",
            *([f"## Circuits\n\n{tables.markdown(more)}\n\n{circuits.LEGEND}"] if more else []),
            f"## Claims\n\n{tables.claims_markdown(claims)}",
        ),
        claims,
        projections.csv(rows),
    )


def _origin(ds: xr.Dataset, *names: str) -> str:
    return "\n".join(f"- {name}: `{ds.attrs[name]}`" for name in (*names, "device", "git_revision", "versions"))


def _markdown(parts: Sequence[str], pictures: Mapping[str, str]) -> str:
    """`pictures`: a Markdown line for each figure, drawn or not."""
    listed = "\n".join(f"- {name}: {picture}" for name, picture in pictures.items())
    return "\n\n".join([*parts, *[f"## Figures\n\n{listed}"] * bool(pictures)]) + "\n"


def _csv(rows: Sequence[Sequence[Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


@panels.styled
def _render(figure: Figure, kinds: Sequence[str]) -> dict[str, bytes]:
    """The figure as a file's content, of each kind; without a date, so that the same results give the same SVG."""
    contents = {kind: io.BytesIO() for kind in kinds}
    for kind, content in contents.items():
        figure.savefig(content, format=kind, dpi=DPI, metadata={"Date": None} if kind == "svg" else None)
        figure.set_layout_engine("none")  # it is laid out now; another time takes as long as drawing it
    return {kind: content.getvalue() for kind, content in contents.items()}
