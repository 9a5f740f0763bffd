"""Files of runs: they are read back as they were written, and damage is refused by name."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reports import LEVELS, error_of, leave_cells, leave_run, leave_seeds, make_run

from fusion_bench_featcal.results import Note, ReportError, load, read_run, write_run


def test_a_written_run_reads_unchanged(tmp_path: Path) -> None:
    names = LEVELS | {"../up/down": 0.5, "índice 索引": 0.4, "index": 0.2}
    run = make_run(names, ("cars", "a|b", "a/b"), versions={"torch": "2"})
    settings = {"ridge_lambda": 0.05, "modules": ("mlp", "norm"), "folder": Path("data")}
    scores: Any = {"accuracy": {"cars": 0.5, "a|b": 0.1 + 0.2, "a/b": 0.25},
                   "loss": {"cars": math.nan, "a|b": 1.5}}  # fmt: skip
    cost: Any = {"seconds": np.float32(1.5), "bytes": torch.tensor(3)}
    run.add_row("new", scores, settings=settings, cost=cost, conditions={"precision": "32"})
    run.lines.append({"row": 'one, "two"\nthree', "block": "0", "metric": "drift", "value": 0.3})
    run.note(Note("note", "slow disk", "new"))
    again = read_run(write_run(tmp_path / "deep" / "run", run))
    assert again.all_lines() == run.all_lines() and again.notes == run.notes
    assert (again.accuracy, again.versions) == (run.accuracy, run.versions)
    row = again.row("new")
    assert row.settings == {"ridge_lambda": 0.05, "modules": ["mlp", "norm"], "folder": "data"}
    assert row.cost == {"seconds": 1.5, "bytes": 3} and row.scores["loss"] == {"a|b": 1.5}
    for one, two in zip(run.rows, again.rows, strict=True):
        for task, flag in (one.correct or {}).items():
            np.testing.assert_array_equal((two.correct or {})[task], flag)


def test_report_json_is_a_dump_of_accuracies_and_shares(tmp_path: Path) -> None:
    content = json.loads((leave_run(tmp_path) / "report.json").read_text())
    assert content["rows"]["featcal"] == {"cars": 0.75, "dtd": 0.75, "average": 0.75}
    assert content["recovered_gap"] == pytest.approx({"featcal": 0.5})


def test_all_numbers_of_any_runs_are_one_frame(tmp_path: Path) -> None:
    frame = load(leave_seeds(tmp_path / "seeds"), leave_cells(tmp_path / "cells"))
    average = frame[(frame.metric == "accuracy") & (frame.task == "average")]
    featcal = average[average.row == "featcal"]
    ours = featcal[featcal.merger == "task_arithmetic"]
    assert [*zip(ours.seed, ours.value, strict=True)] == [(1, 0.7), (2, 0.75), (3, 0.8)]
    featcal_64 = featcal[featcal.samples_per_task == 64]
    assert [*featcal_64.value] == pytest.approx([0.674, 0.684, 0.694])
    assert len(average[average.row == "experts"]) == 1  # equal ones count once
    assert set(frame[frame.metric == "cost.seconds"].value) == {10.0}


@pytest.mark.parametrize(
    ("name", "accuracy", "correct", "message"),
    [
        ("featcal", {"cars": 0.5, "dtd": 0.5}, None, "'featcal' is already"),
        ("new", {"cars": 50.0, "dtd": 0.5}, None, r"'new', task 'cars': accuracy 50\.0"),
        ("new", {"cars": 0.5}, None, r"missing \['dtd'\]"),
        ("new", {"cars": 0.5, "dtd": 0.5}, {"cars": [1, 0, 0, 0], "dtd": [1, 0]},
         "'new', task 'cars': 1 of 4 test examples"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_right_are_refused(name, accuracy, correct, message) -> None:
    with pytest.raises(ReportError, match=message):
        make_run().add_row(name, {"accuracy": accuracy}, correct=correct)


HEAD = "suite,merger,row,task,block,seed,metric,value\n"
RUN = '{"schema": 3, "suite": "", "merger": "", "versions": {}, "device": {}, '
RUN += '"rows": %s, "notes": %s}'
DAMAGED: list[tuple[str, str, str]] = [
    ("run.json", '{"schema": 99}', "has schema 99, but this version reads 3"),
    ("run.json", '{"schema": 3}', "is damaged: KeyError"),
    ("run.json", '{"schema": ', "is damaged: .*Expecting"),
    ("run.json", RUN % ('[{"name": "x"}]', "[]"), "is damaged: .*missing 2 required .*'suite'"),
    ("run.json", RUN % ("[]", '[{"text": "x", "what": 1}]'), "is damaged: .* argument 'what'"),
    ("lines.csv", f"{HEAD}toy,ties,x,a,b,42,y,nan\n", "is damaged: .*nan is not a valid value of"),
    ("lines.csv", "", "is damaged: .*its first line has no "),
    ("items.npz", "half an arch", "is damaged: "),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED, ids=lambda value: str(value)[:40])
def test_damaged_files_are_refused_by_name(name: str, content: str, message: str, tmp_path: Path):
    folder = leave_run(tmp_path / "run")
    (folder / name).write_text(content)
    text = error_of("report", folder)
    assert str(folder / name) in text and re.search(message, text), text


def test_items_of_another_run_and_earlier_layouts_are_refused(tmp_path: Path) -> None:
    run, other = leave_run(tmp_path / "run"), LEVELS | {"featcal": 0.7}
    (leave_run(tmp_path / "other", other) / "items.npz").replace(run / "items.npz")
    with pytest.raises(ReportError, match="model 'featcal', task 'cars': 140 of 200"):
        read_run(run)
    (run / "run.json").unlink()
    (run / "report.json").write_text(json.dumps({"kind": "run", "schema": 2}))
    assert "no run in or below" in error_of("report", run)
