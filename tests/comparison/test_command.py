"""The literal command on the bundled suite."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cli_runs import fusion_bench

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab.compare import cell_process
from fusion_bench_featcal.results import Report


@pytest.mark.slow
def test_command_compares_and_leaves_reports(tmp_path: Path) -> None:
    result = fusion_bench(
        [
            "method=compare",
            "modelpool=clip-vit-mini_alphabets2",
            "method.upstreams=[simple_average]",
            "method.alone=[]",
            "method.post_merging=[anchor_only,ridge_surgery]",
            "method.samples_per_task=8",
            f"path.log_dir={tmp_path}/log",
        ],
        tmp_path,
    )
    assert "+ ridge_surgery" in result.stdout
    *_, last = result.stdout.strip().splitlines()
    assert last.endswith(
        f"featcal report {tmp_path}/log"
    )  # nothing of FusionBench's comes after it
    assert "8 train" in result.stdout
    content = json.loads((tmp_path / "log" / "report.json").read_text())
    assert content["failed"] == []
    assert content["suite"] == "clip-vit-mini_alphabets2"
    report = Report.load(tmp_path / "log" / "simple_average")
    assert list(report.rows) == [
        "base",
        "experts",
        "simple_average",
        "anchor_only",
        "ridge_surgery",
    ]
    assert report.cost["ridge_surgery"]["modules_added"] == 2
    assert (tmp_path / "log" / "config_resolved.yaml").is_file()
    # FusionBench's default logger is TensorBoard's.
    assert list((tmp_path / "log").glob("events.out.tfevents.*"))
    assert isinstance(report.cost["ridge_surgery"]["inference_seconds_per_sample"], float)
    assert isinstance(report.cost["experts"]["inference_seconds_per_sample"], float)
    kept = tmp_path / "outputs" / "comparison" / "clip-vit-mini_alphabets2"
    assert len(list(kept.glob("cells/*/result.json"))) == 5
    assert len(list(kept.glob("upstreams/*/model.safetensors"))) == 1


BROKEN = """
from fusion_bench_featcal.lab.rivals import AnchorOnly


class Broken(AnchorOnly):
    def post_merge(self, merged, inputs):
        raise RuntimeError("no such luck")
"""


@pytest.mark.slow
def test_cells_in_processes_of_their_own_have_the_same_results(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    words = [
        "method=compare", "modelpool=clip-vit-mini_alphabets2", "method.samples_per_task=4",
        "method.upstreams=[simple_average]", "method.alone=[]", "method.references=[]",
        "+method.post_merging_methods.broken={_target_: broken.Broken}", "path.log_dir=log",
    ]  # fmt: skip
    apart = [*words, "method.post_merging=[broken,ridge_surgery]", "method.results_dir=apart"]
    done = fusion_bench([*apart, "method.process_per_cell=true"], tmp_path, check=False)
    assert done.returncode != 0
    assert "1 of 3 cells failed" in done.stderr + done.stdout
    assert "no such luck" in done.stderr + done.stdout
    found = Report.load(tmp_path / "log" / "simple_average")
    together = [*words, "method.post_merging=[ridge_surgery]", "method.results_dir=together"]
    fusion_bench(together, tmp_path)
    wanted = Report.load(tmp_path / "log" / "simple_average")
    assert found.rows == wanted.rows
    assert {row: set(cost) for row, cost in found.cost.items()} == {
        row: set(cost) for row, cost in wanted.cost.items()
    }


@pytest.mark.parametrize(
    ("merger", "cell", "alone", "words"),
    [
        ("ties", "surgery:tuned", False, ["['ties']", "[]", "['surgery:tuned']"]),
        ("lot", "none", True, ["[]", "['lot']", "[]"]),
    ],
)
def test_a_cells_process_gets_the_command_and_its_cell(
    merger: str, cell: str, alone: bool, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    class Process:
        returncode = 3

        def __init__(self, command: list[str], **options: Any) -> None:
            commands.append(command)

        def communicate(self) -> tuple[str, None]:
            return "its last words\n", None

    monkeypatch.setattr(cell_process.subprocess, "Popen", Process)
    monkeypatch.setattr(cell_process.sys, "argv", ["fusion_bench", "method=compare", "a=1"])
    said = cell_process.run_cell(merger, cell, alone=alone, results_dir=Path("cells"))
    assert said == "its process ended with code 3: its last words"
    chosen = dict(word.split("=", 1) for word in commands[0][3:])
    assert chosen["a"] == "1" and chosen["method.process_per_cell"] == "false"
    assert chosen["method.results_dir"] == f"'{Path.cwd()}/cells'"
    keys = ["upstreams", "alone", "post_merging"]
    assert [chosen[f"method.{key}"] for key in keys] == words


def test_a_cells_process_is_asked_to_end_where_the_comparison_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    class Process:
        def __init__(self, command: list[str], **options: Any) -> None: ...

        def communicate(self) -> None:
            raise KeyboardInterrupt

        def terminate(self) -> None:
            calls.append("terminate")

        def wait(self, seconds: float) -> None:
            calls.append("wait")
            raise subprocess.TimeoutExpired("cell", seconds)

        def kill(self) -> None:
            calls.append("kill")

    monkeypatch.setattr(cell_process.subprocess, "Popen", Process)
    with pytest.raises(KeyboardInterrupt):
        cell_process.run_cell("ties", "none", alone=False, results_dir=Path("cells"))
    assert calls == ["terminate", "wait", "kill"]


def test_processes_need_a_command() -> None:
    with pytest.raises(CalibrationError, match=r"method.process_per_cell=true starts the command"):
        cell_process.check_command()
