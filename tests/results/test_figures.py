"""Figures of runs, comparisons, studies and diagnoses: the numbers that their SVG files show."""

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from drawn import Panel, panels
from golden.golden_views import diagnosis_lines
from reports import LEVELS, error_of, featcal, leave_lines, leave_run, leave_study, summary

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


def leave_log(
    run: Path, *, relative: bool = True, stages: Any = ("encoder",), end: str = ""
) -> Path:
    """Drift that rises by block, is three times as large for `dtd`, and that calibration halves."""
    records = []
    for stage, number, (task, factor) in (
        (s, n, t) for s in stages for n in range(3) for t in (("cars", 1.0), ("dtd", 3.0))
    ):
        before = factor * (number + 1)
        records.append({
            "kind": "task", "block": f"{stage}.layers.{number}", "task": task,
            "drift_before": before, "drift_after": before / 2,
            "relative_drift_before": before / 10 if relative else None,
            "relative_drift_after": before / 20 if relative else None,
            "held_out_drift": before / 20, "held_out_drift_merged": before / 5,
        })  # fmt: skip
    text = "".join(json.dumps(record) + "\n" for record in records)
    (run / f"calibration_log{end}.jsonl").write_text(text)
    return run


def test_a_run_has_the_figures_that_its_files_allow(tmp_path: Path):
    run = leave_run(tmp_path / "run")
    assert list(figures(run)) == ["accuracy", "cost"]
    curves = [{"name": "surgery", "task": f"x_{task}", "losses": [[0, start], [20, 1.0], [25, 0.5]]}
              for task, start in (("left", 2.0), ("right", 4.0))]  # fmt: skip
    (run / "training_curves.jsonl").write_text("".join(json.dumps(c) + "\n" for c in curves))
    drawn = figures(leave_log(run))
    names = ["accuracy", "cost", "drift", "drift-tasks", "depth", "convergence"]
    assert list(drawn) == names
    (losses,) = drawn["convergence"]  # relative to their first
    assert losses.points["left"] == [(0, 1.0), (20, 0.5), (25, 0.25)]
    assert losses.points["right"] == [(0, 1.0), (20, 0.25), (25, 0.125)]
    unevaluated = leave_run(tmp_path / "unevaluated", {})
    assert "nothing to draw" in error_of("report", unevaluated, "--figures", tmp_path / "none")


def test_drift_is_averaged_over_tasks_block_by_block(tmp_path: Path):
    drawn = figures(leave_log(leave_run(tmp_path / "run")))
    (drift,), (tasks,), (depth,) = (drawn[name] for name in ("drift", "drift-tasks", "depth"))
    assert drift.points == {"before": [(0, 0.2), (1, 0.4), (2, 0.6)],
                            "after": [(0, 0.1), (1, 0.2), (2, 0.3)]}  # fmt: skip
    assert drift.x_labels == ["0", "1", "2"] and drift.y_labels[0] == "0.0"
    cells = ["0.05", "0.10", "0.15", "0.15", "0.30", "0.45"]
    assert tasks.y_labels == ["cars", "dtd"] and tasks.words[-7:-1] == cells
    assert depth.points == {"merged": [(0, 0.4), (1, 0.8), (2, 1.2)],
                            "featcal": [(0, 0.1), (1, 0.2), (2, 0.3)]}  # fmt: skip


def test_drift_has_a_panel_per_calibrated_row_and_names_of_stages(tmp_path: Path):
    runs = [leave_run(tmp_path / f"seed{seed}", seed=seed) for seed in (1, 2)]
    leave_log(runs[0], end=".plus", stages=("encoder", "decoder"))
    leave_log(runs[1], relative=False)
    first, second = figures(*runs)["drift"]
    assert (first.words[-1], second.words[-1]) == ("seed1: featcal:plus", "seed2: featcal")
    assert {"encoder", "decoder"} <= {label.partition(".")[0] for label in first.x_labels}
    # Without the features' norms drift is absolute.
    assert [drift for _, drift in second.points["before"]] == [2.0, 4.0, 6.0]


def test_accuracy_has_every_row_but_the_base_with_the_interval_of_its_gain(tmp_path: Path):
    run = leave_run(tmp_path / "run")
    (panel,) = figures(run)["accuracy"]
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


def test_mergers_stand_side_by_side_and_suites_have_files_of_their_own(tmp_path: Path):
    for suite in ("toy", "a/b"):
        for merger, level in (("task_arithmetic", 0.6), ("ties", 0.5)):
            levels = {"experts": 0.9, merger: level, "featcal": level + 0.1}
            run = tmp_path / "runs" / f"{merger} {suite.replace('/', '')}"
            leave_run(run, levels, upstream=merger, suite=suite, items=False)
    drawn = figures(tmp_path / "runs")
    assert {"accuracy-toy", "comparison-toy", "cost-toy", "accuracy-a_b", "cost-a_b"} <= set(drawn)
    for name in ("accuracy-toy", "comparison-toy", "cost-toy"):
        titles = [panel.words[-1] for panel in drawn[name]]
        assert titles == ["merged by task_arithmetic", "merged by ties"]
        assert not any(panel.bars for panel in drawn[name])  # no items, no intervals
    second = drawn["comparison-toy"][1]
    assert second.y_labels == ["experts", "merged", "featcal"]
    assert drawn["cost-toy"][1].points[""] == [(10, 10)]  # seconds, points


def test_a_study_has_lines_over_its_points(tmp_path: Path):
    (panel,) = figures(leave_study(tmp_path / "study"))["samples_ties"]
    assert panel.points["featcal"] == [(8, 62.5), (64, 68.0)]
    assert panel.points["merged"] == [(8, 50.0), (64, 50.0)]


def test_a_diagnosis_has_panels_for_tasks_and_rows(tmp_path: Path):
    drawn = figures(leave_lines(leave_run(tmp_path / "run"), diagnosis_lines()))
    rows = ["task_arithmetic", "featcal", "featcal:plus"]
    titles = {name: [panel.words[-1] for panel in drawn[name]] for name in drawn}
    assert titles["diagnosis"] == ["mean over tasks", "one", "two"]
    assert titles["diagnosis-terms"] == rows and titles["diagnosis-change"] == rows[1:]
    assert drawn["diagnosis"][1].points["featcal"] == [(0, 0.1), (1, 0.2)]


def test_names_are_text_and_the_same_runs_give_the_same_files(tmp_path: Path):
    name = f"featcal:{EVIL}\x1b[31m"
    levels = LEVELS | {name: 0.8} | {f"method_{number}": 0.7 for number in range(20)}
    run = leave_run(tmp_path / "run", levels, (EVIL, "b"), suite=EVIL)
    texts = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert featcal("report", run, "--figures", folder).code == 0
        texts.append((folder / "accuracy.svg").read_text())
    assert texts[0] == texts[1]
    root = ElementTree.fromstring(texts[0])
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert EVIL in words and any("x1b[31m" in (word or "") for word in words)
    assert "<!--" not in texts[0] and "\x1b" not in texts[0] and "<image" not in texts[0]
    links = [v for e in root.iter() for key, v in e.items() if key.endswith("href")]
    assert links and all(link.startswith("#") for link in links)
    looks = [(use.get("style", ""), use.get("{http://www.w3.org/1999/xlink}href"))
             for g in root.iter() if g.get("id") == "legend_1" for use in g.iter()
             if use.tag.endswith("use")]  # fmt: skip
    assert len(looks) == len(set(looks)) == len(levels) - 1  # a row has a look of its own
    assert "currentColor" in texts[0] and "prefers-color-scheme:dark" in texts[0]
    assert "#ffffff" not in texts[0]


def test_without_matplotlib_figures_say_what_to_install(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = error_of("report", leave_run(tmp_path / "run"), "--figures", tmp_path / "figures")
    assert "figures need matplotlib: pip install '" in message and "[lab]'" in message
