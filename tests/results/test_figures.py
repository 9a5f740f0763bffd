"""Figures of runs, sweeps and diagnoses: the numbers that matplotlib draws, and their files."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from golden.golden_views import diagnosed
from reports import LEVELS, error_of, featcal, leave_cell, leave_cells, leave_run, leave_seeds
from reports import rows_of as summary_of

from fusion_bench_featcal.results import figures

EVIL = "<script>alert('&')</script> --> $x$"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that draws runs and returns figure -> panel -> row -> its points and bars."""
    saved: dict[str, Any] = {}
    monkeypatch.setattr(figures, "svg", lambda _: "<svg/>")
    monkeypatch.setattr(figures, "save_figures", lambda named, *_: saved.update(named) or [])

    def draw(*runs: Path) -> dict[str, dict[str, dict[str, Any]]]:
        done = featcal("report", *runs, "--figures", runs[0].parent)
        assert done.code == 0, done.err
        return {name: {axes.get_title("left"): rows_of(figure, axes) for axes in figure.axes}
                for name, figure in saved.items()}  # fmt: skip

    return draw


def rows_of(figure: Any, axes: Any) -> dict[str, tuple[Any, Any]]:
    """Points `[n, 2]` of each row of a panel, and the ends of its bars, by the legend's names."""
    (legend,) = figure.legends
    handles = zip(legend.legend_handles, legend.get_texts(), strict=True)
    names = {(line.get_color(), line.get_marker()): text.get_text() for line, text in handles}
    rows = {}
    for line, _, bars in (container.lines for container in axes.containers):
        ends = [end for bar in bars for end in bar.get_segments()]
        rows[names[line.get_color(), line.get_marker()]] = (line.get_xydata(), ends)
    return rows


def test_accuracies_of_tasks_are_dots_with_the_interval_of_the_gain(drawn: Any, tmp_path: Path):
    row = summary_of(*leave_seeds(tmp_path))["task_arithmetic/featcal"]
    points, bars = drawn(tmp_path)["accuracy"]["task_arithmetic"]["featcal"]
    assert points[:, 0] == pytest.approx([75.0] * 3)  # cars, dtd and their average
    low, high = ((row["accuracy.average"] + sign * row["half"]) * 100 for sign in (-1, 1))
    assert [bar[:, 0].tolist() for bar in bars][-1] == pytest.approx([low, high])


def test_mergers_are_panels(drawn: Any, tmp_path: Path) -> None:
    for merger in ("ties", "wudi"):
        levels = {"experts": 0.9, merger: 0.5, "featcal": 0.7}
        leave_run(tmp_path / merger, levels, merger=merger)
    panels = drawn(tmp_path / "ties", tmp_path / "wudi")["accuracy"]
    assert list(panels) == ["ties", "wudi"]
    assert all(set(rows) == {"experts", "merged", "featcal"} for rows in panels.values())


def test_a_sweep_is_a_curve_along_its_numbers(drawn: Any, tmp_path: Path) -> None:
    cells = leave_cells(tmp_path / "cells")
    panel = drawn(cells)["accuracy-samples_per_task"]["ties"]
    assert panel["featcal"][0].ravel() == pytest.approx([8, 62.8, 64, 68.4])
    assert panel["experts"][0].ravel() == pytest.approx([8, 90, 64, 90])


def test_a_diagnosis_draws_drift_terms_cosines_and_gains(drawn: Any, tmp_path: Path) -> None:
    by_name = drawn(diagnosed(tmp_path / "run"))
    ((_, drift),) = by_name["diagnosis-drift"].items()
    assert drift["featcal"][0][:, 1] == pytest.approx([0.1, 0.2])
    assert list(by_name["diagnosis-terms"]) == ["task_arithmetic", "featcal", "featcal_plus"]
    cosines = next(iter(by_name["diagnosis-cosines"].values()))
    assert cosines["merged"][0][:, 0] == pytest.approx([0.7, 0.6])
    ((_, gains),) = by_name["diagnosis-gains"].items()
    assert gains["featcal"][0][:, 0] == pytest.approx([0.1, 0.1])


def test_equal_figures_are_equal_files_and_names_are_text(tmp_path: Path) -> None:
    run, texts = leave_run(tmp_path / "run", LEVELS | {EVIL: 0.5}), []
    for folder in ("one", "two"):
        assert featcal("report", run, "--figures", tmp_path / folder).code == 0
        texts.append((tmp_path / folder / "accuracy.svg").read_text())
    assert texts[0] == texts[1] and "currentColor" in texts[0]
    assert EVIL in [element.text for element in ElementTree.fromstring(texts[0]).iter()]


def test_without_numbers_to_draw_it_says_so(tmp_path: Path) -> None:
    cells = tmp_path / "cells"
    for kind in ("fog", "snow"):
        leave_cell(cells / kind, "featcal", 0.5, settings={"kind": kind})
    assert "there is nothing to draw" in error_of("report", cells, "--figures", tmp_path / "x")
