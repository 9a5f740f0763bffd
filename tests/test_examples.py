"""The examples run, and show what they are there to show."""

import json
import runpy
import shlex
import shutil
from pathlib import Path
from statistics import fmean

from cli_runs import fusion_bench

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


def test_python_api_calibrates_the_bundled_suite():
    table = runpy.run_path(str(EXAMPLES / "python_api.py"))["main"](samples=8, test_images=40)
    assert list(table) == list(image.TA6)
    merged, calibrated = (fmean(row[column] for row in table.values()) for column in (0, 1))
    assert calibrated > merged
