"""Tables, sentences and figures of studies that change calibration data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from synthetic import make_report

from fusion_bench_featcal.results.data_figures import data_figures
from fusion_bench_featcal.results.data_tables import data_grids
from fusion_bench_featcal.results.study import Group, Study, make_study
from fusion_bench_featcal.results.study_page import merged_points

MERGER = "task_arithmetic"
LABELS = ("clean", 0), ("fog", 1), ("fog", 3), ("motion_blur", 3)
LEVELS: dict[Any, float] = dict(zip(LABELS, (0.85, 0.7, 0.5, 0.8), strict=True))


def made(folder: Path, name: str, points: dict[Any, dict[str, Any]]) -> Study:
    """A study with one report a point; a point's key is its labels and seed."""
    groups: dict[str, Group] = {}
    for number, (labels, report) in enumerate(points.items()):
        place = folder / str(number)
        make_report(**{"upstream": MERGER, **report}).write(place)
        group = groups.setdefault(str(labels[:-1]), Group(dict(labels[:-1])))
        group.add([place], [])
    options: Any = {"over": [], "against": None, "design": "product"}
    seeds = list(dict.fromkeys(labels[-1] for labels in points))
    return make_study(name, "toy", list(groups.values()), seeds=seeds, **options)


def corruption_study(
    folder: Path, seeds: tuple[int, ...] = (42,), name: str = "corruption"
) -> Study:
    points: dict[Any, Any] = {}
    for (kind, severity), level in LEVELS.items():
        for seed in seeds:
            levels = {"base": 0.3, "experts": 0.95, MERGER: 0.6, "featcal": level + seed / 1e3}
            labels = ("corruption", kind), ("severity", severity), seed
            points[labels] = {"levels": levels | {"surgery": 0.65}, "seed": seed}
    return made(folder, name, points)


def grids(study: Study) -> dict[str, Any]:
    return dict(data_grids(study, MERGER, merged_points(study)))


def test_falls_are_beside_the_papers_at_its_severity(tmp_path: Path) -> None:
    ((_, grid),) = grids(corruption_study(tmp_path)).items()
    assert list(grid.columns) == ["fog 3", "motion blur 3"]
    lines = dict(grid.lines)
    assert lines["+ featcal"] == ["-35.0 (paper -9.9)", "-5.0 (paper -11.3)"]
    assert lines["+ surgery"] == ["+0.0 (paper -7.4)", "+0.0 (paper -9.3)"]


def test_table_6_is_checked_with_its_numbers(tmp_path: Path) -> None:
    study = corruption_study(tmp_path)
    texts = [finding["text"] for finding in study.findings]
    (fall,) = (t for t in texts if "fog" in t and "clean" in t)
    assert "is below featcal" in fall and ": holds, -35.0 [" in fall and "paper -9.9" in fall
    (over,) = (t for t in texts if "fog" in t and "surgery" in t)
    assert "is above surgery" in over and ": does not hold, -11.0 [" in over
    assert not any("gaussian" in text or "prob_surgery" in text for text in texts)  # not run


def drawn(study: Study) -> dict[str, Figure]:
    figures = data_figures(study, MERGER, study.name)
    assert figures is not None
    return figures


def texts_of(figure: Figure) -> list[str]:
    figure.draw_without_rendering()
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    return found + [t.get_text() for axes in figure.axes for t in axes.get_xticklabels()]


def test_figures_of_corruptions_show_ours_the_papers_and_severities(tmp_path: Path) -> None:
    figures = drawn(corruption_study(tmp_path / "one", (42, 43)))
    figures |= drawn(corruption_study(tmp_path / "two", (42, 43), "severity"))
    ours, paper = figures["corruption"].axes
    assert "severity 3" in ours.get_title("left") and "Table 6" in paper.get_title("left")
    assert texts_of(figures["corruption"])[:3] == ["clean", "fog", "motion\nblur"]
    fog, blur = figures["severity"].axes
    assert (fog.get_title("left"), blur.get_title("left")) == ("fog", "motion blur")
    heights = {round(float(y)) for line in fog.lines for y in np.asarray(line.get_ydata())}
    assert {54, 74, 89} <= set(heights)  # featcal at severities 3 and 1, and clean


def transfer_study(folder: Path) -> Study:
    levels = {"base": 0.3, "experts": 0.95, MERGER: 0.6}
    points = {
        (("source", source), 42): {"levels": levels | {"featcal": level}, "tasks": ["cars", "dtd"]}
        for source, level in {"own": 0.8, "cars": 0.7, "noise": 0.4}.items()
    }
    return made(folder, "transfer", points)


def test_transfer_is_a_matrix_of_gains(tmp_path: Path) -> None:
    study = transfer_study(tmp_path)
    ((title, grid),) = grids(study).items()
    assert title == "over task_arithmetic: gain of featcal by task, points"
    assert list(grid.columns) == ["cars", "dtd", "average"]
    assert [head for head, _ in grid.lines] == ["own", "cars", "noise"]
    assert dict(grid.lines)["noise"] == ["-20.0", "-20.0", "-20.0"]
    figure = drawn(study)["transfer"]
    weights = {text.get_text(): text.get_fontweight() for text in figure.axes[0].texts}
    assert weights["-20.0"] == "normal" and weights["+20.0"] == "bold"
    assert {"cars", "dtd", "average"} <= set(texts_of(figure))


def test_other_studies_have_neither(tmp_path: Path) -> None:
    points = {(("corruption", "clean"), 42): {"levels": {MERGER: 0.6, "featcal": 0.7}}}
    study = made(tmp_path, "own", points)
    assert grids(study) == {}
    assert data_figures(study, MERGER, "own") is None


def test_a_study_with_one_missing_cell_is_drawn(tmp_path: Path) -> None:
    levels = {"base": 0.3, "experts": 0.95, MERGER: 0.6}
    points = {
        (("corruption", "clean"), ("severity", 0), 42): {"levels": levels | {"featcal": 0.8}},
        (("corruption", "fog"), ("severity", 3), 42): {"levels": levels},
    }
    study = made(tmp_path, "corruption", points)
    ((_, grid),) = grids(study).items()
    assert dict(grid.lines)["+ featcal"][0].startswith("-")
    drawn(study)


@pytest.mark.parametrize("kind", ["corruption", "transfer"])
def test_pages_hold_the_tables(tmp_path: Path, kind: str) -> None:
    study = (corruption_study if kind == "corruption" else transfer_study)(tmp_path / "runs")
    study.write(tmp_path / "study")
    page = (tmp_path / "study" / "study.md").read_text()
    assert ("change from clean" if kind == "corruption" else "calibrated on") in page
    assert (tmp_path / "study" / f"{kind}.png").is_file()
