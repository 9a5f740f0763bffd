"""The long table `lines.csv`: written, read, refused, selected and averaged."""

from pathlib import Path

import pytest

from fusion_bench_featcal.files import ReportError
from fusion_bench_featcal.results.long_table import (
    DIMENSIONS,
    means,
    read_lines,
    where,
    write_lines,
)

LINES = [
    {"row": "featcal", "task": "a", "block": "0", "metric": "drift", "value": 0.1 + 0.2},
    {"row": "featcal", "task": "b", "block": "0", "metric": "drift", "value": 2},
    {"row": "featcal", "task": "a", "class": 'one, "two"\nthree', "metric": "items", "value": 3},
]


def test_lines_are_read_as_they_were_written(tmp_path: Path):
    path = write_lines(tmp_path / "lines.csv", LINES)
    empty = dict.fromkeys(DIMENSIONS, "")
    assert read_lines(path) == [empty | line for line in LINES]
    assert path.read_text().startswith("suite,merger,row,task,block,class,seed,metric,value\n")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_not_written(value: float, tmp_path: Path):
    with pytest.raises(ReportError, match=r"(nan|inf) is no value of row featcal, metric drift"):
        write_lines(tmp_path / "x.csv", [{"row": "featcal", "metric": "drift", "value": value}])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("suite,", "suit,", r"its first line has no suite$"),
        (",2\n", ",two\n", r", line 3: 'two' is no number"),
        (",2\n", ",nan\n", r", line 3: 'nan' is no number"),
        (",2\n", "\n", r", line 3: its columns are not those of the first line"),
        (",2\n", ",2,3\n", r", line 3: its columns are not those of the first line"),
        (",2\n", ",2\0\n", r"cannot read|is no number"),
    ],
)
def test_other_files_are_refused(old: str, new: str, message: str, tmp_path: Path):
    path = write_lines(tmp_path / "lines.csv", LINES)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ReportError, match=message) as caught:
        read_lines(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ReportError, match=r"cannot read .*lines\.csv"):
        read_lines(tmp_path / "lines.csv")


def test_selection_and_means():
    assert where(LINES, metric="drift", task="b") == LINES[1:2]
    assert where(LINES, class_="", block="0") == LINES[:2]
    assert means(LINES, "metric", "block") == {
        ("drift", "0"): pytest.approx(1.15), ("items", ""): 3
    }  # fmt: skip


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"metric": "items"}, "the mean of featcal would mix the metrics drift, items"),
        ({"suite": "toys"}, "the mean of featcal would mix the suites , toys"),
        ({"task": "average"}, "the mean of featcal would mix a task with what it is part of"),
        ({"block": ""}, "the mean of featcal would mix a block with what it is part of"),
        ({"class": "cat"}, "the mean of featcal would mix a class with what it is part of"),
    ],
)
def test_what_must_not_be_averaged_is_refused(other: dict[str, str], message: str):
    with pytest.raises(ReportError, match=message):
        means([LINES[0], LINES[0] | other], "row")


def test_labels_are_the_first_columns_and_numbers_stay_numbers(tmp_path: Path):
    line = {"samples_per_task": 8, "corruption": "fog", "row": "featcal", "seed": 42, "value": 1.5}
    path = write_lines(tmp_path / "lines.csv", [LINES[0], line])
    assert path.read_text().startswith("samples_per_task,corruption,suite,")
    read = read_lines(path)
    assert read[1] == dict.fromkeys(DIMENSIONS, "") | line
    assert read[0]["samples_per_task"] == ""
