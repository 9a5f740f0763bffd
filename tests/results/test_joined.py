"""Joined runs: which count, how rows find their partners, their tables and remarks."""

import csv
from pathlib import Path
from typing import Any

import pytest
from reports import (
    LEVELS,
    error_of,
    featcal,
    leave_cell,
    leave_cells,
    leave_run,
    leave_seeds,
    rows_of,
)

from fusion_bench_featcal.results import Run, join_folders, summary, write_run
from fusion_bench_featcal.results.remarks import closing_lines, tasks_below_merged


def leave_rows(folder: Path, rows: Any, seed: int, **facts: Any) -> Path:
    """A run of `ties` whose rows have accuracies of the tasks far, near and level."""
    run = Run(suite="toy", merger="ties")
    for name, accuracies in rows.items():
        tasks: list[str] = ["far", "near", "level"]
        accuracy = dict(zip(tasks, accuracies, strict=True))
        run.add_row(name, {"accuracy": accuracy}, seed=seed, **facts)
    return write_run(folder, run)


def test_the_worst_task_is_that_of_the_means_among_gaps_of_a_point(tmp_path: Path) -> None:
    for seed, far in ((1, 0.2), (2, 0.4)):
        rows = {"experts": (0.9, 0.9, 0.9), "ties": (0.1, 0.8, 0.899), "featcal": (far, 0.85, 0.89)}
        leave_rows(tmp_path / str(seed), rows, seed)
    row = rows_of(tmp_path)["ties/featcal"]
    worst = row["worst_task"], row["worst_share"], row["worst_value"]
    assert worst == ("far", pytest.approx(0.25), pytest.approx(0.3))
    assert row["share"] == pytest.approx((0.68 - 0.5996667) / (0.9 - 0.5996667), abs=1e-6)


def test_without_experts_the_worst_task_has_the_smallest_gain(tmp_path: Path) -> None:
    rows = {"ties": (0.1, 0.8, 0.5), "featcal": (0.2, 0.7, 0.6)}
    row = rows_of(leave_rows(tmp_path, rows, 0))["ties/featcal"]
    assert row["worst_task"] == "near"
    assert row["worst_share"] != row["worst_share"] and row["share"] != row["share"]  # not numbers


def test_any_metric_has_a_table_and_lower_losses_recover_the_gap(tmp_path: Path) -> None:
    run = Run(suite="toy", merger="ties")
    for name, loss in {"experts": 0.5, "ties": 1.5, "featcal": 0.75}.items():
        run.add_row(name, {"accuracy": {"a": 0.5}, "loss": {"a": loss}, "f1": {"a": 1 - loss / 2}})
    row = rows_of(write_run(tmp_path, run), metric="loss")["ties/featcal"]
    assert (row["gain"], row["share"], row["worst_share"]) == pytest.approx((-0.75, 0.75, 0.75))
    assert "-0.750" in featcal("report", tmp_path, "--metric", "loss").out
    out = featcal("report", tmp_path, "--metric", "f1", "--markdown").out
    assert "| + featcal | 0.625 | 0.625 | +0.375 |" in out
    message = error_of("report", tmp_path, "--metric", "los")
    assert "there are accuracy, " in message and "loss" in message


def test_costs_and_seeds_are_means_over_the_runs(tmp_path: Path) -> None:
    for seed, seconds in enumerate((2.0, 4.0)):
        rows = {"ties": (0.4, 0.4, 0.4), "surgery": (0.6, 0.5, 0.5)}
        cost = {"seconds": seconds} | ({} if seed else {"peak_rss_bytes": 5})
        leave_rows(tmp_path / str(seed), rows, seed, cost=cost)
    row = rows_of(tmp_path)["ties/surgery"]
    assert row["cost.seconds"] == 3.0 and row["seeds"] == 2 and "cost.peak_rss_bytes" not in row
    out = featcal("report", tmp_path).out
    assert "means over 2 seeds" in out and "+13.3, 2 seeds" in out


def test_of_equal_rows_the_newest_counts_with_a_warning(tmp_path: Path, caplog: Any) -> None:
    for number, level in enumerate((0.75, 0.75, 0.8)):
        leave_run(tmp_path / str(number), LEVELS | {"featcal": level})
        if number == 1:
            join_folders([tmp_path])
            assert not caplog.records
    rows = rows_of(tmp_path)
    assert rows["task_arithmetic/featcal"]["accuracy.average"] == pytest.approx(0.8)
    assert "1 row left out" in caplog.text and "task_arithmetic/featcal" in caplog.text


@pytest.mark.parametrize("change", [{"tasks": ("cars",)}, {"tasks": ("cars", "sun")}])
def test_runs_of_a_suite_with_other_tasks_are_refused(change: Any, tmp_path: Path) -> None:
    leave_run(tmp_path / "one")
    leave_run(tmp_path / "two", seed=1, **change)
    assert "rows of toy have different tasks" in error_of("report", tmp_path)


def test_rows_of_other_settings_are_points_of_one_table(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = featcal("report", leave_cells(tmp_path / "cells"), "--out", out)
    lines = [line.split() for line in done.out.splitlines()]
    assert ["n", "=", "8", "n", "=", "64"] in lines
    assert ["+", "featcal", "62.8", "(32", "%)", "68.4", "(46", "%)"] in lines
    assert ["ties", "50.0", "50.0"] in lines and ["experts", "90.0", "90.0"] in lines
    with (out / "report.csv").open() as file:
        rows = [*csv.DictReader(file)]
    points = {row["samples_per_task"]: row for row in rows if row["row"] == "featcal"}
    assert {n: float(row["accuracy.average"]) for n, row in points.items()} == pytest.approx(
        {"8": 0.628, "64": 0.684}
    )
    assert all(float(row["half"]) > 0 and row["seeds"] == "3" for row in points.values())
    assert "samples_per_task" in (out / "lines.csv").read_text().splitlines()[0]
    message = "--against compares rows of equal settings, and samples_per_task differ"
    assert message in error_of("report", tmp_path / "cells", "--against", "featcal")


def test_a_rows_merger_is_the_one_with_its_settings(tmp_path: Path) -> None:
    for scale, merged, repaired in ((0.3, 0.5, 0.6), (1.0, 0.3, 0.7)):
        leave_cell(tmp_path / f"m{scale}", "ties", merged, settings={"scaling_factor": scale})
        of_merger: Any = {"settings": {"a": 1}, "conditions": {"scaling_factor": scale}}
        leave_cell(tmp_path / f"f{scale}", "featcal", repaired, **of_merger)
    leave_cell(tmp_path / "x", "x", 0.6)  # may be of either merged model
    rows = summary(join_folders([tmp_path])).to_dict("records")
    gains = {row["scaling_factor"]: row["gain"] for row in rows if row["row"] == "featcal"}
    assert gains == pytest.approx({0.3: 0.1, 1.0: 0.4})
    assert all(row["gain"] != row["gain"] for row in rows if row["row"] == "x")  # not a number
    out = featcal("report", tmp_path).out
    assert "scaling_factor = 0.3" in out and "scaling_factor = 1.0" in out


def test_runs_are_found_once_and_never_overwritten(tmp_path: Path) -> None:
    seeds = leave_seeds(tmp_path)
    (tmp_path / ".part").mkdir()
    (tmp_path / ".part" / "run.json").write_text("half a file")
    one, two = (featcal("report", *words).out for words in ([tmp_path], [*seeds, tmp_path]))
    assert one == two and "+15.0 ± " in one
    text = error_of("report", *seeds, "--out", seeds[0])
    assert "has the files of a run" in text and "--out" in text
    assert "no such run" in error_of("report", tmp_path / "absent")


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
