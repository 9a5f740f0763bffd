"""Hooks of MkDocs for the documentation site (`make docs`).

Pages in docs/ link to other files of the repository. The site gets a page for each of these below
`repository/`, so that no link leaves it. Formulas become MathML, which needs no script and no font.
Each page links to its Markdown source below `sources/`.
"""
# pyright: reportMissingImports=false
# The tools of the site have a separate environment.

import html
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()(?![a-z]+:|#|/)([^()\s#]+)((?:#[^()\s]*)?\))")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[\[(](.*?)\\[\])]</\1>', re.DOTALL)
TEXT = re.compile(r"(<(?P<tag>t[dh]|p|li)\b[^>]*>)(.*?)(?=</?(?:t[dhr]|p|li|table)\b)", re.DOTALL)
# A space of a quantity, before a unit or around ±, or after the plus of a table's row.
QUANTITY = re.compile(
    r"(?<=\d) (?=(?:%|±|points?\b|[KMGT]i?B\b|m?s\b|seconds\b))|(?<=±) (?=\d)|(?<=^\+) "
)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml", ".sh": "bash"}
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"


def on_config(config: Any) -> Any:
    """Set anchors of headings as code hosts do, the link to the repository, and the version."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    address = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    config.repo_url = address or None
    package = (ROOT / "fusion_bench_featcal" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"', package, re.MULTILINE)
    config.site_name = f"{config.site_name} {version}"
    return config


def site_path(source: Path) -> str:
    """Return the path on the site of a file of the repository (Markdown, before it is rendered)."""
    name = source.relative_to(ROOT).as_posix()
    if name.startswith("docs/") and source.is_file():
        return name.removeprefix("docs/")
    return f"repository/{name}" + ("" if source.suffix == ".md" else ".md")


def relinked(text: str, source: Path) -> str:
    """Return a page's text with links to the targets' places on the site."""
    folder = Path("/", site_path(source)).parent

    def lead(match: re.Match[str]) -> str:
        target = (source.parent / match[2]).resolve()
        if not target.exists() or ROOT not in target.parents:
            return match[0]  # MkDocs reports it
        return f"{match[1]}{os.path.relpath(Path('/', site_path(target)), folder)}{match[3]}"

    return LINK.sub(lead, text)


def linked_files(page: Path, visited: set[Path]) -> Iterator[Path]:
    """Return linked files and folders that MkDocs does not have, also of linked files."""
    for _, name, _ in LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / name).resolve()
        inside = ROOT / "docs" in target.parents and target.is_file()
        if target in visited or inside or not target.exists() or ROOT not in target.parents:
            continue
        visited.add(target)
        yield target
        if target.suffix == ".md":
            yield from linked_files(target, visited)


def folder_page(folder: Path) -> str:
    """Return a list of a folder's Markdown files, or of all its files if it has none."""
    files = sorted(path for path in folder.rglob("*.md") if path.is_file())
    lines = [f"- [{f.relative_to(folder)}]({os.path.relpath(f, folder.parent)})" for f in files]
    names = (path for path in sorted(folder.iterdir()) if not path.name.startswith("__"))
    return "\n".join([f"# {folder.name}", "", *(lines or [f"- `{path.name}`" for path in names])])


def notebook_page(source: Path, config: Any) -> tuple[str, list[File]]:
    """Return a notebook as Markdown, and its pictures."""
    from nbconvert import MarkdownExporter

    text, resources = MarkdownExporter().from_filename(str(source))
    text = relinked(text, source)
    folder = f"{site_path(source)}_files"
    pictures = []
    for name, content in resources["outputs"].items():
        text = text.replace(f"({name})", f"({Path(folder).name}/{name})")
        pictures.append(File.generated(config, f"{folder}/{name}", content=content))
    return text, pictures


def repository_files(source: Path, config: Any) -> list[File]:
    """Return the page for a file outside docs/, with its assets."""
    more: list[File] = []
    if source.suffix == ".ipynb":
        text, more = notebook_page(source, config)
    elif source.is_dir():
        text = UNSEARCHED + relinked(folder_page(source), source)
        if ROOT / "docs" not in source.parents:
            more = [f for page in source.rglob("*.md") for f in repository_files(page, config)]
    elif source.suffix == ".md":
        text = UNSEARCHED + relinked(source.read_text(encoding="utf-8"), source)
    else:
        name, language = source.relative_to(ROOT), LANGUAGES.get(source.suffix, "text")
        content = source.read_text(encoding="utf-8")
        text = f"{UNSEARCHED}# {name.as_posix()}\n\n~~~~{language}\n{content}\n~~~~\n"
    return [File.generated(config, site_path(source), content=text), *more]


def source_uri(uri: str) -> str:
    """Return the address on the site of a page's Markdown."""
    return f"sources/{uri}.txt"


def on_files(files: Files, config: Any) -> Files:
    """Add the files of the repository that pages link to."""
    visited: set[Path] = set()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        files.append(File.generated(config, source_uri(site_path(page)), content=text))
        for target in linked_files(page, visited):
            for file in repository_files(target, config):
                if file.src_uri not in files.src_uris:
                    files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Replace links to other files of the repository by links to their pages."""
    uri = page.file.src_uri
    page.meta.update(config.extra["pages"].get(uri, {}))
    if uri.startswith("repository/"):
        return markdown
    page.edit_url = os.path.relpath(
        source_uri(uri), Path(uri).parent
    )  # the theme's link to a source
    return relinked(markdown, ROOT / "docs" / uri)


def on_post_page(output: str, **_: Any) -> str:
    """Keep the theme's script from fetching the repository's number of stars."""
    return output.replace(' data-md-component="source"', "")


def on_page_content(html_text: str, **_: Any) -> str:
    """Turn formulas into MathML, and keep each number and its unit on one line."""

    def formula(match: re.Match[str]) -> str:
        if match[1] == "span":
            return convert(html.unescape(match[2]))
        return f'<div class="formula">{convert(html.unescape(match[2]), display="block")}</div>'

    def quantities(match: re.Match[str]) -> str:
        return match[1] + QUANTITY.sub("\N{NO-BREAK SPACE}", match[3])

    return TEXT.sub(quantities, FORMULA.sub(formula, html_text))
