"""The long table holds every number of a report, and other views say the same."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from synthetic import make_report

from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.long_table import LongTable
from fusion_bench_featcal.results.report import report_scalars


def test_every_number_of_a_report_is_an_entry(tmp_path: Path) -> None:
    made = make_report()
    made.add_row("new", {"cars": 0.5, "dtd": 0.25}, loss={"cars": 2.0}, cost={"note": "none"})
    made.write(tmp_path)
    report = Report.load(tmp_path)
    entries = {(e.row, e.metric, e.task): e.value for e in report.entries()}
    for name, row in report.rows.items():
        assert {task: entries[name, "accuracy", task] for task in row} == row
        share = report.to_dict()["recovered_gap_per_task"][name] | {
            "average": report.recovered_gap[name]
        }
        assert {task: entries[name, "recovered_gap", task] for task in row} == share
        for task, flags in report.items.get(name, {}).items():
            np.testing.assert_array_equal(entries[name, "correct", task], flags)
        for what, value in report.cost.get(name, {}).items():
            assert entries[name, f"cost.{what}", ""] == value
    assert entries["new", "loss", "cars"] == 2.0
    assert ("new", "loss", "average") not in entries


def test_csv_and_loggers_show_the_same_numbers() -> None:
    report = make_report()
    scalars = report_scalars(report)
    lines = csv.DictReader(io.StringIO(report.csv()))
    for line in (line for line in lines if line["name"] == "featcal"):
        what = line["task"] if line["task"] == "average" else f"accuracy/{line['task']}"
        assert scalars[f"task_arithmetic/featcal/{what}"] == pytest.approx(float(line["accuracy"]))
    assert scalars["task_arithmetic/featcal/gain"] == pytest.approx(0.15)
    assert scalars["task_arithmetic/featcal/recovered_gap"] == pytest.approx(0.5)
    assert scalars["task_arithmetic/featcal/normalised"] == pytest.approx(0.75 / 0.9)
    assert scalars["task_arithmetic/featcal/seconds"] == 10.0
    assert "base/gain" not in scalars and "task_arithmetic/recovered_gap" not in scalars


def test_rows_of_a_merger_stand_together_and_only_whole_series_are_averaged() -> None:
    runs = [
        make_report({"wudi": 0.5, "featcal": 0.6}, upstream="wudi", seed=1),
        make_report({"ties": 0.5}, upstream="ties", seed=1),
        make_report({"wudi": 0.7, "surgery": 0.8}, upstream="wudi", seed=2),
        make_report({"wudi": 0.5, "featcal": 0.6}, upstream="wudi", seed=1),  # repeated
    ]
    table = LongTable(entry for run in runs for entry in run.entries())
    assert [key[1:] for key in table.rows()] == [
        ("wudi", "wudi"), ("wudi", "featcal"), ("wudi", "surgery"), ("ties", "ties"),
    ]  # fmt: skip
    seeds = table.seeds(("toy", "wudi", "wudi"))
    assert table.values(("toy", "wudi", "wudi"), "accuracy", seeds)["cars"] == [0.5, 0.7]
    assert table.values(("toy", "wudi", "featcal"), "accuracy", seeds) == {}
