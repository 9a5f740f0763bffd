"""One page of runs as a single HTML file that needs no network: `featcal report RUN... --html`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import ReportError, prepare_directory, write_atomic
from fusion_bench_featcal.results.find import ResultFolders

_SUFFIXES = (".html", ".htm")


def check_target(path: Path, setting: str = "--html") -> Path:
    """Return the page's path as an absolute one, in a folder that can be written.

    Raises:
        ReportError: It is a folder, has another suffix, or its folder cannot be written.
    """
    if path.is_dir() or path.suffix.lower() not in _SUFFIXES:
        near = path / "report.html" if path.is_dir() else path.with_name(f"{path.name}.html")
        raise ReportError(f"{setting} names a file that ends in .html, such as {near}, not {path}")
    return prepare_directory(path.parent, setting) / path.name


def write_page(
    path: Path, folders: ResultFolders, defaults: Mapping[str, Any], setting: str = "--html"
) -> Path:
    """Write the page of runs and comparisons whole, or leave what there was; return its path.

    Args:
        path: The file; links to the runs' files are relative to its folder.
        folders: What to show.
        defaults: FeatCal's settings by name, which others are marked against.
        setting: The setting that chose `path`, named in messages.

    Raises:
        ReportError: The page cannot be written, or the runs contradict one another.
    """
    from .content import page_of
    from .render import html_text

    path = check_target(path, setting)
    text = html_text(page_of(folders, path.parent.resolve(), defaults))
    return write_atomic(path, text, setting)
