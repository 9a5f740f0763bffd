"""Figures of studies: what they show of made-up results."""

from typing import Any

import pytest
from made_studies import point, row, study, sweep_points

from fusion_bench_featcal.results.study_curves import curves
from fusion_bench_featcal.results.study_figures import planes, study_figures
from fusion_bench_featcal.results.study_page import merged_points, study_markdown


def test_samples_are_a_curve_for_each_row() -> None:
    points = [
        point({"samples_per_task": n}, featcal=0.8 + n / 1e4, surgery=0.5 + n / 2000)
        for n in (8, 64, 512)
    ]
    (figure,) = study_figures(study("samples", points)).values()
    (own,) = list[Any](figure.axes)
    assert pytest.approx([80.08, 80.64, 85.12]) in [list(line.get_ydata()) for line in own.lines]
    assert own.get_xscale() == "log" and own.get_xlabel() == "samples per task"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "surgery", "featcal", "ta", "experts",
    ]  # fmt: skip


def test_bars_at_the_same_value_stand_side_by_side() -> None:
    points = [point({"samples_per_task": n}, featcal=0.8, surgery=0.8) for n in (8, 64)]
    (figure,) = study_figures(study("samples", points)).values()
    figure.canvas.draw()
    own = list[Any](figure.axes)[0]
    one, other = own.collections
    assert [path.vertices.tolist() for path in one.get_paths()] == [
        [[8, 79], [8, 81]], [[64, 79], [64, 81]],
    ]  # fmt: skip
    ends = [bars.get_transform().transform(bars.get_paths()[0].vertices) for bars in (one, other)]
    assert 1 < abs(ends[1][0][0] - ends[0][0][0]) < 10  # pixels
    low, high = own.get_ylim()
    assert low < 79 and high > 81
    left, right = own.get_xlim()
    assert left < 8 and right > 64


def test_tasks_with_fewer_samples_are_told() -> None:
    few, many = (point({"samples_per_task": n}, featcal=0.8) for n in (8, 512))
    few["rows"][-1]["samples"], many["rows"][-1]["samples"] = "8 train", "256 to 512 train"
    page = study_markdown(study("samples", [few, many]))
    assert "n = 512: tasks with fewer samples give all of them (256 to 512 train)" in page
    assert "n = 8: tasks" not in page
    assert "| n = 8: + featcal | 80.0 |" in page and "| n = 512: experts | 90.0 |" in page


def test_points_and_rows_with_other_numbers_of_samples_have_no_such_sentence() -> None:
    few, named = (point({"samples_per_task": n}, featcal=0.8) for n in (8, "few"))
    few["rows"][-1]["samples"], named["rows"][-1]["samples"] = "256 train", "8 train"
    assert "fewer samples" not in study_markdown(study("samples", [few]))
    assert "fewer samples" not in study_markdown(study("samples", [named]))


def test_each_axis_has_a_panel_and_a_pair_a_heat_map() -> None:
    made = study("sweep", sweep_points(), design="each")
    lines = curves(made, "ta")
    assert lines["ridge_lambda"]["featcal"].x == [0.0, 0.05, 1.0]
    assert lines["mix_alpha"]["featcal"].x == [0.0, 0.3, 1.0]
    assert planes(made) == [("ridge_lambda", "mix_alpha")]
    figures = study_figures(made)
    assert set(figures) == {"sweep", "sweep-ridge_lambda-mix_alpha"}
    texts = {text.get_text() for text in figures["sweep-ridge_lambda-mix_alpha"].axes[0].texts}
    assert texts == {"72.8", "73.0", "68.0", "69.8", "79.8", "75.0"}


def test_one_point_is_drawn_as_differences() -> None:
    rows = [row("ta", 0.6), row("featcal", 0.8), row("featcal:x", 0.7, against="featcal")]
    made = study("ablation", [{"labels": {}, "rows": rows, "failed": []}])
    (figure,) = study_figures(made).values()
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "from featcal"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["featcal:x"]
    assert "| + featcal:x | 70.0 ± 1.0 | +10.0 [-10.0, +30.0] | featcal |" in study_markdown(made)


def test_labels_in_over_are_averaged() -> None:
    subsets = [("a+b", 0.7), ("a+c", 0.8), ("b+c", 0.9)]
    points = [point({"tasks": 2, "subset": s}, featcal=v) for s, v in subsets]
    points.append(point({"tasks": 3, "subset": "a+b+c"}, featcal=0.75))
    made = study("tasks", points, over=["subset"])
    (two, rows), (three, _) = merged_points(made)
    assert (two, three) == ({"tasks": 2}, {"tasks": 3})
    assert rows["ta", "featcal"]["accuracy"]["average"] == pytest.approx(0.8)
    line = curves(made, "ta")["tasks"]["featcal"]
    assert line.y == pytest.approx([80.0, 75.0])
    # Of 0.7, 0.8 and 0.9: 4.30 / 3**0.5 deviations. One subset has no interval.
    assert line.half == pytest.approx([10 * 4.3027 / 3**0.5, 0.0], rel=1e-4)
    (figure,) = study_figures(made).values()
    assert figure.legends[0].get_title().get_text() == "bars: 95 % interval over subset"
    assert "± half of the 95 % interval over subset" in study_markdown(made)


def test_a_mean_over_subsets_has_the_mean_difference() -> None:
    points = [
        point({"tasks": 2, "subset": str(place)}, featcal=0.6 + gain)
        for place, gain in enumerate((0.1, 0.2, 0.3))
    ]
    made = study("tasks", points, over=["subset"])
    ((_, rows),) = merged_points(made)
    mean = rows["ta", "featcal"]
    half = 4.3027 * 0.1 / 3**0.5
    assert mean["difference"] == pytest.approx(
        {"estimate": 0.2, "low": 0.2 - half, "high": 0.2 + half}, rel=1e-4
    )
    assert not {"gain", "seeds", "samples", "spread"} & set(mean)
    assert "| + featcal | 80.0 ± 24.8 | +20.0 [-4.8, +44.8] | merged |" in study_markdown(made)


def test_brackets_behind_accuracies_have_a_head() -> None:
    points = [point({"n": n}, featcal=0.8) for n in range(3)]
    assert "| mean over seeds, % (worst gap) | n = 0 |" in study_markdown(study("a", points))
    long = [point({"n": n}, featcal=0.8) for n in range(12)]
    assert "| mean over seeds, % (worst gap) | ta | + featcal |" in study_markdown(study("a", long))
    for each in points:
        for line in each["rows"]:
            line["worst_recovered_gap"] = None
    assert "| mean over seeds, % | n = 0 |" in study_markdown(study("a", points))


def test_costs_have_a_panel_each() -> None:
    cost = {"seconds": 2.0, "peak_rss_bytes": 2.0**30}
    rows = [row("ta", 0.6), row("featcal", 0.8, cost=cost)]
    points = [
        {"labels": {"samples_per_task": number}, "rows": rows, "failed": []} for number in (8, 64)
    ]
    (figure,) = study_figures(study("cost", points)).values()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["seconds", "memory, MiB"]
    memory: Any = figure.axes[1]
    assert [1024.0, 1024.0] in [list(line.get_ydata()) for line in memory.lines]


def test_points_with_names_are_a_line_each() -> None:
    points = [point({"source": name}, featcal=value) for name, value in (("x", 0.7), ("y", 0.8))]
    (figure,) = study_figures(study("transfer", points)).values()
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["x", "y"]


def test_points_without_costs_or_values_have_no_figure() -> None:
    labelled = [point({"split": name}, featcal=0.8) for name in ("train", "test")]
    for each in labelled:
        for line in each["rows"]:
            line["cost"] = {"seconds": 2.0}
    assert study_figures(study("cost", labelled)) == {}
    bare = [point({"samples_per_task": n}, featcal=0.8) for n in (8, 64)]
    assert study_figures(study("cost", bare)) == {}
    alone = {"labels": {}, "rows": [row("ta", 0.6), row("featcal", 0.8)], "failed": []}
    for line in alone["rows"]:
        line["difference"] = None
    assert study_figures(study("ablation", [alone])) == {}


def test_costs_are_drawn_along_the_first_axis_of_numbers() -> None:
    points = [
        point({"split": split, "samples_per_task": n}, featcal=0.8)
        for split in ("train", "test")
        for n in (8, 64)
    ]
    for each in points:
        for line in each["rows"]:
            line["cost"] = {"seconds": float(each["labels"]["samples_per_task"])}
    (figure,) = study_figures(study("cost", points)).values()
    assert figure.axes[0].get_xlabel() == "samples per task"
