"""Pages of `featcal report --html`, read as text."""

from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "input"}
LINES = ("h1", "h2", "h3", "p", "li", "tr", "figcaption", "summary")


class Page(HTMLParser):
    """Elements of a page with their text. Elements that are not closed are refused."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[dict[str, Any]] = []
        self._open: list[dict[str, Any]] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        within = [element["tag"] for element in self._open]
        element = {"tag": tag, "text": "", "within": within, **dict(attrs)}
        self.elements.append(element)
        if tag in ("td", "th"):
            self._add(" | ")
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()["tag"] == tag

    def handle_data(self, data: str) -> None:
        self._add(data)

    def _add(self, text: str) -> None:
        for element in self._open:
            element["text"] += text

    def texts(self, *tags: str) -> list[str]:
        """Texts of all elements of some kinds."""
        return [" ".join(e["text"].split()) for e in self.elements if e["tag"] in tags]

    def lines(self) -> list[str]:
        """The page's headings, sentences and rows of tables, without figures."""
        inside = [e for e in self.elements if e["tag"] in LINES and "svg" not in e["within"]]
        return [" ".join(element["text"].split()).removeprefix("| ") for element in inside]
