"""Curves on disk, and their figure."""

from pathlib import Path
from typing import Any

import pytest

from fusion_bench_featcal.results import ReportError
from fusion_bench_featcal.results.figures import (
    CURVES_FILE,
    Curves,
    convergence_figure,
    load_curves,
    write_curves,
)

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


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(ReportError, match="no method of the run trains"):
        convergence_figure({})
