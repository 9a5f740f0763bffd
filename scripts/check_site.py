"""Check that pages of a built site load no external files, and that formulas are rendered.

    python scripts/check_site.py [site]

Ordinary links may be external. The exit code is 1 if there are problems.
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

FETCHED = {
    "script": ("src",), "img": ("src", "srcset"), "iframe": ("src",), "source": ("src", "srcset"),
    "video": ("src", "poster"), "audio": ("src",), "embed": ("src",), "object": ("data",),
    "link": ("href",),
}  # fmt: skip
HARMLESS = {"canonical", "prev", "next", "alternate", "license"}  # of links: a browser fetches none
ELSEWHERE = re.compile(r"^\s*(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
STYLE_URL = re.compile(r"""(?:url\(\s*|@import\s+)["']?([^"')\s;]+)""")


class _Page(HTMLParser):
    """Collect addresses that a browser would fetch, and formulas that were not rendered."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Check one element."""
        values = {name: value or "" for name, value in attrs}
        classes = values.get("class", "").split()
        self.problems += [f"class {name}" for name in ("arithmatex", "mermaid") if name in classes]
        if tag == "link" and set(values.get("rel", "").split()) & HARMLESS:
            return
        for name in FETCHED.get(tag, ()):
            if ELSEWHERE.match(values.get(name, "")):
                self.problems.append(f"{tag} {name}={values[name]}")
        self.problems += _from_elsewhere(values.get("style", ""))


def _from_elsewhere(style: str) -> list[str]:
    return [f"style {address}" for address in STYLE_URL.findall(style) if ELSEWHERE.match(address)]


def problems(site: Path) -> Iterator[str]:
    """Yield a line for each external file of a page and each formula that was not rendered."""
    pages = sorted(site.rglob("*.html"))
    if not pages:
        yield f"{site} has no pages"
    for path in pages:
        page, text = _Page(), path.read_text(encoding="utf-8")
        page.feed(text)
        styles = re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL)
        for what in (
            *page.problems,
            *(address for style in styles for address in _from_elsewhere(style)),
        ):
            yield f"{path.relative_to(site)}: {what}"
    for path in sorted(site.rglob("*.css")):
        for what in _from_elsewhere(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)}: {what}"
    if not (site / "search" / "search_index.json").is_file():
        yield f"{site} has no search index"


def main() -> None:
    """Check the site."""
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "site")
    lines = list(problems(site))
    print("\n".join(lines) or f"{site}: everything that its pages fetch is inside")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
