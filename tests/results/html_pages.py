"""Pages of synthetic runs, and a reader of HTML that insists on its rules."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from synthetic import SIX

from fusion_bench_featcal.json_files import json_lines
from fusion_bench_featcal.results.find import find
from fusion_bench_featcal.results.html import write_page

VOID = {"meta", "input", "wbr", "br", "hr", "img"}
DEFAULTS = {"ridge_lambda": 0.05, "samples_per_task": 256, "seed": 42}


class Reader(HTMLParser):
    """Elements of a page: (tag, attributes, text), each with the text of all below it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[dict[str, Any]] = []
        self._open: list[dict[str, Any]] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), (tag, attrs)
        above = [element["tag"] for element in self._open]
        element = {"tag": tag, "text": "", "above": above, **dict(attrs)}
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # Only within SVG does a slash end an element.
        assert "svg" in [element["tag"] for element in self._open], tag
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag not in VOID
        assert self._open.pop()["tag"] == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element["text"] += data

    def all(self, tag: str, **attributes: str) -> list[dict[str, Any]]:
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [
            e
            for e in self.elements
            if e["tag"] == tag and all(e.get(k) == wanted[k] for k in wanted)
        ]

    def texts(self, tag: str, **attributes: str) -> list[str]:
        return [" ".join(element["text"].split()) for element in self.all(tag, **attributes)]

    def table(self, caption: str) -> dict[str, dict[str, dict[str, Any]]]:
        """Row -> column -> cell, of the table whose caption ends so."""
        (heading,) = [e for e in self.all("h3") if e["text"].endswith(caption)]
        (table,) = self.all("table", **{"aria-labelledby": heading["id"]})
        inside = self.elements[self.elements.index(table) + 1 :]
        rows: dict[str, dict[str, dict[str, Any]]] = {}
        heads: list[str] = []
        cells: dict[str, dict[str, Any]] = {}
        for element in inside:
            if "table" not in element["above"]:
                break
            if element.get("scope") == "col":
                heads.append(element["text"])
            elif element.get("scope") == "row":
                cells = rows.setdefault(element["text"], {})
            elif element["tag"] == "td":
                cells[heads[len(cells) + 1]] = element
        return rows


def page_text(*places: Path, name: str = "page.html") -> str:
    path = write_page(places[0].parent / name, find(places, tables=True), DEFAULTS)
    return path.read_text(encoding="utf-8")


def leave_log(run: Path, tasks: tuple[str, ...] = SIX, blocks: int = 4, row: str = "") -> None:
    """A calibration log in which drift falls to half, beside held-out drift."""
    records = [
        {
            "kind": "task", "block": f"layers.{block}", "task": task,
            "drift_before": 2.0, "drift_after": 1.0,
            "relative_drift_before": 0.2 + 0.1 * block, "relative_drift_after": 0.1 + 0.05 * block,
            "held_out_drift_merged": 0.4, "held_out_drift": 0.2,
        }
        for block in range(blocks)
        for task in tasks
    ]  # fmt: skip
    (run / f"calibration_log{row}.jsonl").write_text(json_lines(records))
