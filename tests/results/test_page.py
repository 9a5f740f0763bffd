"""The page of `featcal report --html`: its numbers, escaping, and its script in a browser."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from reports import LEVELS, Page, error_of, featcal, leave_cells, leave_run

EVIL = "<script>alert('&')</script>{{ 7 * 7 }}"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)


def page_of(run: Path, folder: Path) -> str:
    """Text of a page that is written into a folder."""
    tables = featcal("report", run)
    file = folder / "new" / "page.html"
    done = featcal("report", "--html", file, run)
    assert (done.code, done.out) == (0, f"{tables.out}written: {file}\n"), done.err
    return file.read_text(encoding="utf-8")


def test_the_page_has_the_tables_notes_and_files(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "a run #1")
    page = Page(page_of(run, tmp_path))
    lines = page.lines()
    assert "| cars | dtd | average | gain | share | worst task | seconds | MiB" in lines
    row = next(line for line in lines if line.startswith("task_arithmetic + featcal"))
    assert "| 75.0 | +15.0 ± " in row and "| 50 % | cars 50 % 75.0 | 10.0 | 1024" in row
    (link,) = (e for e in page.elements if e["tag"] == "a" and e["text"] == "run.json")
    assert link["href"] == "../a%20run%20%231/run.json"
    assert sum(element["tag"] == "svg" for element in page.elements) == 1


def test_the_page_of_a_sweep_has_a_table_and_a_curve(tmp_path: Path) -> None:
    page = Page(page_of(leave_cells(tmp_path / "cells"), tmp_path))
    assert "| n = 8 | n = 64" in page.lines() and "accuracy-samples_per_task" in page.texts("h2")


def test_names_of_users_are_text(tmp_path: Path) -> None:
    levels = {"base": 0.3, "experts": 0.9, EVIL: 0.5, f"featcal_{EVIL}": 0.7}
    run = leave_run(tmp_path / "run", levels, (EVIL, "b"), suite=EVIL, merger=EVIL,
                    versions={EVIL: EVIL})  # fmt: skip
    (run / f"{EVIL.replace('/', '')}.txt").write_text("")
    page = Page(page_of(run, tmp_path))
    (script,) = page.texts("script")
    assert "alert(" not in script and "aria-sort" in script
    assert {element["tag"] for element in page.elements} & {"b", "i"} == set()
    assert any(EVIL in " ".join(text.split()) for text in page.texts("th"))


@pytest.mark.parametrize("name", ["page", "page.md", ""])
def test_other_files_are_refused(name: str, tmp_path: Path) -> None:
    run = leave_run(tmp_path / "run")
    text = error_of("report", run, "--html", tmp_path / name if name else tmp_path)
    assert re.search(r"--html names a file that ends in \.html, such as .*\.html, not", text)


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_click_sorts_the_rows(tmp_path: Path) -> None:
    text = page_of(leave_run(tmp_path / "run", LEVELS), tmp_path)
    click = "document.querySelectorAll('thead th')[3].click();"
    file = tmp_path / "clicked.html"
    file.write_text(text.replace("</script>", f"{click}</script>"), encoding="utf-8")
    words = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", str(file)]
    dump = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
    rows = re.findall(r'<th scope="row">([^<]*)</th>', dump)
    assert rows == ["experts", "task_arithmetic + featcal", "task_arithmetic", "base"]
