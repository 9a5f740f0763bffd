"""Building blocks of a page: sections that hold tables, figures, lists and links.

A section is data. To show something else on a page, add a `Section` to the list in `content.py`.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from markupsafe import Markup

from fusion_bench_featcal.results.remarks import is_information

from .svg import Panel, draw, mark


@dataclass(frozen=True)
class Cell:
    """Text of a table's cell, and the number that it is sorted by where the text is rounded."""

    text: str
    value: float | None = None
    kind: str = ""  # `best`, `changed`, `failed` or `words`


@dataclass(frozen=True)
class Table:
    """A table that readers sort, filter, and hide columns of."""

    kind: ClassVar[str] = "table"
    caption: str
    corner: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    only: str = ""  # label of a box that keeps rows with a changed cell

    @property
    def is_long(self) -> bool:
        """True where controls are worth their room."""
        return len(self.rows) > 3


@dataclass(frozen=True)
class Figure:
    """Panels with one legend."""

    kind: ClassVar[str] = "figure"
    title: str
    panels: Sequence[Panel]
    note: str = ""

    @property
    def drawn(self) -> list[tuple[str, Markup]]:
        """Title and SVG of each panel."""
        return [(panel.title, draw(panel)) for panel in self.panels]

    @property
    def legend(self) -> list[tuple[str, Markup]]:
        """Name and mark of each series, over all panels."""
        looks: dict[str, Any] = {
            series.name: series.look for panel in self.panels for series in panel.series
        }
        return [(name, mark(look, "50%", "9")) for name, look in looks.items()]


@dataclass(frozen=True)
class Image:
    """A figure that was drawn before: an SVG file, which can run nothing on the page."""

    kind: ClassVar[str] = "image"
    title: str
    svg: bytes
    description: str

    @property
    def address(self) -> str:
        """The file's content as an address."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg).decode()}"


@dataclass(frozen=True)
class Lines:
    """Sentences; of many warnings or notes the first are shown, and the others by a click."""

    kind: ClassVar[str] = "lines"
    most: ClassVar[int] = 6
    lines: Sequence[str]
    tone: str = ""  # `warnings` or `notes`, which have colours of their own


@dataclass(frozen=True)
class Links:
    """Files by the folder that they lie in: their names, and addresses relative to the page."""

    kind: ClassVar[str] = "links"
    files: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Card:
    """What one row gained."""

    title: str
    subtitle: str
    gain: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Cards:
    """Headline of a page."""

    kind: ClassVar[str] = "cards"
    cards: Sequence[Card]


def warnings_and_notes(lines: Sequence[str]) -> list[Lines]:
    """Warnings, then what only informs."""
    warnings = [line for line in lines if not is_information(line)]
    notes = [line for line in lines if is_information(line)]
    return [Lines(warnings, "warnings"), Lines(notes, "notes")]


Part = Table | Figure | Image | Lines | Links | Cards


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it; nothing is shown of a section without parts."""

    title: str
    parts: Sequence[Part]
    folded: bool = False  # opened by a click

    @property
    def anchor(self) -> str:
        """Its address within the page."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.title.lower())


@dataclass(frozen=True)
class Page:
    """A page: its title, a line under it, and its sections."""

    title: str
    subtitle: str
    sections: Sequence[Section] = field(default_factory=list)
