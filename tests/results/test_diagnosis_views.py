"""Pages, tables and figures of a diagnosis, from numbers that were made up."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_diagnoses import ITEMS, SIZES, TASKS, made, parts_of

from fusion_bench_featcal.results import ReportError
from fusion_bench_featcal.results.class_gains import by_cosine, class_gains
from fusion_bench_featcal.results.diagnosis import DIAGNOSIS_FILE, MEASURES, Diagnosis, measures
from fusion_bench_featcal.results.diagnosis_figures import diagnosis_figures
from fusion_bench_featcal.results.diagnosis_page import (
    change_grids,
    diagnosis_markdown,
    help_sentences,
    long_lines,
    write_diagnosis,
)
from fusion_bench_featcal.results.drawing import save_figures
from fusion_bench_featcal.results.items import student_interval


def test_shares_of_both_terms_add_up():
    parts = parts_of(1.0, 0)
    found = measures(parts)
    assert set(found) == set(MEASURES)
    mean = {name: values.mean(1) for name, values in parts.items()}
    of_mismatch = (mean["mismatch_sq"] + mean["product"]) / mean["drift_sq"]
    assert of_mismatch + found["share"] == pytest.approx(1)
    assert (found["share"] > 0.5).all()  # its term is twice as large


def test_relative_drift_is_scaled_by_the_expert():
    found = measures(parts_of(10.0, 1))["relative"] / measures(parts_of(1.0, 1))["relative"]
    assert found == pytest.approx(10)


def test_rows_that_were_made_from_the_merged_model():
    assert made().repairs == ["featcal", "featcal:plus"]
    assert made().merged == "merger"
    assert made({"base": 1.0, "mine": 2.0}).merged is None


def test_what_is_written_is_read_again(tmp_path: Path):
    path = write_diagnosis(made(), tmp_path)
    assert Diagnosis.load(tmp_path) == made()
    assert path.read_text() == diagnosis_markdown(Diagnosis.load(tmp_path))


def test_damage_and_other_versions_are_named(tmp_path: Path):
    write_diagnosis(made(), tmp_path)
    file = tmp_path / DIAGNOSIS_FILE
    text = file.read_text()
    content = {k: v for k, v in json.loads(text).items() if k != "seed"}
    for damaged in (text[:-9], json.dumps(content)):
        file.write_text(damaged)
        with pytest.raises(ReportError, match=DIAGNOSIS_FILE):
            Diagnosis.load(tmp_path)


def test_interval_over_tasks():
    found = student_interval(np.array([1.0, 2.0, 3.0]))
    assert found.estimate == 2
    assert found.high - 2 == pytest.approx(4.302653 / np.sqrt(3), rel=1e-5)
    assert student_interval(np.array([1.0])).low == 1


def test_without_a_merged_model_there_is_nothing_to_compare_with():
    found = made({"base": 1.0, "mine": 2.0})
    assert help_sentences(found) == []
    page = diagnosis_markdown(found)
    assert "## Drift along the depth" in page
    assert "## Where calibration helps" not in page


def test_classes_are_ordered_by_their_gain():
    gains = [(gain.task, gain.name) for gain in by_cosine(class_gains(made(), "featcal"))]
    assert gains[0] == ("toy_three", "late")
    assert gains[-1] == ("toy_one", "early")
    assert re.search(r"by class from \+\S+ on three: late", help_sentences(made())[0])


def test_a_row_that_ends_farther_from_the_experts_is_named():
    found = made({"base": 3.0, "merger": 1.0, "featcal": 2.0})
    warning, change, *_ = help_sentences(found)
    means = [np.mean([found.cosine(row, task) for task in TASKS]) for row in ("featcal", "merger")]
    assert warning == (
        "featcal: final features are farther from the experts' than the merged model's (mean "
        f"cosine {means[0]:.3f}, merged {means[1]:.3f}). "
        "Are the calibration samples like these items?"
    )
    assert change.startswith("featcal: change of relative drift (all positions) from +100 % at")
    assert "; farthest from its expert remains three (" in change
    assert not any("farther" in line for line in help_sentences(made()))


def test_change_of_drift_has_a_table_for_each_calibrated_row():
    grids = {grid.corner: dict(grid.lines) for grid in change_grids(made())}
    assert list(grids) == ["block: featcal, %", "block: featcal:plus, %"]
    found = made()
    for row in found.repairs:
        for place in range(3):
            cells = [
                f"{100 * (found.drift[row][t]['relative'][place] / before - 1):+.0f}"
                for t in TASKS
                for before in [found.drift["merger"][t]["relative"][place]]
            ]
            assert grids[f"block: {row}, %"][str(place)] == cells
    assert change_grids(made({"mine": 1.0})) == []


def test_long_table_has_every_number_once():
    lines = list(long_lines(made()))
    keys = [
        tuple(line.get(k) for k in ("row", "task", "class", "block", "metric")) for line in lines
    ]
    assert len(set(keys)) == len(keys)
    drift = [line for line in lines if line["metric"] in MEASURES and "class" not in line]
    assert len(drift) == len(SIZES) * len(TASKS) * len(MEASURES) * 3


def test_every_figure_is_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    figures = diagnosis_figures(made())
    assert set(figures) == {
        "drift_depth", "drift_tasks", "drift_split", "drift_change", "final_cosine",
        "final_cosine_items", "gains", "task_vectors", "classes", "class_gains", "pca",
    }  # fmt: skip
    paths = save_figures(figures, tmp_path, None, "--out")
    assert all(path.stat().st_size > 1000 for path in paths)


def texts_of(figure: Any) -> str:
    import matplotlib.text

    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def titles_of(panels: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in panels]


def test_figures_have_a_panel_for_every_calibrated_row():
    pytest.importorskip("matplotlib")
    figures = diagnosis_figures(made())
    for name in ("drift_change", "classes", "class_gains"):
        assert titles_of(figures[name].axes) == ["featcal", "featcal:plus"]
    panels = figures["pca"].axes
    assert titles_of(panels[:3]) == ["merger", "featcal", "featcal:\nplus"]
    assert len(panels) == 3 * len(TASKS)
    for line in range(len(TASKS)):  # rows compare where a task's panels have one scale
        own = panels[3 * line : 3 * line + 3]
        assert len({(axes.get_xlim(), axes.get_ylim()) for axes in own}) == 1


def test_projections_tell_the_fewest_and_the_most_items():
    pytest.importorskip("matplotlib")
    found = made()
    assert f"\n{ITEMS} test items;" in texts_of(diagnosis_figures(found)["pca"])
    few = {row: points[:5] for row, points in found.projections["pca"]["toy_two"].items()}
    found.projections["pca"]["toy_two"] = few
    assert f"\n5-{ITEMS} test items;" in texts_of(diagnosis_figures(found)["pca"])


@pytest.mark.parametrize(
    ("positions", "words"),
    [("all", "all positions"), ("read", "only positions that the head reads")],
)
def test_figures_of_drift_say_on_which_items_and_positions(positions: str, words: str):
    pytest.importorskip("matplotlib")
    found = made()
    found.positions = positions
    figures = diagnosis_figures(found)
    for name in ("drift_depth", "drift_tasks", "drift_split", "drift_change"):
        assert f"({ITEMS} test items of each task, {words})" in texts_of(figures[name])
    found.items["toy_one"] = 5
    assert f"(5-{ITEMS} test items of each task)" in texts_of(diagnosis_figures(found)["classes"])


def test_figures_without_a_merged_model_or_accuracies(tmp_path: Path):
    pytest.importorskip("matplotlib")
    found = made({"mine": 2.0})
    found.accuracy, found.task_vectors, found.projections = {}, {}, {}
    found.class_accuracy = {}
    figures = diagnosis_figures(found)
    assert set(figures) == {
        "drift_depth", "drift_tasks", "drift_split", "final_cosine", "final_cosine_items"
    }  # fmt: skip
    save_figures(figures, tmp_path, None, "--out")
