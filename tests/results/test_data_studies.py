"""Tables, sentences and figures of studies that change calibration data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from synthetic import make_report

from fusion_bench_featcal.results import ReportError, study_figures
from fusion_bench_featcal.results.data_figures import data_figures
from fusion_bench_featcal.results.data_tables import data_grids
from fusion_bench_featcal.results.study import Group, Study
from fusion_bench_featcal.results.study_files import make_study, write_study
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


def test_falls_from_clean_are_at_the_papers_severity(tmp_path: Path) -> None:
    ((_, grid),) = grids(corruption_study(tmp_path)).items()
    assert list(grid.columns) == ["fog 3", "motion blur 3"]
    lines = dict(grid.lines)
    assert lines["+ featcal"] == ["-35.0", "-5.0"]
    assert lines["+ surgery"] == ["+0.0", "+0.0"]


def drawn(study: Study) -> dict[str, Figure]:
    figures = data_figures(study, MERGER, study.name)
    assert figures is not None
    return figures


def texts_of(figure: Figure) -> list[str]:
    figure.draw_without_rendering()
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    return found + [t.get_text() for axes in figure.axes for t in axes.get_xticklabels()]


def test_figures_of_corruptions_show_kinds_and_severities(tmp_path: Path) -> None:
    figures = drawn(corruption_study(tmp_path / "one", (42, 43)))
    figures |= drawn(corruption_study(tmp_path / "two", (42, 43), "severity"))
    (axes,) = figures["corruption"].axes
    assert "severity 3" in axes.get_title("left")
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


def test_each_value_of_other_labels_has_a_table_and_a_figure(tmp_path: Path) -> None:
    levels = {"base": 0.3, "experts": 0.95, MERGER: 0.6}
    few, many = ("samples_per_task", 8), ("samples_per_task", 64)
    values = {few: (0.8, 0.7), many: (0.85, 0.8)}
    corruptions, sources = {}, {}
    for number, pair in values.items():
        for (kind, severity), level in zip((("clean", 0), ("fog", 3)), pair, strict=True):
            labels = ("corruption", kind), ("severity", severity), number, 42
            corruptions[labels] = {"levels": levels | {"featcal": level}}
        for source, level in zip(("own", "noise"), pair, strict=True):
            sources[("source", source), number, 42] = {"levels": levels | {"featcal": level}}
    found = {
        kind: made(tmp_path / kind, kind, points)
        for kind, points in {"corruption": corruptions, "transfer": sources}.items()
    }
    falls, moved = (grids(study) for study in found.values())
    assert [dict(grid.lines)["+ featcal"][0] for grid in falls.values()] == ["-10.0", "-5.0"]
    assert [dict(grid.lines)["noise"][-1] for grid in moved.values()] == ["+10.0", "+20.0"]
    for tables in (falls, moved):
        assert [title.partition("; ")[2] for title in tables] == ["n = 8", "n = 64"]
        assert all(grid.corner.endswith(f"; n = {n}") for grid, n in zip(
            tables.values(), (8, 64), strict=True))  # fmt: skip
    names = {f"{kind}-samples_per_task-{n}" for kind in found for n in (8, 64)}
    figures = {name: f for study in found.values() for name, f in drawn(study).items()}
    assert set(figures) == names
    for name, figure in figures.items():
        assert f"(n = {name.rpartition('-')[2]})" in figure.get_suptitle()


def test_absent_cells_and_panels_do_not_end_a_study(tmp_path: Path) -> None:
    levels = {"base": 0.3, "experts": 0.95, MERGER: 0.6}
    clean = {(("corruption", "clean"), ("severity", 0), 42): {"levels": levels | {"featcal": 0.8}}}
    for kind in ("severity", "corruption"):
        study = made(tmp_path / f"{kind}-runs", kind, clean)
        write_study(study, tmp_path / kind)
        assert not any("drawn" in note for note in study.notes)
    assert not list((tmp_path / "severity").glob("*.png"))  # no corruption, no panel
    points = {
        (("source", "own"), 42): {"levels": levels | {"featcal": 0.8, "surgery": 0.7}},
        (("source", "noise"), 42): {"levels": levels | {"surgery": 0.5}},
    }
    study = made(tmp_path / "transfer-runs", "transfer", points)
    figure = drawn(study)["transfer"]
    written = [[text.get_text() for text in axes.texts] for axes in figure.axes[:2]]
    assert sorted(map(len, written)) == [3, 6]  # featcal has one source, surgery two


@pytest.mark.parametrize("error", [ReportError("no matplotlib"), KeyError("fog")])
def test_a_note_tells_of_missing_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    study = transfer_study(tmp_path / "runs")
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise error

        patch.setattr(study_figures, "draw_study", fail)
        write_study(study, tmp_path / "study")
    place = tmp_path / "study"
    loaded = Study.load(place)
    for text in (*loaded.notes[-1:], (place / "study.md").read_text()):
        assert "not all figures were drawn: " in text
        assert "no matplotlib" in text or "KeyError('fog')" in text
    write_study(loaded, tmp_path / "again")  # now they are
    assert not any("drawn" in note for note in Study.load(tmp_path / "again").notes)


@pytest.mark.parametrize("kind", ["corruption", "transfer"])
def test_pages_hold_the_tables(tmp_path: Path, kind: str) -> None:
    study = (corruption_study if kind == "corruption" else transfer_study)(tmp_path / "runs")
    write_study(study, tmp_path / "study")
    page = (tmp_path / "study" / "study.md").read_text()
    assert ("change from clean" if kind == "corruption" else "calibrated on") in page
    assert (tmp_path / "study" / f"{kind}.png").is_file()
