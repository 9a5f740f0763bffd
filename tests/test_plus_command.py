"""`method=featcal/plus` as a person runs it, and the pool's presets beside it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cli_runs import fusion_bench

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.core.ridge import GRID
from fusion_bench_featcal.results import Report

SAMPLES = 4
TASKS = ("mini_balinese", "mini_korean")
pytestmark = pytest.mark.slow
Run = tuple[Path, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run with few samples."""
    folder = tmp_path_factory.mktemp("plus")
    words = [
        "method=featcal/plus",
        "modelpool=clip-vit-mini_alphabets2",
        f"method.samples_per_task={SAMPLES}",
        "+modelpool.featcal.presets.mini={ridge_lambda: 1e-4, mix_alpha: 0.3, anchor_rho: 1.0}",
        "method.compare_with=[merged]",
        f"path.log_dir={folder}/log",
    ]
    return folder / "log", fusion_bench(words, folder)


def records(folder: Path, name: str = "calibration_log") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_report_has_the_settings_and_the_pools_presets_begin_with_the_papers(run: Run) -> None:
    report = Report.load(run[0])
    settings = FeatCalSettings.plus(samples_per_task=SAMPLES)
    assert report.settings["featcal"] == settings.as_dict()
    assert list(report.rows) == ["task_arithmetic", "featcal", "featcal:mini"]
    preset = report.settings["featcal:mini"]
    mini: dict[str, Any] = {"ridge_lambda": 1e-4, "mix_alpha": 0.3, "anchor_rho": 1.0}
    assert preset == FeatCalSettings(samples_per_task=SAMPLES, **mini).as_dict()
    assert "featcal:mini" in run[1].stdout


def test_log_has_the_choices_and_the_copies(run: Run) -> None:
    modules = [record for record in records(run[0]) if record["kind"] == "module"]
    assert len(modules) == 4 * 6
    for record in modules:
        assert record["ridge"] in (*GRID, None)  # None stands for infinity: no change
    tasks = [record for record in records(run[0]) if record["kind"] == "task"]
    assert len(tasks) == 4 * len(TASKS)
    assert tasks[0]["rows"] == 17 * SAMPLES * 8  # one and seven copies


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("method.ridge_lambda=0.1", "method.ridge_lambda=0.1 has no part in method.rule=plus"),
        ("method.augment={_target_: no.such}", "method.augment: no.such: "),
    ],
)
def test_settings_that_clash_are_told_in_a_line(tmp_path: Path, word: str, message: str) -> None:
    words = ["method=featcal/plus", "modelpool=clip-vit-mini_alphabets2", word]
    result = fusion_bench([*words, f"path.log_dir={tmp_path}/log"], tmp_path, check=False)
    assert result.returncode != 0
    assert message in result.stdout + result.stderr
    assert not list(tmp_path.rglob("report*"))
