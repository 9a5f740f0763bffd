"""Sentences about tasks, and the last lines of a run."""

import sys
from pathlib import Path
from shlex import quote
from typing import Any

import pytest
from reports import LEVELS, make_run

from fusion_bench_featcal.results import Run
from fusion_bench_featcal.results.remarks import (
    closing_lines,
    tasks_below_merged,
)


def test_the_last_lines_have_words_that_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a program below the current folder is shown by its short path
    monkeypatch.setenv("PATH", str(tmp_path))  # a shell without the environment
    *_, command = closing_lines(make_run(), "featcal", tmp_path, tmp_path / "my run")
    program = quote(str(Path(sys.executable).parent / "featcal"))
    assert command == f"next: {program} report 'my run'"
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert (
        closing_lines(make_run(), "featcal", tmp_path, Path("/a"))[-1] == "next: featcal report /a"
    )
    (line,) = closing_lines(Run(), "featcal", None)  # nothing was evaluated
    assert line == "not saved: merged_model_save_path=DIR saves the model of row featcal"


HIGHER: list[tuple[dict[str, float], str, str]] = [
    ({"featcal_mini": 0.765, "featcal_other": 0.76}, "featcal", "featcal_mini scored 1.5"),
    ({"featcal": 0.55}, "featcal", "the merged model (task_arithmetic) scored 5.0"),
    ({"featcal_mini": 0.75}, "featcal", ""),  # equal ones and references
]


@pytest.mark.parametrize(("changes", "row", "text"), HIGHER)
def test_a_row_that_scored_higher_is_named(changes: Any, row: str, text: str) -> None:
    _, *lines = closing_lines(make_run(LEVELS | changes), row, None)
    expected = [f"{text} points higher than {row}"] if text else []
    if text.startswith("featcal"):
        save = f"  method.save={text.split(' ')[0]} saves it (this selects on test data)"
        expected.append(save)
    assert lines == expected


def test_each_task_below_the_merged_model_has_a_sentence() -> None:
    run = Run(merger="merged")
    rows = {"base": (0.1, 0.1, 0.1), "merged": (0.5, 0.5, 0.5), "featcal": (0.468, 0.7, 0.4999),
            "featcal_mini": (0.48, 0.49, 0.6)}  # fmt: skip
    for name, accuracies in rows.items():
        run.add_row(name, {"accuracy": dict(zip("abc", accuracies, strict=True))})
    assert [note.text for note in tasks_below_merged(run.rows)] == [
        "a ends below the merged model: featcal -3.2, featcal_mini -2.0 points",
        "b ends below the merged model: featcal_mini -1.0 points",
    ]
    assert tasks_below_merged(run.rows[:1] + run.rows[2:]) == []  # without the merged model
