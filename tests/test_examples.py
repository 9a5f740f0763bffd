"""The examples run and are copied by `featcal example`."""

import os
import runpy
import shlex
from pathlib import Path
from statistics import fmean

import pytest
from reports import error_of, featcal

from fusion_bench_featcal.example_files import EXAMPLES as NAMES
from fusion_bench_featcal.suites import image

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_python_api_calibrates_the_bundled_suite():
    main, tasks = runpy.run_path(str(EXAMPLES / "python_api.py"))["main"], image.TA6[:2]
    main.__globals__["TASKS"] = tasks  # two of six, for the sake of time
    table = main(samples=2, test_images=30)
    assert list(table) == list(tasks)
    merged, calibrated = (fmean(row[column] for row in table.values()) for column in (0, 1))
    assert calibrated > merged


def test_every_example_is_listed():
    lines = featcal("example").out.splitlines()
    assert [line.split()[0] for line in lines[: len(NAMES)]] == list(NAMES)
    sources = {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"}
    assert {example.source for example in NAMES.values()} == sources


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_copied_with_its_files(name: str, tmp_path: Path):
    folder, source = tmp_path / "a new" / "folder", EXAMPLES / NAMES[name].source
    first, *commands = featcal("example", name, folder).out.splitlines()
    assert shlex.split(first) == ["cd", str(folder)]
    assert commands == list(NAMES[name].commands)
    files = [path for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    for path in files or [source]:
        copy = folder / path.relative_to(source if files else EXAMPLES)
        assert copy.read_bytes() == path.read_bytes()
        assert os.access(copy, os.X_OK) == os.access(path, os.X_OK)
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "fusion_bench" or any((folder / w).is_file() for w in (program, *words))
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]


def test_mistakes_get_one_line(tmp_path: Path):
    unknown = error_of("example", "own-tsk", tmp_path / "a")
    assert "no example 'own-tsk'; there are own-task, " in unknown
    assert "featcal example own-task DIR: name a folder" in error_of("example", "own-task")
    (tmp_path / "file").write_text("")
    message = f"example own-task: {tmp_path} exists and is not empty; choose another folder"
    assert message in error_of("example", "own-task", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
