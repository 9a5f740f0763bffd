"""Figures of runs, sweeps and diagnoses: the numbers that their SVG files show."""

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from drawn import Panel, panels
from golden.golden_views import diagnosed
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

EVIL = "<script>alert('&')</script> --> $x$"


def figures(*runs: Path) -> dict[str, list[Panel]]:
    """Panels of the figures of `featcal report`."""
    folder = runs[0].parent / "figures"
    done = featcal("report", *runs, "--figures", folder)
    assert done.code == 0, done.err
    return {file.stem: panels(file.read_text()) for file in sorted(folder.glob("*.svg"))}


def test_accuracies_of_tasks_are_dots_with_the_interval_of_the_gain(tmp_path: Path) -> None:
    seeds = leave_seeds(tmp_path)
    (panel,) = figures(tmp_path)["accuracy"]
    assert panel.y_labels == ["cars", "dtd", "average"]
    row = rows_of(*seeds)["task_arithmetic/featcal"]
    values = [value for value, _ in panel.points["featcal"]]
    assert values == pytest.approx([75.0] * 3, abs=0.2)
    low, high = row["accuracy.average"] - row["half"], row["accuracy.average"] + row["half"]
    ends = [tuple(at for at, _ in bar) for bar in panel.bars if bar[0][0] != bar[-1][0]]
    assert ends == [pytest.approx((100 * low, 100 * high), abs=0.2)]


def test_mergers_are_panels(tmp_path: Path) -> None:
    for merger in ("ties", "wudi"):
        levels = {"experts": 0.9, merger: 0.5, "featcal": 0.7}
        leave_run(tmp_path / merger, levels, merger=merger)
    by_name = figures(tmp_path / "ties", tmp_path / "wudi")["accuracy"]
    assert [panel.words[-1] for panel in by_name] == ["ties", "wudi"]
    assert all(set(panel.points) == {"experts", "merged", "featcal"} for panel in by_name)


def test_a_sweep_is_a_curve_along_its_numbers(tmp_path: Path) -> None:
    (panel,) = figures(leave_cells(tmp_path / "cells"))["accuracy-samples_per_task"]
    points = [value for _, value in panel.points["featcal"]]
    assert points == pytest.approx([62.8, 68.4], abs=0.2)
    assert [v for _, v in panel.points["experts"]] == pytest.approx([90, 90], abs=0.2)


def test_a_diagnosis_draws_drift_terms_cosines_and_gains(tmp_path: Path) -> None:
    by_name = figures(diagnosed(tmp_path / "run"))
    (panel,) = by_name["diagnosis-drift"]
    assert [value for _, value in panel.points["featcal"]] == pytest.approx([0.1, 0.2], abs=0.01)
    assert [panel.words[-1] for panel in by_name["diagnosis-terms"]] == [
        "task_arithmetic", "featcal", "featcal_plus"
    ]  # fmt: skip
    cosines, _ = by_name["diagnosis-cosines"]
    assert [value for value, _ in cosines.points["merged"]] == pytest.approx([0.7, 0.6], abs=0.01)
    (gains,) = by_name["diagnosis-gains"]
    assert [value for value, _ in gains.points["featcal"]] == pytest.approx([0.1, 0.1], abs=0.01)


def test_equal_figures_are_equal_files_and_names_are_text(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "run", LEVELS | {EVIL: 0.5})
    texts = []
    for folder in ("one", "two"):
        assert featcal("report", run, "--figures", tmp_path / folder).code == 0
        texts.append((tmp_path / folder / "accuracy.svg").read_text())
    assert all(one == two for one, two in pairwise(texts))
    words = [element.text for element in ElementTree.fromstring(texts[0]).iter()]
    assert EVIL in words and "currentColor" in texts[0]


def test_without_numbers_to_draw_it_says_so(tmp_path: Path) -> None:
    cells = tmp_path / "cells"
    for kind in ("fog", "snow"):
        leave_cell(cells / kind, "featcal", 0.5, settings={"kind": kind})
    assert "there is nothing to draw" in error_of("report", cells, "--figures", tmp_path / "x")
