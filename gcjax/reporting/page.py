"""`report.html`: results of any kind on one page that needs nothing beside it, light and dark, for a screen and a phone."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from jinja2 import Environment, StrictUndefined

from gcjax.reporting import tables
from gcjax.reporting.claims import Claim

LARGEST_SVG = 150_000  # bytes; a larger figure is embedded as PNG where that is smaller
WIDTH = "60rem"
CLASSES = {"reproduced": "good", "yes": "good", "not reproduced": "bad", "no": "bad"}  # others are open


@dataclass(frozen=True)
class Table:
    heading: str
    cells: tables.Cells  # the head first
    note: str


@dataclass(frozen=True)
class Picture:
    name: str
    caption: str  # what to see; the alternative text too
    svg: bytes
    png: bytes

    @property
    def source(self) -> str:
        """The picture as a data URI."""
        vector = len(self.svg) <= max(LARGEST_SVG, len(self.png))
        kind, content = ("svg+xml", self.svg) if vector else ("png", self.png)
        return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


@dataclass(frozen=True)
class Section:
    """One study or model."""

    title: str
    brief: str  # in the list of contents
    head: str
    warnings: Sequence[str]
    claims: Sequence[Claim]
    tables: Sequence[Table]
    pictures: Sequence[Picture]
    skipped: Mapping[str, str]
    command: str
    origin: Mapping[str, str]
    config: str


def render(title: str, sections: Sequence[Section]) -> bytes:
    """The page; everything in it is text, escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(resources.files("gcjax.reporting").joinpath("page.html").read_text(encoding="utf-8"))
    classes = {name: CLASSES.get(name, "open") for name in (*CLASSES, "not tested", "undecided", "info")}
    how = {"number": tables.number, "measured": tables.measured, "outcome": tables.outcome}
    return template.render(title=title, sections=sections, classes=classes, figure_width=WIDTH, **how).encode()
