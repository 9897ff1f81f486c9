"""Render the results of a study or a measured model: tables on the terminal, as Markdown and CSV, and the figures."""

import csv
import inspect
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xarray as xr
from matplotlib.figure import Figure
from rich.console import Console, RenderableType
from rich.text import Text

from gcjax import results
from gcjax.errors import GcjaxError
from gcjax.reporting import (
    circuits,
    compression,
    compression_figures,
    figures,
    measures,
    orbits,
    page,
    panels,
    portraits,
    projections,
    tables,
    trained,
)
from gcjax.reporting.claims import Claim, evaluate
from gcjax.reporting.summary import BASELINE, legend, summary

WIDTH = 100
DPI = 200
PAGE = "html"  # the format that is no figure's


def report(
    *paths: str | os.PathLike[str],
    formats: Sequence[str] = ("svg", "png", "html"),
    out: str | os.PathLike[str] | None = None,
    echo: bool = True,
) -> list[Path]:
    """Write `claims.md`, `claims.csv`, `summary.csv` and `figures/` beside each `results.nc`, and one page; return their paths.

    `paths` are directories or results files. The page is written where `html` is among the formats: to `out`, else to the
    directory's `report.html`, of several to that in the current one. No `formats`, no figures; `echo` prints the tables.
    Needs no JAX, and works on a study with unfinished runs. Every file is written whole or not at all. Raises `GcjaxError`
    when results are missing, damaged or foreign, a format is unknown, or a file cannot be written.
    """
    check_formats(formats)
    if not paths:
        raise GcjaxError("there is nothing to report on: give a workdir, or several")
    found = [_write(Path(path), [kind for kind in formats if kind != PAGE], PAGE in formats, echo) for path in paths]
    written = [path for files, _ in found for path in files]
    if PAGE in formats:
        sections = [section for _, section in found]
        title = sections[0].title if len(sections) == 1 else f"{len(sections)} results of gcjax"
        folder = Path(paths[0]) if Path(paths[0]).is_dir() else Path(paths[0]).parent
        place = Path(out) if out else (folder if len(paths) == 1 else Path()) / "report.html"
        written.append(results.write_whole(place, page.render(title, sections)))
    return written


def _write(path: Path, formats: Sequence[str], with_page: bool, echo: bool) -> tuple[list[Path], page.Section]:
    """The files beside one `results.nc`, and its section of the page."""
    ds, folder = results.load(path), path if path.is_dir() else path.parent
    products, moves = circuits.beside(ds, folder), orbits.beside(ds, folder)
    match ds.attrs["kind"]:
        case "study":
            told, draw = _study(ds, moves), figures.draw
        case "compression":
            told, draw = _compression(ds), compression_figures.draw
        case _:
            told, draw = _model(portraits.latest(ds), products), portraits.draw
    if echo:
        console = Console(width=WIDTH)
        for part in told.terminal:
            console.print(part, markup=False, highlight=False)
    wanted = bool(formats) or with_page
    drawn, skipped = draw(ds) if wanted else ({}, {})
    drawn |= {"circuits": circuits.figure(products)} if wanted and products is not None else {}
    drawn |= {"symmetry": orbits.figure(moves)} if wanted and moves is not None else {}
    pictures = {name: " ".join(f"[{kind}](figures/{name}.{kind})" for kind in formats) for name in drawn} if formats else {}
    for reason in dict.fromkeys(skipped.values()):
        pictures[", ".join(name for name in skipped if skipped[name] == reason)] = f"not drawn, {reason}"
    files = {
        "claims.md": _markdown(told.markdown, pictures).encode(),
        "claims.csv": _csv(tables.claims_csv(told.claims)),
        "summary.csv": _csv(told.summary),
        **told.files,
    }
    embedded = []
    for name, figure in drawn.items():
        made = _render(figure, dict.fromkeys([*formats, *(("svg", "png") if with_page else ())]))
        files |= {f"figures/{name}.{kind}": made[kind] for kind in formats}
        if with_page:
            embedded.append(page.Picture(name, _caption(name), made["svg"], made["png"]))
    written = [results.write_whole(folder / name, content) for name, content in files.items()]
    for stale in (folder / "figures" / f"{name}.{kind}" for name in skipped for kind in formats):
        stale.unlink(missing_ok=True)  # of an earlier report, on other results
    section = page.Section(
        title=told.title,
        brief=told.brief,
        head=told.head,
        warnings=told.warnings,
        claims=told.claims,
        tables=told.tables,
        pictures=embedded,
        skipped=skipped,
        command=told.command,
        origin={name: str(ds.attrs[name]) for name in (*told.origin, "device", "git_revision", "versions", "wall_seconds")},
        config=str(ds.attrs.get("config", "")),
    )
    return written, section


def _caption(name: str) -> str:
    """What there is to see in a figure: the first paragraph of its function's docstring."""
    every = (
        *figures.FIGURES,
        *trained.FIGURES,
        *portraits.FIGURES,
        portraits.over_training,
        *compression_figures.FIGURES,
    )
    own = {function.__name__: function for function in every} | {"circuits": circuits.figure, "symmetry": orbits.figure}
    figure, _, matrix = name.partition("-")
    text = " ".join((inspect.getdoc(own[figure]) or "").partition("\n\n")[0].split())
    return f"{matrix.capitalize()}. {text}" if matrix else text


def check_formats(formats: Sequence[str]) -> None:
    """Raises `GcjaxError` for a format in which figures cannot be written."""
    known = Figure().canvas.get_supported_filetypes()
    unknown = [name for name in formats if name not in known and name != PAGE]
    if unknown:
        raise GcjaxError(f"figures cannot be written as {', '.join(unknown)}; choose from {', '.join(sorted({*known, PAGE}))}")


@dataclass(frozen=True)
class Told:
    """What the results say: on the terminal, as Markdown after which the pictures follow, and as the rows of CSV files."""

    title: str
    brief: str
    head: str
    terminal: tuple[RenderableType, ...]
    markdown: tuple[str, ...]
    claims: Sequence[Claim]
    summary: list[list[Any]]
    tables: Sequence[page.Table]
    warnings: Sequence[str]
    command: str
    origin: tuple[str, ...]  # attributes of the results that say what they are of
    files: Mapping[str, bytes] = field(default_factory=dict)  # more of them, by name


def _study(ds: xr.Dataset, moves: xr.Dataset | None) -> Told:
    claims, rows = evaluate(ds), summary(ds)
    counts = {status: int((ds.status == status).sum()) for status in results.STATUSES}
    ended = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    sure = measures.thresholds(ds)["confidence"]
    head = f"{ds.sizes['run']} runs: {ended}. Means are over finished runs, in brackets their {100 * sure:.3g}% interval."
    head, explained = head + _speed(ds), legend(rows, ds.sizes["rank"])
    baseline = f"† {BASELINE}." if any(row.baseline for row in rows) else ""
    title, more = f"Study {ds.attrs['study']}", [] if moves is None else orbits.cells(moves)
    warnings = [f"{count} of {ds.sizes['run']} runs {status}: " + _some(ds, status)
                for status, count in counts.items() if count and status != "finished"]  # fmt: skip
    spiked = measures.spikes(ds, measures.thresholds(ds)["spike"]).any("step")
    if spiked.any():
        warnings.append(f"{int(spiked.sum())} runs have late loss spikes, which move weights by themselves.")
    config = json.loads(ds.attrs["config"])
    preset = f":{config['preset']}" if "preset" in config else ""
    return Told(
        title=title,
        brief=f"{ds.sizes['run']} runs",
        head=head,
        terminal=(
            *(f"{title}. {head}", tables.claims_table(claims), tables.summary_table(rows), Text(explained, "dim")),
            *([tables.table(more), Text(orbits.LEGEND, "dim")] if more else []),
        ),
        markdown=(
            f"# {title}",
            f"{head}\n\n{_origin(ds, 'data')}",
            f"## Claims\n\n{tables.claims_markdown(claims)}",
            f"## Summary\n\n{tables.markdown(tables.summary_cells(rows, 3))}\n\n{explained}"
            + f"\n\n{baseline}" * bool(baseline),
            *([f"## Symmetry\n\n{tables.markdown(more)}\n\n{orbits.LEGEND}"] if more else []),
        ),
        claims=claims,
        summary=tables.summary_csv(rows),
        tables=[
            page.Table("Summary", tables.summary_cells(rows, 3), f"{explained} {baseline}"),
            *([page.Table("Symmetry", more, orbits.LEGEND)] if more else []),
        ],
        warnings=warnings,
        command=f"gcjax train --config configs/{ds.attrs['study']}.py{preset} --workdir DIR\n"
        f"# with the config below; seeds {int(ds.seed.min())} to {int(ds.seed.max())}",
        origin=("data",),
    )


def _some(ds: xr.Dataset, status: str) -> str:
    """Whose runs have that status."""
    named = ds.point.values[(ds.status == status).values].tolist()
    return ", ".join(f"{name} ({named.count(name)})" for name in dict.fromkeys(named))


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
        title=ds.attrs["model"],
        brief=f"family {ds.attrs['family']}, {layers} layers",
        head=head,
        terminal=(
            *(head, tables.table(table), Text(projections.LEGEND, "dim")),
            *([tables.table(more), Text(circuits.LEGEND, "dim")] if more else []),
            tables.claims_table(claims),
        ),
        markdown=(
            f"# {ds.attrs['model']}",
            f"{head}\n\n{_origin(ds, 'fingerprint', 'options')}\n{notes}",
            f"## Projections\n\n{tables.markdown(table)}\n\n{projections.LEGEND}",
            *([f"## Circuits\n\n{tables.markdown(more)}\n\n{circuits.LEGEND}"] if more else []),
            f"## Claims\n\n{tables.claims_markdown(claims)}",
        ),
        claims=claims,
        summary=projections.csv(rows),
        tables=[
            page.Table("Projections", table, projections.LEGEND),
            *([page.Table("Circuits", more, circuits.LEGEND)] if more else []),
        ],
        warnings=json.loads(ds.attrs["notes"]),
        command=f"gcjax measure {ds.attrs['model']} --workdir DIR    # with the options below",
        origin=("fingerprint", "options"),
    )


def _compression(ds: xr.Dataset) -> Told:
    claims, parts = compression.claims(ds), compression.sections(ds)
    notes, title = json.loads(ds.attrs["notes"]), f"Compression of {ds.attrs['model']}"
    head = f"Family {ds.attrs['family']}, {float(ds.attrs['parameters']) / 1e6:,.0f}M parameters."
    listed = "\n".join(f"- {note}" for note in notes)
    shown = [(Text(heading, "bold"), tables.table(cells), Text(legend, "dim")) for heading, cells, legend in parts]
    return Told(
        title=title,
        brief=f"family {ds.attrs['family']}",
        head=head,
        terminal=(f"{title}. {head}", *(part for three in shown for part in three), tables.claims_table(claims)),
        markdown=(
            f"# {title}",
            f"{head}\n\n{_origin(ds, 'fingerprint', 'options', 'data')}\n{listed}",
            *(f"## {heading}\n\n{tables.markdown(cells)}\n\n{legend}" for heading, cells, legend in parts),
            f"## Claims\n\n{tables.claims_markdown(claims)}",
        ),
        claims=claims,
        summary=compression.summary(ds),
        tables=[page.Table(*part) for part in parts],
        warnings=notes,
        command=f"gcjax compress {ds.attrs['model']} --workdir DIR    # with the options below",
        origin=("fingerprint", "options", "data"),
        files={"advice.json": compression.advice_json(ds)},
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
def _render(figure: Figure, kinds: Iterable[str]) -> dict[str, bytes]:
    """The figure as a file's content, of each kind; without a date, so that the same results give the same SVG."""
    contents = {kind: io.BytesIO() for kind in kinds}
    for kind, content in contents.items():
        figure.savefig(content, format=kind, dpi=DPI, metadata={"Date": None} if kind == "svg" else None)
        figure.set_layout_engine("none")  # it is laid out now; another time takes as long as drawing it
    return {kind: content.getvalue() for kind, content in contents.items()}
