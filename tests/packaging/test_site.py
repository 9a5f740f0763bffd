"""The documentation: pages are in the navigation, and links, names and quoted messages exist."""

import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from configs import REPOSITORY
from hydra.utils import get_object

import fusion_bench_featcal

DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *PAGES]
NOTEBOOK = REPOSITORY / "examples" / "walkthrough.ipynb"
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?![a-z]+:)([^()\s#]*)(#[^()\s]+)?\)")
HEADING = re.compile(r"^#+ +(.*?)\s*$", re.MULTILINE)


def entries(navigation: Any) -> Iterator[str]:
    """File names of a navigation, in order."""
    if isinstance(navigation, str):
        yield navigation
    else:
        entries_below = navigation.values() if isinstance(navigation, dict) else navigation or ()
        for part in entries_below:
            yield from entries(part)


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as code hosts and the site make them."""
    words = [heading.lower() for heading in HEADING.findall(FENCED.sub("", text))]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in words}


def test_every_page_is_in_the_navigation():
    config = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = [name for name in entries(config["nav"]) if not name.startswith("repository/")]
    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in PAGES)


@pytest.mark.parametrize(
    "page", [*TEXTS, NOTEBOOK], ids=lambda path: path.relative_to(REPOSITORY).as_posix()
)
def test_links_lead_to_files_and_headings(page: Path):
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    if page == NOTEBOOK:
        cells = json.loads(text)["cells"]
        text = "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        assert LINK.search(text)
    for name, anchor in LINK.findall(text):
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{name} does not exist"
        assert REPOSITORY in target.parents
        if anchor:
            assert anchor[1:] in anchors(target.read_text(encoding="utf-8")), f"{name}{anchor}"


def test_the_api_has_all_public_names_and_equations_name_functions():
    named = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {f"fusion_bench_featcal.{name}" for name in fusion_bench_featcal.__all__} <= set(named)
    for name in named:
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name
    text = (DOCS / "mathematics.md").read_text(encoding="utf-8")
    names = re.findall(r"`((?:core|rules|streams)\.\w+\.\w+(?:\.\w+)?)`", text)
    assert len(names) > 10
    for name in names:
        get_object(f"fusion_bench_featcal.{name}")


# --- messages that docs/troubleshooting.md quotes ---

CELL = re.compile(r"^\| (`.*?`) \|", re.MULTILINE)


def test_every_quoted_message_is_in_the_code():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").partition("## No message")[0]
    quoted = [text for cell in CELL.findall(page) for text in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) > 40
    files = (REPOSITORY / "fusion_bench_featcal").rglob("*.py")
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    code = re.sub(r"""["']\n\s*[fr]*["']""", "", code)  # texts that go on in the next line
    for message in quoted:
        fragments = [text.strip() for text in message.replace("(nearest: ...)", "...").split("...")]
        assert sum(map(len, fragments)) >= 9, message
        assert [text for text in fragments if text not in code] == [], message
