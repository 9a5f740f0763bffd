"""Figures of a run, and the training curves that one of them shows."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import LEVELS, make_report

from fusion_bench_featcal.results import Report, ReportError
from fusion_bench_featcal.results.curves import (
    CURVES_FILE,
    Curves,
    drift_records,
    load_curves,
    write_curves,
)
from fusion_bench_featcal.results.drawing import marks
from fusion_bench_featcal.results.figures import (
    accuracy_figure,
    convergence_figure,
    depth_figure,
    drift_figure,
    plot_run,
)

BLOCKS = [f"encoder.layers.{number}" for number in range(3)]


def drift_log(relative: bool = True) -> list[dict[str, Any]]:
    records = []
    for number, block in enumerate(BLOCKS):
        for task, factor in (("cars", 1.0), ("dtd", 3.0)):
            before, after = factor * (number + 1), factor * (number + 1) / 2
            record = {"block": block, "task": task, "drift_before": before, "drift_after": after}
            shares = (before / 10, after / 10) if relative else (None, None)
            names = ("relative_drift_before", "relative_drift_after")
            records.append({**record, **dict(zip(names, shares, strict=True))})
    return records


def leave_run(folder: Path) -> Path:
    make_report().write(folder)
    lines = [*drift_log(), {"block": BLOCKS[0], "module": "mlp.fc1", "residual": 1e-7}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "calibration_log.jsonl").write_text(text)
    return folder


def curves(axes: Any, label: str) -> list[float]:
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return [float(value) for value in line.get_ydata()]


def test_figures_in_both_formats_go_to_the_run_or_elsewhere_with_the_same_bytes(tmp_path: Path):
    run = leave_run(tmp_path / "run")
    first = {path.name: path.read_bytes() for path in plot_run(run)}
    assert list(first) == ["accuracy.png", "accuracy.svg", "drift.png", "drift.svg"]
    assert all((run / name).is_file() for name in first)
    assert first["accuracy.png"].startswith(b"\x89PNG") and b"<svg" in first["accuracy.svg"]
    again = plot_run(run, tmp_path / "figures")
    assert {path.name: path.read_bytes() for path in again} == first
    assert sorted(again) == sorted((tmp_path / "figures").iterdir())


def test_a_preset_has_a_drift_figure_of_its_own(tmp_path: Path):
    run = leave_run(tmp_path)
    (run / "calibration_log.jsonl").rename(run / "calibration_log.suite.jsonl")
    (run / "calibration_log.jsonl").write_text('{"block": "0", "seconds": 1.0}\n')
    assert [path.name for path in plot_run(run)][2:] == ["drift.suite.png", "drift.suite.svg"]


def held_out(factor: float) -> list[dict[str, Any]]:
    """Records of a row whose drift is a share of the merged model's."""
    return [
        {
            **record,
            "held_out_drift": factor * record["drift_before"],
            "held_out_drift_merged": record["drift_before"],
        }
        for record in drift_log()
    ]


def test_depth_shows_the_merged_model_and_all_rows(tmp_path: Path):
    (axes,) = depth_figure({"featcal": held_out(0.5), "featcal:paper": held_out(0.8)}).axes
    assert curves(axes, "merged") == pytest.approx([2, 4, 6])
    assert curves(axes, "featcal") == pytest.approx([1, 2, 3])
    assert curves(axes, "featcal:paper") == pytest.approx([1.6, 3.2, 4.8])
    colours = {line.get_label(): line.get_color() for line in axes.lines}
    for row in ("featcal", "featcal:paper"):
        assert colours[row] == marks([row], None)[row]["color"]
    run = leave_run(tmp_path)
    lines = "".join(json.dumps(line) + "\n" for line in held_out(0.5))
    (run / "calibration_log.jsonl").write_text(lines)
    assert {"depth.png", "depth.svg"} <= {path.name for path in plot_run(run)}


def test_every_row_is_marked_at_its_accuracies():
    (axes,) = accuracy_figure(make_report()).axes
    marks = {str(line.get_label()): line for line in axes.lines}
    for name, level in LEVELS.items():
        label = f"{name} ({100 * level:.1f})"
        assert np.asarray(marks[label].get_xdata()) == pytest.approx([100 * level] * 3)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["cars", "dtd", "average"]


def test_no_two_rows_look_alike():
    rows = {**LEVELS, **{f"featcal:{number}": 0.7 for number in range(5)}}
    (axes,) = accuracy_figure(make_report(rows)).axes
    looks = [
        (line.get_color(), line.get_marker()) for line in axes.lines if line.get_marker() != "None"
    ]
    assert len(set(looks)) == len(looks) == len(rows)


def test_drift_is_averaged_over_tasks_block_by_block():
    (axes,) = drift_figure(drift_log()).axes
    assert curves(axes, "before") == pytest.approx([0.2, 0.4, 0.6])
    assert curves(axes, "after") == pytest.approx([0.1, 0.2, 0.3])
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "1", "2"]


def test_absolute_drift_stands_in_for_missing_relative_drift():
    (axes,) = drift_figure(drift_log(relative=False)).axes
    assert curves(axes, "before") == pytest.approx([2.0, 4.0, 6.0])
    assert "L2" in axes.get_ylabel()


def test_blocks_of_two_stages_keep_what_tells_them_apart():
    records = [
        {**record, "block": record["block"].replace("encoder", stage)}
        for stage in ("encoder", "decoder")
        for record in drift_log()
    ]
    (axes,) = drift_figure(records).axes
    labels = [text.get_text() for text in axes.get_xticklabels()]
    assert labels == [f"{stage}.{n}" for stage in ("encoder", "decoder") for n in range(3)]


def test_nothing_to_draw_is_said():
    with pytest.raises(ReportError, match="log_drift=false"):
        drift_figure([])
    with pytest.raises(ReportError, match="held_out=0"):
        depth_figure({})
    with pytest.raises(ReportError, match="no rows"):
        accuracy_figure(Report())
    with pytest.raises(ReportError, match="no method of the run trains"):
        convergence_figure({})


@pytest.mark.parametrize(
    ("line", "message"), [("{", "is damaged"), ("[1]", r"expected a JSON object")]
)
def test_a_damaged_log_is_named(tmp_path: Path, line: str, message: str):
    path = tmp_path / "calibration_log.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ReportError, match=rf"calibration_log\.jsonl.*{message}"):
        drift_records(path)


def test_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ReportError, match=r"need matplotlib: pip install .*\[plots\]"):
        plot_run(leave_run(tmp_path))


LEFT: Curves = {"x_left": [(0, 2.0), (20, 1.0), (25, 0.5)]}
BOTH: Curves = {**LEFT, "x_right": [(0, 4.0), (25, 1.0)]}


def test_curves_come_back(tmp_path: Path) -> None:
    curves = {"surgery": BOTH, "surgery:calibration": LEFT}
    assert write_curves(tmp_path, curves | {"ridge_surgery": {}}) == tmp_path / CURVES_FILE
    assert load_curves(tmp_path) == curves


def test_curves_of_an_earlier_run_do_not_stay(tmp_path: Path) -> None:
    write_curves(tmp_path, {"surgery": LEFT})
    assert write_curves(tmp_path, {"ridge_surgery": {}}) is None
    assert load_curves(tmp_path) == {}


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"name": "surgery", "task": "a"}',
        '{"name": "surgery", "task": "a", "losses": [[1, 2, 3]]}',
        '{"name": "surgery", "task": "a", "losses": [[20, 1.0], [0, 2.0]]}',
        '{"name": "surgery", "task": "a", "losses": [[0, NaN]]}',
        '{"name": "surgery", "task": "a", "losses": []}',
    ],
)
def test_damaged_curves_are_named(tmp_path: Path, line: str) -> None:
    (tmp_path / CURVES_FILE).write_text(line + "\n")
    with pytest.raises(ReportError, match=r"training_curves\.jsonl"):
        load_curves(tmp_path)


def line_of(line: Any) -> list[tuple[int, float]]:
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_a_panel_for_each_method_and_a_line_for_each_task() -> None:
    figure = convergence_figure({"surgery": BOTH, "surgery_v2": {"x_right": BOTH["x_right"]}})
    first, second = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["surgery", "surgery_v2"]
    left, right = first.lines
    assert line_of(left) == [(0, 1.0), (20, 0.5), (25, 0.25)]
    assert line_of(right) == [(0, 1.0), (25, 0.25)]
    assert second.lines[0].get_color() == right.get_color() != left.get_color()
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["left", "right"]


def test_tasks_beyond_the_colours_have_other_dashes() -> None:
    tasks: Curves = {f"t{number}": [(0, 1.0), (1, 0.5)] for number in range(20)}
    (axes,) = convergence_figure({"surgery": tasks}).axes
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 20
