"""Figures of runs, comparisons, studies and diagnoses: the numbers that their SVG files show."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from drawn import Panel, panels
from golden.golden_views import diagnosis_lines
from reports import LEVELS, error_of, featcal, leave_cells, leave_lines, leave_run, summary

EVIL = "<script>alert('&')</script> --> $x$"


def figures(*runs: Path) -> dict[str, list[Panel]]:
    """Panels of the figures of `featcal report`."""
    folder = runs[0].parent / "figures"
    done = featcal("report", *runs, "--figures", folder)
    assert done.code == 0, done.err
    files = [Path(line.removeprefix("written: ")) for line in done.out.splitlines()
             if line.endswith(".svg")]  # fmt: skip
    assert sorted(folder.iterdir()) == sorted(files)
    return {file.stem: panels(file.read_text()) for file in files}


def leave_log(run: Path, stages: Sequence[str] = ("encoder",), end: str = "") -> None:
    """Drift that rises by block, is three times as large for `dtd`, and that calibration halves."""
    blocks = product(stages, range(3), (("cars", 1.0), ("dtd", 3.0)))
    with (run / f"calibration_log{end}.jsonl").open("w") as file:
        for stage, number, (task, factor) in blocks:
            before = factor * (number + 1)
            record = {
                "kind": "task", "block": f"{stage}.layers.{number}", "task": task,
                "drift_before": before, "drift_after": before / 2,
                "relative_drift_before": before / 10, "relative_drift_after": before / 20,
                "held_out_drift": before / 20, "held_out_drift_merged": before / 5,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a log of its calibration and curves of a training."""
    folder = leave_run(tmp_path_factory.mktemp("figures") / "run")
    leave_log(folder)
    curves = [{"name": "surgery", "task": f"x_{task}", "losses": [[0, start], [20, 1.0], [25, 0.5]]}
              for task, start in (("left", 2.0), ("right", 4.0))]  # fmt: skip
    (folder / "training_curves.jsonl").write_text("".join(json.dumps(c) + "\n" for c in curves))
    return folder


@pytest.fixture(scope="module")
def of_run(run: Path) -> dict[str, list[Panel]]:
    return figures(run)


def test_a_run_has_the_figures_that_its_files_allow(of_run: Any, tmp_path: Path):
    names = ["accuracy", "cost", "drift", "drift-tasks", "depth", "convergence"]
    assert list(of_run) == names
    (losses,) = of_run["convergence"]  # relative to their first
    assert losses.points["left"] == [(0, 1.0), (20, 0.5), (25, 0.25)]
    assert losses.points["right"] == [(0, 1.0), (20, 0.25), (25, 0.125)]
    unevaluated = leave_run(tmp_path / "unevaluated", {})
    assert "nothing to draw" in error_of("report", unevaluated, "--figures", tmp_path / "none")


def test_drift_is_averaged_over_tasks_block_by_block(of_run: Any):
    (drift,), (tasks,), (depth,) = (of_run[name] for name in ("drift", "drift-tasks", "depth"))
    assert drift.points == {"before": [(0, 0.2), (1, 0.4), (2, 0.6)],
                            "after": [(0, 0.1), (1, 0.2), (2, 0.3)]}  # fmt: skip
    assert drift.x_labels == ["0", "1", "2"] and drift.y_labels[0] == "0.0"
    cells = ["0.05", "0.10", "0.15", "0.15", "0.30", "0.45"]
    assert tasks.y_labels == ["cars", "dtd"] and tasks.words[-7:-1] == cells
    assert depth.points == {"merged": [(0, 0.4), (1, 0.8), (2, 1.2)],
                            "featcal": [(0, 0.1), (1, 0.2), (2, 0.3)]}  # fmt: skip


def test_accuracy_has_every_row_but_the_base_with_the_interval_of_its_gain(of_run: Any, run: Path):
    (panel,) = of_run["accuracy"]
    assert panel.y_labels == ["cars", "dtd", "average"]
    rows = {"experts": "experts", "merged": "task_arithmetic", "featcal": "featcal"}
    assert {name: [x for x, _ in points] for name, points in panel.points.items()} == {
        name: [100 * LEVELS[row]] * 3 for name, row in rows.items()
    }
    limits = summary(run)["task_arithmetic/featcal"]["gain_interval"]
    bars = [[x for x, _ in line] for line in panel.bars]
    assert len(bars) == 3  # of FeatCal: two tasks and the average
    assert bars[2] == pytest.approx([60 + 100 * limits["low"], 60 + 100 * limits["high"]], abs=0.01)
    assert all(low < 75 < high for low, high in bars)


def test_mergers_and_calibrated_rows_have_panels_side_by_side(tmp_path: Path):
    for merger, level in (("task_arithmetic", 0.6), ("ties", 0.5)):
        levels = {"experts": 0.9, merger: level, "featcal": level + 0.1}
        leave_run(tmp_path / "runs" / merger, levels, ("cars",), upstream=merger, items=False)
    leave_log(tmp_path / "runs" / "task_arithmetic", end=".plus", stages=("encoder", "decoder"))
    leave_log(tmp_path / "runs" / "ties")
    result = figures(tmp_path / "runs")
    for name in ("accuracy", "comparison", "cost"):
        titles = [panel.words[-1] for panel in result[name]]
        assert titles == ["merged by task_arithmetic", "merged by ties"]
        assert not any(panel.bars for panel in result[name])  # no items, no intervals
    assert result["comparison"][1].y_labels == ["experts", "merged", "featcal"]
    assert result["cost"][1].points[""] == [(10, 10)]  # seconds, points
    first, second = result["drift"]
    assert [first.words[-1], second.words[-1]] == ["task_arithmetic: featcal_plus", "ties: featcal"]
    assert {"encoder", "decoder"} <= {label.partition(".")[0] for label in first.x_labels}


def test_sweeps_and_diagnoses_have_lines_over_points_and_blocks(tmp_path: Path):
    (panel,) = figures(leave_cells(tmp_path / "sweep" / "cells"))["ties-samples_per_task"]
    assert panel.points["featcal"] == [(8, 62.3), (64, 67.9)]
    assert panel.points["merged"] == [(8, 50.0), (64, 50.0)]
    result = figures(leave_lines(leave_run(tmp_path / "run"), diagnosis_lines()))
    rows = ["task_arithmetic", "featcal", "featcal_plus"]
    titles = {name: [panel.words[-1] for panel in result[name]] for name in result}
    assert titles["diagnosis"] == ["mean over tasks", "one", "two"]
    assert titles["diagnosis-terms"] == rows and titles["diagnosis-change"] == rows[1:]
    assert result["diagnosis"][1].points["featcal"] == [(0, 0.1), (1, 0.2)]


def test_names_are_text_and_a_repeated_run_gives_equal_files(tmp_path: Path):
    run = leave_run(tmp_path / "run", LEVELS | {f"featcal_{EVIL}\x1b[31m": 0.8}, (EVIL,))
    texts = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert featcal("report", run, "--figures", folder).code == 0
        texts.append((folder / "accuracy.svg").read_text())
    assert texts[0] == texts[1] and "\x1b" not in texts[0] and "<!--" not in texts[0]
    root = ElementTree.fromstring(texts[0])
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    assert EVIL in [element.text for element in root.iter() if element.tag.endswith("text")]
    assert "currentColor" in texts[0] and "prefers-color-scheme:dark" in texts[0]
