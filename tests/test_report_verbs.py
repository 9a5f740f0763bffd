"""`featcal report --html`: what it writes, and one line for each mistake."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.results import Report


@pytest.fixture
def run(tmp_path: Path) -> Path:
    report = Report(suite="toy", upstream="task_arithmetic")
    for name, level in {"experts": 0.9, "task_arithmetic": 0.5, "featcal": 0.7}.items():
        report.add_row(name, {"cars": level, "dtd": level})
    report.write(tmp_path / "run")
    return tmp_path / "run"


def error_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a command that fails."""
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("featcal: error: ")


def test_a_page_is_written_beside_the_tables(run: Path, tmp_path: Path, capsys):
    assert main(["report", str(run)]) == 0
    tables = capsys.readouterr().out
    page = tmp_path / "new" / "page.html"
    assert main(["report", "--html", str(page), str(run)]) == 0
    assert capsys.readouterr().out == f"{tables}written: {page}\n"
    assert page.read_text().startswith("<!doctype html>")


def test_a_page_loads_no_model_and_no_framework(run: Path, tmp_path: Path):
    words = ["report", str(run), "--html", str(tmp_path / "page.html")]
    code = (
        f"import sys; from fusion_bench_featcal.cli import main; main({words!r}); "
        "print({'torch', 'transformers', 'fusion_bench', 'hydra'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("name", ["page", "page.json", "."])
def test_a_page_is_a_file_that_ends_in_html(run: Path, tmp_path: Path, capsys, name: str):
    message = error_of(["report", str(run), "--html", str(tmp_path / name)], capsys)
    near = "report.html" if name == "." else f"{name}.html"
    assert message.startswith("--html names a file that ends in .html, such as ")
    assert f"{tmp_path / near}, not " in message


def test_a_page_of_nothing(tmp_path: Path, capsys):
    page = tmp_path / "page.html"
    message = error_of(["report", str(tmp_path), "--html", str(page)], capsys)
    assert message.startswith(f"no run in or below {tmp_path}")
    assert not page.exists()


def test_a_folder_that_is_a_file(run: Path, tmp_path: Path, capsys):
    (tmp_path / "taken").write_text("")
    message = error_of(["report", str(run), "--html", str(tmp_path / "taken" / "a.html")], capsys)
    assert message.endswith("taken: File exists. Change --html to a writable directory.")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs Linux's /proc")
def test_a_folder_that_cannot_be_written(run: Path, capsys):
    message = error_of(["report", str(run), "--html", "/proc/pages/a.html"], capsys)
    assert message.startswith("cannot write") and "--html" in message


def test_a_write_that_fails_keeps_the_old_page(run: Path, tmp_path: Path, capsys, monkeypatch):
    page = tmp_path / "page.html"
    page.write_text("old")

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    message = error_of(["report", str(run), "--html", str(page)], capsys)
    assert "No space left on device" in message and "--html" in message
    assert page.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]
