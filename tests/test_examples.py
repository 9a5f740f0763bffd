"""The examples run and are copied by `featcal example`."""

import json
import os
import runpy
import shlex
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from cli_runs import fusion_bench
from reports import error_of, featcal

from fusion_bench_featcal import example_files
from fusion_bench_featcal.example_files import EXAMPLES as NAMES
from fusion_bench_featcal.suites import image

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(words: list[str], folder: Path, log: str) -> dict[str, Any]:
    """Report of a command with few samples."""
    words = [word.replace("samples_per_task=16", "samples_per_task=4") for word in words]
    fusion_bench([*words, "path.log_dir=log"], folder)
    return json.loads((folder / log / "report.json").read_text())


@pytest.mark.slow
def test_a_method_of_ones_own_needs_one_file_in_the_folder_of_the_run(tmp_path: Path):
    _, command = example_files.copy_example("own-method", tmp_path / "run")
    program, *words = shlex.split(command)
    assert program == "fusion_bench"
    words.append("method.results_dir=kept")
    report = run(words, tmp_path / "run", "log/task_arithmetic")
    rows = report["rows"]
    assert report["settings"]["scaled"] == {"scale": 1.3}
    assert rows["scaled"]["average"] != rows["task_arithmetic"]["average"]
    assert set(rows) == {"base", "experts", "task_arithmetic", "scaled", "featcal"}


@pytest.mark.slow
def test_a_family_of_ones_own_is_named_in_yaml(tmp_path: Path):
    folder = shutil.copytree(EXAMPLES / "own_family", tmp_path / "run")
    command = (folder / "my_family.py").read_text().split('"""')[1].partition("fusion_bench ")[2]
    words = [*shlex.split(command), "method.presets={}", "method.compare_with=[]"]
    report = run(words, folder, "log")
    records = map(json.loads, (folder / "log/calibration_log.jsonl").read_text().splitlines())
    blocks = {record["block"] for record in records if record.get("kind") == "block"}
    assert {name[-8:] for name in blocks} == {"layers.2", "layers.3"}
    options = {"_target_": "my_family.LastBlocks", "count": 2}
    assert report["settings"]["featcal"]["family"] == options


def test_python_api_calibrates_the_bundled_suite():
    main, tasks = runpy.run_path(str(EXAMPLES / "python_api.py"))["main"], image.TA6[:2]
    main.__globals__["TASKS"] = tasks  # two of six, for the sake of time
    table = main(samples=4, test_images=60)
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
    for folder in (tmp_path, tmp_path / "file"):
        message = f"example own-task: {folder} exists and is not empty; choose another folder"
        assert message in error_of("example", "own-task", folder)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
