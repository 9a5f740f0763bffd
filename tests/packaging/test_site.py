"""The documentation: every page is in the navigation, every link leads somewhere, names exist."""

import json
import re
import runpy
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from composing import REPOSITORY

import fusion_bench_featcal

DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *PAGES]
NOTEBOOK = REPOSITORY / "examples" / "walkthrough.ipynb"
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?![a-z]+:)([^()\s#]*)(#[^()\s]+)?\)")
HEADING = re.compile(r"^#+ +(.*?)\s*$", re.MULTILINE)
CHECK = runpy.run_path(str(REPOSITORY / "scripts" / "check_site.py"))


def entries(navigation: object) -> Iterator[str]:
    """File names of a navigation, in order."""
    if isinstance(navigation, str):
        yield navigation
    elif isinstance(navigation, dict):
        for part in navigation.values():
            yield from entries(part)
    elif isinstance(navigation, list):
        for part in navigation:
            yield from entries(part)


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as code hosts and the site make them."""
    found: dict[str, int] = {}
    for words in HEADING.findall(FENCED.sub("", text)):
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        found[slug] = found.get(slug, 0) + 1
    return set(found)


def test_every_page_is_in_the_navigation():
    config = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = [name for name in entries(config["nav"]) if not name.startswith("repository/")]
    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in PAGES)


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_links_lead_to_files_and_headings(page: Path):
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for name, anchor in LINK.findall(text):
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{name} does not exist"
        assert REPOSITORY in target.parents
        if anchor:
            assert anchor[1:] in anchors(target.read_text(encoding="utf-8")), f"{name}{anchor}"


def test_links_of_the_notebook_lead_to_files():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    text = "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    names = [name for name, _ in LINK.findall(text)]
    assert names
    assert all((NOTEBOOK.parent / name).resolve().is_file() for name in names)


def test_the_api_has_all_public_names():
    named = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    public = {f"fusion_bench_featcal.{name}" for name in fusion_bench_featcal.__all__}
    assert public <= set(named)
    for name in named:
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name


def test_functions_that_compute_the_equations_exist():
    text = (DOCS / "mathematics.md").read_text(encoding="utf-8")
    names = re.findall(r"`((?:core|rules|streams)\.\w+\.\w+(?:\.\w+)?)`", text)
    assert len(names) > 10
    for name in names:
        package, module, *attributes = name.split(".")
        value = import_module(f"fusion_bench_featcal.{package}.{module}")
        for attribute in attributes:
            value = getattr(value, attribute)


def test_every_figure_is_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in TEXTS)
    figures = [path for path in (DOCS / "figures").rglob("*") if path.is_file()]
    assert figures
    assert [path for path in figures if f"{path.relative_to(DOCS).as_posix()})" not in text] == []


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.html", '<script src="https://cdn.example/x.js"></script>', "script src="),
        ("a.html", '<link rel="stylesheet" href="//fonts.example/y.css">', "link href="),
        ("a.html", '<img srcset="https://a.example/b.png 2x" src="c.png">', "img srcset="),
        ("a.html", "<style>@import 'https://a.example/z.css'</style>", "style https"),
        ("a.html", '<p style="background: url(http://a.example/b)">', "style http"),
        ("b.css", "@font-face {src: url( 'https://a.example/f.woff2')}", "b.css: style https"),
        ("a.html", '<span class="arithmatex">$x$</span>', "class arithmatex"),
    ],
)
def test_a_page_that_fetches_something_from_elsewhere_is_found(tmp_path, name, content, found):
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "search_index.json").write_text("{}")
    harmless = '<a href="https://a.example">a</a><img src="b.png"><link rel="canonical" href="//c">'
    (tmp_path / "index.html").write_text(harmless)
    assert not list(CHECK["problems"](tmp_path))
    (tmp_path / name).write_text(content)
    (problem,) = CHECK["problems"](tmp_path)
    assert found in problem
