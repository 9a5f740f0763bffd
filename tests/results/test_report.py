import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic import LEVELS, make_report

from fusion_bench_featcal.results import AVERAGE, Report, ReportError, accuracies
from fusion_bench_featcal.results.report import losses


def test_average_is_the_mean_over_tasks_and_order_follows_the_first_row():
    report = Report()
    report.add_row("base", {"a": 0.1, "b": 0.4})
    report.add_row("experts", {"b": 1.0, "a": 0.5, "average": 0.123})
    assert report.tasks == ["a", "b"]
    assert report.rows["experts"] == {"a": 0.5, "b": 1.0, AVERAGE: 0.75}
    assert list(report.rows["experts"]) == ["a", "b", AVERAGE]


def test_recovered_gap_is_the_closed_share_of_the_distance_to_the_experts():
    report = make_report()
    assert report.recovered_gap == pytest.approx(
        {"base": -1.0, "experts": 1.0, "task_arithmetic": 0.0, "featcal": 0.5}
    )
    assert report.to_dict()["recovered_gap_per_task"]["featcal"] == pytest.approx(
        {"cars": 0.5, "dtd": 0.5}
    )


@pytest.mark.parametrize("missing", ["experts", "task_arithmetic"])
def test_no_gap_without_experts_or_merged_model(missing: str):
    report = make_report({name: value for name, value in LEVELS.items() if name != missing})
    assert set(report.recovered_gap.values()) == {None}


def test_no_gap_where_the_merged_model_is_as_good_as_the_experts():
    report = Report(upstream="merged")
    report.add_row("merged", {"a": 0.9, "b": 0.1})
    report.add_row("experts", {"a": 0.9, "b": 0.7})
    report.add_row("featcal", {"a": 0.8, "b": 0.4})
    assert report.to_dict()["recovered_gap_per_task"]["featcal"] == {
        "a": None,
        "b": pytest.approx(0.5),
    }
    assert report.recovered_gap["featcal"] == pytest.approx(0.1 / 0.3)


def test_written_report_loads_as_the_same(tmp_path: Path):
    report = make_report(notes=["calibrated on the test split"], versions={"torch": "2"})
    path = report.write(tmp_path / "deep" / "run")
    loaded = Report.load(path.parent)
    assert loaded.to_dict() == report.to_dict()
    for name, tasks in report.items.items():
        for task, flag in tasks.items():
            np.testing.assert_array_equal(loaded.items[name][task], flag)


def test_report_json_holds_the_promised_keys(tmp_path: Path):
    make_report().write(tmp_path)
    content = json.loads((tmp_path / "report.json").read_text())
    promised = {"rows", "recovered_gap", "settings", "cost", "seeds", "versions", "schema"}
    assert promised <= set(content)
    assert content["rows"]["featcal"] == {"cars": 0.75, "dtd": 0.75, "average": 0.75}
    assert content["test_sets"] == {"cars": {"items": 200}, "dtd": {"items": 200}}


def test_a_run_leaves_whole_files_and_nothing_else(tmp_path: Path):
    make_report().write(tmp_path)
    make_report().write(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["items.npz", "report.csv", "report.json", "report.md"]


def test_items_of_an_earlier_report_do_not_outlive_it(tmp_path: Path):
    make_report().write(tmp_path)
    make_report(items=False).write(tmp_path)
    assert Report.load(tmp_path).items == {}


def test_csv_has_one_line_per_row_and_task():
    lines = list(csv.DictReader(io.StringIO(make_report().csv())))
    assert len(lines) == 4 * 3
    featcal = [line for line in lines if line["name"] == "featcal"]
    assert [line["task"] for line in featcal] == ["cars", "dtd", "average"]
    assert {line["recovered_gap"] for line in featcal} == {"0.500000"}


def test_csv_holds_accuracies_to_six_digits():
    report = Report()
    report.add_row("featcal", {"cars": 0.123456, "dtd": 0.65432})
    accuracies = [line["accuracy"] for line in csv.DictReader(io.StringIO(report.csv()))]
    assert accuracies == ["0.123456", "0.654320", "0.388888"]


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
    content = json.loads((tmp_path / "report.json").read_text())
    expected = {"ridge_lambda": 0.05, "modules": ["mlp", "norm"], "folder": "data"}
    assert content["settings"]["featcal"] == expected
    assert content["cost"]["featcal"] == {"seconds": 1.5, "bytes": 3}


LOSSES = {"cars": 0.5, "dtd": 1.5}


def test_losses_are_in_json_and_csv_and_load_again(tmp_path: Path):
    report = make_report(items=False)
    report.add_row("new", {"cars": 0.5, "dtd": 0.25}, loss=LOSSES)
    report.write(tmp_path)
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["loss"] == {"new": {**LOSSES, AVERAGE: 1.0}}
    assert Report.load(tmp_path).loss == report.loss
    lines = list(csv.DictReader(io.StringIO(report.csv())))
    new = {line["task"]: line["loss"] for line in lines if line["name"] == "new"}
    assert new == {"cars": "0.500000", "dtd": "1.500000", "average": "1.000000"}
    assert {line["loss"] for line in lines if line["name"] != "new"} == {""}
    assert list(lines[0])[-1] == "loss"


def test_losses_that_are_absent_stay_absent_and_infinite_ones_become_notes(tmp_path: Path):
    report = Report()
    report.add_row("one", {"a": 0.5, "b": 0.5}, loss={"a": 2.0, "b": None})
    report.add_row("two", {"a": 0.5, "b": 0.5}, loss={"a": float("nan"), "b": 1.0})
    report.add_row("three", {"a": 0.5, "b": 0.5}, loss={})
    assert report.loss == {"one": {"a": 2.0}, "two": {"b": 1.0}}
    assert report.notes == ["two: the loss of a is nan"]
    report.write(tmp_path)


def test_a_report_from_before_losses_were_kept_loads(tmp_path: Path):
    make_report(items=False).write(tmp_path)
    content = json.loads((tmp_path / "report.json").read_text())
    del content["loss"], content["digest"]
    (tmp_path / "report.json").write_text(json.dumps(content))
    assert Report.load(tmp_path).loss == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [(float("nan"), "featcal.x: nan cannot be kept"), (object(), "featcal.x: a object cannot")],
)
def test_what_json_cannot_hold_is_named(value: object, message: str):
    with pytest.raises(ReportError, match=message):
        Report().add_row("featcal", {"a": 0.5}, settings={"x": value})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"cars": 0.5}, r"'new'.*missing \['dtd'\]"),
        ({"cars": 0.5, "dtd": 0.5, "svhn": 0.5}, r"'new'.*extra \['svhn'\]"),
        ({"cars": 50.0, "dtd": 0.5}, "'new', task 'cars': accuracy 50.0"),
        ({"cars": float("nan"), "dtd": 0.5}, "'new', task 'cars': accuracy nan"),
        ({}, "'new' has no task"),
    ],
)
def test_bad_rows_are_refused_by_name(row: dict[str, float], message: str):
    with pytest.raises(ReportError, match=message):
        make_report().add_row("new", row)


def test_a_row_cannot_be_replaced():
    with pytest.raises(ReportError, match="'featcal' is already"):
        make_report().add_row("featcal", {"cars": 0.5, "dtd": 0.5})


def test_flags_must_agree_with_accuracy_and_with_the_other_rows():
    report = make_report()
    right = [True, False]
    with pytest.raises(ReportError, match=r"1 of 2 test items are right.*0\.750000"):
        report.add_row("new", {"cars": 0.75, "dtd": 0.5}, correct={"cars": right, "dtd": right})
    with pytest.raises(ReportError, match="2 test items, the test set has 200"):
        report.add_row("new", {"cars": 0.5, "dtd": 0.5}, correct={"cars": right, "dtd": right})
    with pytest.raises(ReportError, match="task 'dtd': no flags"):
        report.add_row("new", {"cars": 0.5, "dtd": 0.5}, correct={"cars": np.arange(200) < 100})
    assert "new" not in report.rows


def _damage(path: Path, **changes: object) -> None:
    content = json.loads((path / "report.json").read_text())
    del content["digest"]  # as of an earlier version, or edited on purpose
    content.update(changes)
    (path / "report.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 99}, "has schema 99; this version .* reads schema 1"),
        ({"kind": "other"}, "is not the report of a run"),
        ({"surprise": 1}, r"unknown keys \['surprise'\]"),
        ({"loss": []}, "loss must be a mapping, got list"),
        ({"loss": {"other": {"cars": 1.0}}}, "the loss of 'other' must map the row's task names"),
        (
            {"loss": {"base": {"cars": "low"}}},
            "loss: base: cars must be int or float",
        ),
        ({"rows": []}, "rows must be a mapping, got list"),
        ({"rows": {"base": {"a": 0.5}}}, "row 'base' has no 'average'"),
        ({"rows": {"base": {"a": 0.5, "average": 0.6}}}, "'base': average 0.6 is not the mean"),
        ({"rows": {"base": {"a": 2, "average": 2}}}, "'base', task 'a': accuracy 2"),
        (
            {"rows": {"base": {"a": "high", "average": 1}}},
            "a must be int or float, got str",
        ),
    ],
)
def test_loading_names_what_is_wrong(tmp_path: Path, changes: dict[str, object], message: str):
    make_report(items=False).write(tmp_path)
    _damage(tmp_path, **changes)
    with pytest.raises(ReportError, match=message) as caught:
        Report.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_loading_names_missing_keys_and_files(tmp_path: Path):
    with pytest.raises(ReportError, match=r"cannot read .*report\.json"):
        Report.load(tmp_path)
    (tmp_path / "report.json").write_text('{"kind": "run"')
    with pytest.raises(ReportError, match=r"report\.json is not valid JSON"):
        Report.load(tmp_path)
    (tmp_path / "report.json").write_text('{"kind": "run", "schema": 1}')
    with pytest.raises(ReportError, match=r"missing keys \['cost', 'device'"):
        Report.load(tmp_path)


def test_items_of_another_run_are_refused(tmp_path: Path):
    make_report().write(tmp_path / "one")
    make_report({**LEVELS, "featcal": 0.7}).write(tmp_path / "two")
    (tmp_path / "two" / "items.npz").replace(tmp_path / "one" / "items.npz")
    with pytest.raises(ReportError, match="row 'featcal', task 'cars': 140 of 200"):
        Report.load(tmp_path / "one")


def test_accuracies_come_out_of_an_evaluation():
    evaluation = {
        "model_info": {"all_params": 3},
        "cars": {"accuracy": 0.5, "loss": 1.0},
        "dtd": {"accuracy": 0.25, "loss": 2.0},
        "average": {"accuracy": 0.375, "loss": 1.5},
    }
    assert accuracies(evaluation) == {"cars": 0.5, "dtd": 0.25}
    assert losses(evaluation, ["cars", "dtd"]) == {"cars": 1.0, "dtd": 2.0}
    assert losses({"cars": {"accuracy": 0.5}}, ["cars"]) == {"cars": None}
