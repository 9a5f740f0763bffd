"""Files of runs: they are read back as they were written, and damage is refused by name."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reports import (
    COLUMNS,
    GOLDEN,
    LEVELS,
    content_of,
    error_of,
    featcal,
    leave_cells,
    leave_lines,
    leave_run,
    leave_seeds,
    make_report,
    patch,
)

from fusion_bench_featcal import lab
from fusion_bench_featcal.results import Report, ReportError, load_items, means


def lines(folder: Path, **names: Any) -> list[dict[str, Any]]:
    """Lines of the long table with given values."""
    table = lab.load(folder)
    records = table if isinstance(table, list) else table.to_dict("records")
    return [line for line in records if all(line[name] == value for name, value in names.items())]


def test_a_written_report_loads_unchanged(tmp_path: Path):
    names = LEVELS | {"../up/down": 0.5, "índice 索引": 0.4, "index": 0.2}
    report = make_report(names, ("cars", "a|b", "a/b"), versions={"torch": "2"})
    settings = {"ridge_lambda": 0.05, "modules": ("mlp", "norm"), "folder": Path("data")}
    cost = {"seconds": np.float32(1.5), "bytes": torch.tensor(3)}
    half = {"cars": torch.tensor(0.5), "a|b": 0.25, "a/b": 0.25}
    report.add_row("new", half, settings=settings, cost=cost, loss={"cars": math.nan, "a|b": 1.5})
    folder = report.write(tmp_path / "deep" / "run").parent
    loaded = Report.load(folder)
    assert loaded.to_dict() == report.to_dict()
    expected = {"ridge_lambda": 0.05, "modules": ["mlp", "norm"], "folder": "data"}
    assert (loaded.settings["new"], loaded.cost["new"]) == (expected, {"seconds": 1.5, "bytes": 3})
    assert loaded.loss == {"new": {"a|b": 1.5}}
    assert "the loss of cars is nan" in (folder / "report.md").read_text()
    for name, tasks in report.items.items():
        for task, flag in tasks.items():
            np.testing.assert_array_equal(loaded.items[name][task], flag)
    make_report(items=False).write(folder)
    assert Report.load(folder).items == {}  # those of the earlier report are gone
    with pytest.raises(ReportError, match=r"'newer', task 'cars': accuracy 50\.0"):
        report.add_row("newer", half | {"cars": 50.0})


def test_every_number_of_a_report_is_a_line(tmp_path: Path):
    report = make_report(labels={"samples_per_task": 8})
    report.add_row("new", {"cars": 0.123456, "dtd": 0.65432}, loss={"cars": 2.0})
    report.write(tmp_path)
    content = content_of(tmp_path)
    entries = {
        (line["row"], line["metric"], line["task"]): line["value"]
        for line in lines(tmp_path, samples_per_task=8, seed=42, merger="task_arithmetic")
    }
    for name, row in content["rows"].items():
        assert {task: entries[name, "accuracy", task] for task in row} == row
        shares = content["recovered_gap_per_task"][name]
        shares |= {"average": content["recovered_gap"][name]}
        assert {task: entries[name, "recovered_gap", task] for task in row} == shares
    assert entries["featcal", "cost.seconds", ""] == 10 and entries["new", "loss", "cars"] == 2.0
    assert entries["featcal", "recovered_gap", "average"] == pytest.approx(0.5)


def test_the_long_table_of_runs_comparisons_cells_and_diagnoses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seeds = leave_seeds(tmp_path / "seeds")
    whole = lines(seeds[0])
    monkeypatch.setattr("fusion_bench_featcal.lab.report.load.find_spec", lambda _: None)
    assert lab.load(seeds[0]) == whole  # a list without pandas
    (seeds[0] / "lines.csv").unlink()  # as an earlier version left it
    assert lines(seeds[0]) == whole and [*whole[0]] == [*COLUMNS]
    assert featcal("report", *seeds, "--out", tmp_path / "tables").code == 0
    average = {"metric": "accuracy", "task": "average"}
    chosen = lines(tmp_path / "tables", row="featcal", **average)
    assert [line["value"] for line in chosen] == pytest.approx([0.7, 0.75, 0.8])
    assert lines(tmp_path) == lines(tmp_path / "tables")  # each run counts once
    cells = leave_cells(tmp_path / "cells")
    chosen = lines(cells, row="featcal", **average, samples_per_task=64)
    assert [line["value"] for line in chosen] == pytest.approx([0.674, 0.684])
    drift = {"row": 'one, "two"\nthree', "block": "0", "class": "c", "metric": "drift"}
    drift |= {"value": 0.1 + 0.2}
    (line,) = lines(leave_lines(leave_run(tmp_path / "d"), [drift]))
    assert line == dict.fromkeys(COLUMNS, "") | drift
    assert len(lines(GOLDEN, row="surgery", merger="simple_average", **average)) == 2


# ---- refused by name

LINE = {"suite": "toy", "merger": "task_arithmetic", "row": "featcal", "task": "a", "block": "b",
        "metric": "relative", "value": 1.0}  # fmt: skip


def test_numbers_that_must_not_be_averaged_are_refused(tmp_path: Path):
    several = [LINE | {"row": "task_arithmetic"}, LINE, LINE | {"task": "average"}]
    message = error_of("report", leave_lines(leave_run(tmp_path), several))
    assert "would mix a task with what it is part of" in message
    with pytest.raises(ReportError, match="would mix the metrics items, relative"):
        means([LINE, LINE | {"metric": "items"}], "row")


def test_damaged_items_are_refused(tmp_path: Path):
    run = leave_run(tmp_path / "run")
    file = run / "items.npz"
    content = file.read_bytes()
    for at in range(0, len(content) - 66, 37):  # the seal is at the end
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        with pytest.raises(ReportError, match=r"items\.npz is damaged"):
            load_items(run)
    np.savez(file, index=np.array([["base", "a"]], dtype=object), allow_pickle=True)
    with pytest.raises(ReportError, match=r"items\.npz is damaged.*allow_pickle"):
        load_items(run)
    (leave_run(tmp_path / "other", LEVELS | {"featcal": 0.7}) / "items.npz").replace(file)
    with pytest.raises(ReportError, match="row 'featcal', task 'cars': 140 of 200"):
        Report.load(run)  # items of another run


# Files of a run with their contents, or what is changed in its report.
RISING = {"name": "surgery", "task": "cars", "losses": [[20, 1.0], [0, 2.0]]}
NO_NUMBER = ",".join(COLUMNS) + "\ntoy,task_arithmetic,featcal,a,b,,42,relative,nan\n"
LOG = {"kind": "task", "task": "cars", "block": "layers.0", "drift_before": 2.0, "drift_after": "x"}
DAMAGED: list[tuple[str, Any, str]] = [
    ("report.json", {"schema": 99}, "has schema 99; this version .* reads schema 2"),
    ("report.json", {"surprise": 1}, r"unknown keys \['surprise'\]"),
    ("report.json", {"rows": {"base": {"a": 0.5, "average": 0.6}}}, "average 0.6 is not the mean"),
    ("report.json", '{"kind": "run"', "is not valid JSON"),
    ("report.json", '{"kind": "run", "schema": 2}', r"missing keys \['cost', 'device'"),
    ("report.json", "[" * 100_000, ""),
    ("lines.csv", NO_NUMBER, ", line 2: 'nan' is no number"),
    ("training_curves.jsonl", '{"name": "surgery"}', ""),
    ("training_curves.jsonl", json.dumps(RISING), ""),
    ("calibration_log.jsonl", json.dumps(LOG), ""),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED, ids=lambda value: str(value)[:40])
def test_damaged_files_are_refused_by_name(name: str, content: Any, message: str, tmp_path: Path):
    folder = leave_run(tmp_path / "run", items=False)
    if isinstance(content, dict):
        patch(folder, **content)
    else:
        (folder / name).write_text(content)
    text = error_of("report", folder, "--figures", tmp_path / "figures")
    assert str(folder / name) in text and re.search(message, text), text
