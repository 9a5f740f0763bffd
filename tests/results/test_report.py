"""Report of one run: rows, files, the long table, and refusal of what does not fit."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import LEVELS, make_report

from fusion_bench_featcal.results import AVERAGE, Report, ReportError
from fusion_bench_featcal.results.long_table import LINES_FILE, read_lines, where
from fusion_bench_featcal.results.notes import Note
from fusion_bench_featcal.results.summary import summarise_reports


def content_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


def test_average_is_the_mean_over_tasks_and_order_follows_the_first_row():
    report = Report()
    report.add_row("base", {"a": 0.1, "b": 0.4})
    report.add_row("experts", {"b": 1.0, "a": 0.5, "average": 0.123})
    assert report.rows["experts"] == {"a": 0.5, "b": 1.0, AVERAGE: 0.75}
    assert list(report.rows["experts"]) == ["a", "b", AVERAGE]


def test_recovered_gap_is_the_closed_share_of_the_distance_to_the_experts():
    shares = {"base": -1.0, "experts": 1.0, "task_arithmetic": 0.0, "featcal": 0.5}
    assert make_report().recovered_gap == pytest.approx(shares)
    report = Report(upstream="merged")
    report.add_row("merged", {"a": 0.9, "b": 0.1})
    report.add_row("experts", {"a": 0.9, "b": 0.7})
    report.add_row("featcal", {"a": 0.8, "b": 0.4})
    per_task = report.to_dict()["recovered_gap_per_task"]["featcal"]
    assert per_task == {"a": None, "b": pytest.approx(0.5)}  # no gap on a
    assert report.recovered_gap["featcal"] == pytest.approx(0.1 / 0.3)


@pytest.mark.parametrize("missing", ["experts", "task_arithmetic"])
def test_no_gap_without_experts_or_merged_model(missing: str):
    report = make_report({name: value for name, value in LEVELS.items() if name != missing})
    assert set(report.recovered_gap.values()) == {None}


def test_written_report_loads_as_the_same_and_an_earlier_ones_items_are_gone(tmp_path: Path):
    report = make_report(notes=["calibrated on the test split"], versions={"torch": "2"})
    folder = report.write(tmp_path / "deep" / "run").parent
    loaded = Report.load(folder)
    assert loaded.to_dict() == report.to_dict()
    for name, tasks in report.items.items():
        for task, flag in tasks.items():
            np.testing.assert_array_equal(loaded.items[name][task], flag)
    names = {"items.npz", "lines.csv", "report.json", "report.md"}
    assert {path.name for path in folder.iterdir()} == names
    make_report(items=False).write(folder)
    assert Report.load(folder).items == {}


def test_the_long_table_has_one_number_per_line(tmp_path: Path):
    report = make_report()
    report.add_row("new", {"cars": 0.123456, "dtd": 0.65432})
    report.labels = {"samples_per_task": 8}
    lines = report.lines()
    shares = where(lines, row="featcal", metric="recovered_gap")
    assert [line["task"] for line in shares] == ["cars", "dtd", "average"]
    assert [line["value"] for line in shares] == pytest.approx([0.5] * 3)
    new = where(lines, row="new", metric="accuracy", samples_per_task=8, seed=42)
    assert [line["value"] for line in new] == [0.123456, 0.65432, 0.388888]
    report.write(tmp_path)
    assert read_lines(tmp_path / LINES_FILE) == lines


def test_settings_may_be_a_dataclass_and_scalars_may_be_tensors(tmp_path: Path):
    @dataclass(frozen=True)
    class Settings:
        ridge_lambda: float
        modules: tuple[str, ...]
        folder: Path

    report = Report()
    settings = Settings(ridge_lambda=0.05, modules=("mlp", "norm"), folder=Path("data"))
    cost = {"seconds": np.float32(1.5), "bytes": torch.tensor(3)}
    report.add_row("featcal", {"a": torch.tensor(0.25)}, settings=settings, cost=cost)
    report.write(tmp_path)
    content = content_of(tmp_path)
    expected = {"ridge_lambda": 0.05, "modules": ["mlp", "norm"], "folder": "data"}
    assert content["settings"]["featcal"] == expected
    assert content["cost"]["featcal"] == {"seconds": 1.5, "bytes": 3}


def test_losses_are_kept_absent_ones_stay_absent_and_infinite_ones_become_notes(tmp_path: Path):
    half = {"cars": 0.5, "dtd": 0.5}
    report = make_report(items=False)
    report.add_row("new", half, loss={"cars": 0.5, "dtd": 1.5})
    report.add_row("one", half, loss={"cars": 0.0, "dtd": None})
    report.add_row("two", half, loss={"cars": float("nan"), "dtd": 1.0})
    new = {"cars": 0.5, "dtd": 1.5, AVERAGE: 1.0}
    assert report.loss == {"new": new, "one": {"cars": 0.0}, "two": {"dtd": 1.0}}
    (note,) = report.notes
    assert note == Note("loss", "the loss of cars is nan", "two", "cars", "task_arithmetic")
    report.write(tmp_path)
    assert Report.load(tmp_path).loss == report.loss
    losses = {
        (e["row"], e["task"]): float(e["value"]) for e in report.lines() if e["metric"] == "loss"
    }
    assert [losses["new", task] for task in new] == [0.5, 1.5, 1.0]
    assert not {("one", "dtd"), ("base", "cars")} & set(losses)


def test_a_report_from_before_losses_were_kept_loads(tmp_path: Path):
    make_report(items=False).write(tmp_path)
    content = content_of(tmp_path)
    del content["loss"]
    (tmp_path / "report.json").write_text(json.dumps(content))
    assert Report.load(tmp_path).loss == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [(float("nan"), "featcal.x: nan cannot be written"), (object(), "featcal.x: a object cannot")],
)
def test_what_json_cannot_hold_is_named(value: object, message: str):
    with pytest.raises(ReportError, match=message):
        Report().add_row("featcal", {"a": 0.5}, settings={"x": value})


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("new", {"cars": 0.5}, r"'new'.*missing \['dtd'\]"),
        ("new", {"cars": 0.5, "dtd": 0.5, "svhn": 0.5}, r"'new'.*extra \['svhn'\]"),
        ("new", {"cars": 50.0, "dtd": 0.5}, "'new', task 'cars': accuracy 50.0"),
        ("new", {"cars": float("nan"), "dtd": 0.5}, "'new', task 'cars': accuracy nan"),
        ("new", {}, "'new' has no task"),
        ("featcal", {"cars": 0.5, "dtd": 0.5}, "'featcal' is already"),
    ],
)
def test_bad_rows_are_refused_by_name(name: str, row: dict[str, float], message: str):
    with pytest.raises(ReportError, match=message):
        make_report().add_row(name, row)


def test_flags_must_agree_with_accuracy_and_with_the_other_rows():
    report, right = make_report(), [True, False]
    with pytest.raises(ReportError, match=r"1 of 2 test items are right.*0\.750000"):
        report.add_row("new", {"cars": 0.75, "dtd": 0.5}, correct={"cars": right, "dtd": right})
    with pytest.raises(ReportError, match="2 test items, the test set has 200"):
        report.add_row("new", {"cars": 0.5, "dtd": 0.5}, correct={"cars": right, "dtd": right})
    with pytest.raises(ReportError, match="task 'dtd': no flags"):
        report.add_row("new", {"cars": 0.5, "dtd": 0.5}, correct={"cars": np.arange(200) < 100})
    assert "new" not in report.rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 99}, "has schema 99; this version .* reads schema 2"),
        ({"kind": "other"}, "is not the report of a run"),
        ({"surprise": 1}, r"unknown keys \['surprise'\]"),
        ({"loss": []}, "loss must be a mapping, got list"),
        ({"loss": {"other": {"cars": 1.0}}}, "the loss of 'other' must map the row's task names"),
        ({"loss": {"base": {"cars": "low"}}}, "loss: base: cars must be int or float"),
        ({"rows": []}, "rows must be a mapping, got list"),
        ({"rows": {"base": {"a": 0.5}}}, "row 'base' has no 'average'"),
        ({"rows": {"base": {"a": 0.5, "average": 0.6}}}, "'base': average 0.6 is not the mean"),
        ({"rows": {"base": {"a": 2, "average": 2}}}, "'base', task 'a': accuracy 2"),
        ({"rows": {"base": {"a": "high", "average": 1}}}, "a must be int or float, got str"),
        ({"samples": {"base": {"a": {"samples": 1}}}}, "samples: base: a: no split"),
        (None, r"cannot read .*report\.json"),
        ('{"kind": "run"', r"report\.json is not valid JSON"),
        ('{"kind": "run", "schema": 2}', r"missing keys \['cost', 'device'"),
    ],
)
def test_loading_names_what_is_wrong(tmp_path: Path, changes: Any, message: str):
    path = make_report(items=False).write(tmp_path)
    if changes is None:
        path.unlink()
    elif isinstance(changes, str):
        path.write_text(changes)
    else:
        path.write_text(json.dumps(content_of(tmp_path) | changes))
    with pytest.raises(ReportError, match=message) as caught:
        Report.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_items_of_another_run_are_refused(tmp_path: Path):
    make_report().write(tmp_path / "one")
    make_report({**LEVELS, "featcal": 0.7}).write(tmp_path / "two")
    (tmp_path / "two" / "items.npz").replace(tmp_path / "one" / "items.npz")
    with pytest.raises(ReportError, match="row 'featcal', task 'cars': 140 of 200"):
        Report.load(tmp_path / "one")


# ---- the long table


def test_every_number_of_a_report_is_a_line(tmp_path: Path):
    made = make_report()
    made.add_row("new", {"cars": 0.5, "dtd": 0.25}, loss={"cars": 2.0}, cost={"note": "none"})
    made.write(tmp_path)
    report = Report.load(tmp_path)
    entries = {(e["row"], e["metric"], e["task"]): e["value"] for e in report.lines()}
    for name, row in report.rows.items():
        assert {task: entries[name, "accuracy", task] for task in row} == row
        share = report.to_dict()["recovered_gap_per_task"][name]
        share["average"] = report.recovered_gap[name]
        assert {task: entries[name, "recovered_gap", task] for task in row} == share
        for what, value in report.cost.get(name, {}).items():
            assert entries.get((name, f"cost.{what}", ""), "none") == value
    assert entries["new", "loss", "cars"] == 2.0
    assert ("new", "loss", "average") not in entries


def test_rows_of_a_merger_stand_together_and_only_whole_series_are_averaged():
    runs = [
        make_report({"wudi": 0.5, "featcal": 0.6}, upstream="wudi", seed=1),
        make_report({"ties": 0.5}, upstream="ties", seed=1),
        make_report({"wudi": 0.7, "surgery": 0.8}, upstream="wudi", seed=2),
        make_report({"wudi": 0.5, "featcal": 0.6}, upstream="wudi", seed=1),  # repeated
    ]
    rows = summarise_reports({Path(f"{n}"): run for n, run in enumerate(runs)}).rows
    assert [(row.upstream, row.name, len(row.run_seeds)) for row in rows] == [
        ("wudi", "wudi", 2), ("wudi", "featcal", 1), ("wudi", "surgery", 1), ("ties", "ties", 1),
    ]  # fmt: skip
    assert rows[0].accuracy["cars"] == pytest.approx(0.6)
    # A gain is of the runs that have the row.
    assert [row.gain for row in rows] == pytest.approx([0, 0.1, 0.1, 0])
