"""Figures of runs and comparisons: the numbers in them, from files of known content."""

from pathlib import Path
from typing import Any

import pytest
from synthetic import LEVELS, leave_run, make_report

from fusion_bench_featcal.json_files import json_lines
from fusion_bench_featcal.lab.report import charts
from fusion_bench_featcal.lab.report.figures import figures_of
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.curves import write_curves
from fusion_bench_featcal.results.report import summarise
from fusion_bench_featcal.results.summary import Summary

BLOCKS = [f"encoder.layers.{number}" for number in range(3)]


def drift_log(relative: bool = True) -> list[dict[str, Any]]:
    """Drift that rises by block, is three times as large for `dtd`, and that calibration halves."""
    records = []
    for number, block in enumerate(BLOCKS):
        for task, factor in (("cars", 1.0), ("dtd", 3.0)):
            before, after = factor * (number + 1), factor * (number + 1) / 2
            shares = (before / 10, after / 10) if relative else (None, None)
            records.append(
                {
                    "kind": "task", "block": block, "task": task,
                    "drift_before": before, "drift_after": after,
                    "relative_drift_before": shares[0], "relative_drift_after": shares[1],
                    "held_out_drift": before / 20, "held_out_drift_merged": before / 5,
                }
            )  # fmt: skip
    return records


def leave_log(run: Path, records: list[dict[str, Any]], ending: str = "") -> Path:
    (run / f"calibration_log{ending}.jsonl").write_text(json_lines(records))
    return run


def summary_of(*runs: Path) -> Summary:
    return summarise(runs)


def drawn(axes: Any, name: str) -> list[tuple[float, float]]:
    """Points of a row in order, found by its look."""
    look = charts.marks([name])[name]
    lines = [line for line in axes.lines if line.get_marker() == look["marker"]]
    return [
        (round(float(x), 9), round(float(y), 9))
        for line in lines
        if line.get_color() == look["color"]
        for x, y in line.get_xydata()
    ]


def test_a_run_has_the_figures_that_its_files_allow(tmp_path: Path):
    run = leave_run(tmp_path / "run")
    assert list(figures_of(summary_of(run))) == ["accuracy", "cost"]
    leave_log(run, drift_log())
    write_curves(run, {"surgery": {"cars": [(0, 2.0), (20, 1.0)]}})
    names = ["accuracy", "cost", "drift", "drift-tasks", "depth", "convergence"]
    assert list(figures_of(summary_of(run))) == names
    report = Report(suite="toy", upstream="task_arithmetic")
    report.write(tmp_path / "unevaluated")
    assert figures_of(summary_of(tmp_path / "unevaluated")) == {}


def test_accuracy_has_every_row_but_the_base_with_the_interval_of_its_gain(tmp_path: Path):
    summary = summary_of(leave_run(tmp_path / "run"))
    (axes,) = figures_of(summary)["accuracy"].axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["cars", "dtd", "average"]
    for name, row in (
        ("experts", "experts"),
        ("merged", "task_arithmetic"),
        ("featcal", "featcal"),
    ):
        assert [x for x, _ in drawn(axes, name)] == pytest.approx([100 * LEVELS[row]] * 3)
    assert drawn(axes, "base") == []
    (row,) = [row for row in summary.rows if row.name == "featcal"]
    limits = row.gain_interval
    assert limits is not None
    collections: Any = axes.collections
    bars = [segment[:, 0] for c in collections for segment in c.get_segments()]
    assert len(bars) == 3  # of FeatCal: two tasks and the average
    assert bars[2] == pytest.approx([60 + 100 * limits.low, 60 + 100 * limits.high])
    assert all(low < 75 < high for low, high in bars)


def test_titles_explain_bars_only_where_there_are_some(tmp_path: Path):
    for name, items in (("with", True), ("without", False)):
        figures = figures_of(summary_of(leave_run(tmp_path / name, items=items)))
        for figure in figures.values():
            assert ("bars: 95 % interval" in figure.get_suptitle().replace("\n", " ")) == items


def test_several_mergers_stand_side_by_side(tmp_path: Path):
    runs = []
    for merger, level in (("task_arithmetic", 0.6), ("ties", 0.5)):
        levels = {"experts": 0.9, merger: level, "featcal": level + 0.1}
        make_report(levels, upstream=merger).write(tmp_path / merger)
        runs.append(tmp_path / merger)
    figures = figures_of(summary_of(*runs))
    titles = ["merged by task_arithmetic", "merged by ties"]
    for name in ("accuracy", "comparison", "cost"):
        assert [axes.get_title(loc="left") for axes in figures[name].axes] == titles
    first, second = figures["comparison"].axes
    assert [text.get_text() for text in first.get_yticklabels()] == ["experts", "merged", "featcal"]
    assert drawn(second, "featcal") == [(60, 2)]
    (point,) = drawn(figures["cost"].axes[1], "featcal")
    assert point == (10, 10)  # seconds, points


def test_suites_have_figures_of_their_own(tmp_path: Path):
    runs = [leave_run(tmp_path / suite, suite=suite) for suite in ("toy", "a/b")]
    figures = figures_of(summary_of(*runs))
    assert list(figures) == ["accuracy-toy", "cost-toy", "accuracy-a/b", "cost-a/b"]
    files = charts.save(figures, tmp_path / "figures", "--figures")
    assert [path.name for path in files][2:] == ["accuracy-a_b.svg", "cost-a_b.svg"]


def test_drift_is_averaged_over_tasks_block_by_block(tmp_path: Path):
    figures = figures_of(summary_of(leave_log(leave_run(tmp_path / "run"), drift_log())))
    (axes,) = figures["drift"].axes
    assert drawn(axes, "before") == [(0, 0.2), (1, 0.4), (2, 0.6)]
    assert drawn(axes, "after") == [(0, 0.1), (1, 0.2), (2, 0.3)]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "1", "2"]
    (axes,) = figures["drift-tasks"].axes
    assert [text.get_text() for text in axes.texts] == [
        "0.05",
        "0.10",
        "0.15",
        "0.15",
        "0.30",
        "0.45",
    ]
    (axes,) = figures["depth"].axes
    assert drawn(axes, "merged") == [(0, 0.4), (1, 0.8), (2, 1.2)]
    assert drawn(axes, "featcal") == [(0, 0.1), (1, 0.2), (2, 0.3)]


def test_every_calibrated_row_of_every_run_has_a_panel_of_drift(tmp_path: Path):
    runs = [leave_run(tmp_path / f"seed{seed}", seed=seed) for seed in (1, 2)]
    leave_log(runs[0], drift_log(), ".plus")
    leave_log(runs[1], drift_log())
    figure = figures_of(summary_of(*runs))["drift"]
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["seed1: featcal:plus", "seed2: featcal"]


def test_drift_without_the_features_norms_is_absolute(tmp_path: Path):
    run = leave_log(leave_run(tmp_path / "run"), drift_log(relative=False))
    figure = figures_of(summary_of(run))["drift"]
    assert drawn(figure.axes[0], "before") == [(0, 2.0), (1, 4.0), (2, 6.0)]
    assert figure.get_supylabel() == "drift, L2"


def test_blocks_of_two_stages_keep_what_tells_them_apart(tmp_path: Path):
    records = [
        {**record, "block": record["block"].replace("encoder", stage)}
        for stage in ("encoder", "decoder")
        for record in drift_log()
    ]
    run = leave_log(leave_run(tmp_path / "run"), records)
    (axes,) = figures_of(summary_of(run))["drift"].axes
    labels = [text.get_text() for text in axes.get_xticklabels()]
    assert labels == [f"{stage}.{n}" for stage in ("encoder", "decoder") for n in range(3)]


def test_losses_of_trainings_are_relative_to_their_first(tmp_path: Path):
    run = leave_run(tmp_path / "run")
    left, right = [(0, 2.0), (20, 1.0), (25, 0.5)], [(0, 4.0), (25, 1.0)]
    curves = {"surgery": {"x_left": left, "x_right": right}, "surgery_v2": {"x_right": right}}
    write_curves(run, curves)
    figure = figures_of(summary_of(run))["convergence"]
    first, second = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["surgery", "surgery_v2"]
    assert drawn(first, "left") == [(0, 1.0), (20, 0.5), (25, 0.25)]
    (line,) = second.lines
    assert [*map(tuple, line.get_xydata())] == [(0, 1.0), (25, 0.25)]  # pyright: ignore
