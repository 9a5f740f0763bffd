"""Sentences about tasks, and the last lines of a run."""

from pathlib import Path

import pytest

from fusion_bench_featcal.results import Run
from fusion_bench_featcal.results.remarks import closing_lines, tasks_below_merged


def test_the_last_lines_have_words_that_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # folders below the current one are shown by their short path
    lines = closing_lines("featcal", tmp_path, tmp_path / "my run")
    assert lines[-1] == "next: featcal report 'my run'"
    assert closing_lines("featcal", tmp_path, Path("/a"))[-1] == "next: featcal report /a"
    (line,) = closing_lines("featcal", None)
    assert line == "not saved: merged_model_save_path=DIR saves the model of row featcal"


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
