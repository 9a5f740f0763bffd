"""Sentences about tasks, and the last lines of a run."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from reports import LEVELS, make_report

from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.remarks import (
    closing_lines,
    tasks_below_merged,
    tasks_with_high_drift,
)


@pytest.fixture(autouse=True)
def activated(monkeypatch: pytest.MonkeyPatch) -> None:
    """This environment's programs are on PATH."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize("above", [True, False])
@pytest.mark.parametrize("other", [True, False])
def test_next_command_works_in_a_shell_without_the_environment(
    above: bool, other: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Path(sys.executable).parent
    if other:  # of another environment
        shutil.copy("/bin/false", tmp_path / "featcal")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(programs.parent if above else tmp_path)
    *_, report = closing_lines(make_report(), "featcal", None, tmp_path / "run")
    program, verb, folder = shlex.split(report.removeprefix("next: "))
    assert program == ("bin/featcal" if above else str(programs / "featcal"))
    assert [verb, folder] == ["report", str(tmp_path / "run")]
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("featcal ")


def test_last_lines_say_where_the_model_is_or_what_to_type(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    lines = closing_lines(make_report(), "featcal", tmp_path / "model", folder)
    assert lines == [
        f"saved the model of row featcal: {tmp_path / 'model'}",
        f"reports: {folder}",
        f"next: featcal report '{folder}'",
    ]
    (line,) = closing_lines(Report(), "featcal", None)  # nothing was evaluated
    assert line == "not saved: merged_model_save_path=DIR saves the model of row featcal"


@pytest.mark.parametrize(
    ("levels", "row", "expected"),
    [
        (
            LEVELS | {"featcal:mini": 0.765, "featcal:other": 0.76},
            "featcal",
            "featcal:mini scored 1.5 points higher than featcal",
        ),
        (
            LEVELS | {"featcal": 0.55},
            "featcal",
            "the merged model (task_arithmetic) scored 5.0 points higher than featcal",
        ),
        (LEVELS | {"featcal:mini": 0.7}, "featcal:mini", 
         "featcal scored 5.0 points higher than featcal:mini"),
        (LEVELS | {"surgery": 0.8}, "featcal", "surgery scored 5.0 points higher than featcal"),
        (LEVELS | {"featcal:mini": 0.75}, "featcal", ""),  # equal ones and references
    ],
)  # fmt: skip
def test_a_row_that_stands_higher_is_named(
    levels: dict[str, float], row: str, expected: str
) -> None:
    _, *lines = closing_lines(make_report(levels), row, None)
    advice = f"  method.save={expected.split(' ')[0]} saves it (this selects on test data)"
    assert lines == [expected, advice][: bool(expected) + expected.startswith("featcal")]


def test_each_task_below_the_merged_model_has_a_sentence() -> None:
    report = Report(upstream="merged")
    report.add_row("base", {"a": 0.1, "b": 0.1, "c": 0.1})
    report.add_row("merged", {"a": 0.5, "b": 0.5, "c": 0.5})
    report.add_row("featcal", {"a": 0.468, "b": 0.7, "c": 0.4999})
    report.add_row("featcal:mini", {"a": 0.48, "b": 0.49, "c": 0.6})
    assert [note.text for note in tasks_below_merged(report)] == [
        "a ends below the merged model: featcal -3.2, featcal:mini -2.0 points",
        "b ends below the merged model: featcal:mini -1.0 points",
    ]
    report.upstream = None
    assert tasks_below_merged(report) == []


def test_each_task_that_keeps_a_high_drift_after_the_last_block_has_a_sentence() -> None:
    drifts = [("0", "near", 0.9), ("0", "far", 0.5), ("1", "near", 0.3), ("1", "far", 0.93)]
    records = [
        {"kind": "task", "block": block, "task": task, "relative_drift_after": drift}
        for block, task, drift in drifts
    ]
    records += [
        {"kind": "task", "block": "1", "task": "unknown", "relative_drift_after": None},
        {"kind": "task", "block": "1", "task": "unlogged"},
        {"kind": "block", "block": "1"},
    ]
    (note,) = tasks_with_high_drift("featcal", records)
    assert note.sentence.startswith(
        "featcal: far keeps a relative drift of 0.93 after the last block"
    )
