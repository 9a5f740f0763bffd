"""The examples run, and show what they are there to show."""

import json
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from cli_runs import fusion_bench

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.suites import image

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_a_method_of_one_s_own_needs_one_file_in_the_folder_of_the_run(tmp_path: Path):
    folder = tmp_path / "run"
    shutil.copytree(EXAMPLES / "own_method", folder)
    words = (folder / "my_methods.py").read_text().split('"""')[1].partition("fusion_bench ")[2]
    arguments = shlex.split(words.replace("\\\n", " "))
    arguments[arguments.index("method.samples_per_task=16")] = "method.samples_per_task=4"
    fusion_bench([*arguments, "path.log_dir=log", "method.results_dir=kept"], folder)
    report = json.loads((folder / "log" / "task_arithmetic" / "report.json").read_text())
    rows = report["rows"]
    assert report["settings"]["scaled"] == {"scale": 1.3}
    assert rows["scaled"]["average"] != rows["task_arithmetic"]["average"]
    assert set(rows) == {"base", "experts", "task_arithmetic", "scaled", "featcal"}


def test_a_family_of_one_s_own_is_named_in_yaml(tmp_path: Path, monkeypatch: Any, capsys: Any):
    folder = tmp_path / "run"
    shutil.copytree(EXAMPLES / "own_family", folder)
    command = (folder / "my_family.py").read_text().split('"""')[1].partition("fusion_bench ")[2]
    words = [word.replace("=16", "=4") for word in shlex.split(command)]
    words += ["method.presets={}", "method.compare_with=[]", "path.log_dir=log"]
    fusion_bench(words, folder)
    lines = (folder / "log/calibration_log.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    blocks = {record["block"] for record in records if record.get("kind") == "block"}
    assert {name[-8:] for name in blocks} == {"layers.2", "layers.3"}
    report = json.loads((folder / "log/report.json").read_text())
    options = {"_target_": "my_family.LastBlocks", "count": 2}
    assert report["settings"]["featcal"]["family"] == options
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["plan", *words[:2]]) == 0
    assert "family last_blocks: 2 tasks" in capsys.readouterr().out


def test_python_api_calibrates_the_bundled_suite():
    table = runpy.run_path(str(EXAMPLES / "python_api.py"))["main"](samples=8, test_images=40)
    assert list(table) == list(image.TA6)
    merged, calibrated = (fmean(row[column] for row in table.values()) for column in (0, 1))
    assert calibrated > merged
