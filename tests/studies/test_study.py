"""Studies from their points to their files, on one-layer models, and the command."""

import csv
import io
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_runs import fusion_bench
from comparison_parts import (
    MERGERS,
    Failing,
    FakeProgram,
    Scale,
    SignTaskPool,
    finished_cells,
    method,
    model_pool,
)
from omegaconf import OmegaConf

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab.compare import StudyAlgorithm
from fusion_bench_featcal.lab.report.study import Study, average_of
from fusion_bench_featcal.results import DIMENSIONS, Report

MERGER = "task_arithmetic"
SCALE = "method.post_merging_methods.scale.factor"
FACTORS = {"small": 0.5, "large": -3.0}
KEYS: dict[str, Any] = {
    "study": "factors",
    "axes": {"factor": {label: {SCALE: value} for label, value in FACTORS.items()}},
    "seeds": [1, 2],
    "upstream_mergers": MERGERS,
    "upstreams": [MERGER],
    "columns": ["seconds"],
    "post_merging_methods": {"scale": method(Scale, factor=1.0, seed="${method.seed}")},
}


def run(folder: Path, **keys: Any) -> int:
    """Run a study as FusionBench would. Return the number of evaluated models."""
    program: Any = FakeProgram(SignTaskPool())
    chosen = {**KEYS, "results_dir": str(folder), **keys}
    program.config = OmegaConf.create({"method": chosen, "modelpool": {}, "taskpool": {}})
    settings: Any = OmegaConf.to_container(program.config.method, resolve=False)
    algorithm: Any = StudyAlgorithm(**settings)
    algorithm._program = program
    algorithm.run(model_pool())
    return program.taskpool.evaluated


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A study with one seed, its page, and its results with a second seed."""
    folder = tmp_path_factory.mktemp("finished")
    run(folder, seeds=[1])
    page, added = (folder / "report.md").read_text(), run(folder)
    lines = (folder / "lines.csv").read_text()
    return SimpleNamespace(folder=folder, page=page, added=added, lines=lines)


@pytest.fixture
def folder(finished: Any, tmp_path: Path) -> Path:
    """A copy of the finished study."""
    return shutil.copytree(finished.folder, tmp_path / "study")


def rows_of(point: Any, *names: str) -> list[Any]:
    return [point.rows(MERGER, name)[0] for name in names]


def test_every_point_is_in_the_table(finished: Any) -> None:
    lines = list(csv.DictReader(io.StringIO(finished.lines)))
    assert [*lines[0]] == ["factor", *DIMENSIONS, "value"]
    accuracies = {
        (line["factor"], line["row"], line["task"], line["seed"]): float(line["value"])
        for line in lines
        if line["metric"] == "accuracy"
    }
    expected = {}
    for label, factor in FACTORS.items():
        for seed in (1, 2):
            point = finished.folder / "points" / f"factor-{label}_seed-{seed}"
            report = Report.load(point / MERGER)
            assert report.settings["scale"] == {"factor": factor, "seed": seed}
            for row, tasks in report.rows.items():
                expected |= {(label, row, task, str(seed)): tasks[task] for task in tasks}
    assert accuracies == pytest.approx(expected)
    assert len(accuracies) == 2 * 2 * 4 * 3  # labels, seeds, rows, and tasks with their average


def test_points_are_averaged_over_seeds_alone(finished: Any) -> None:
    loaded = Study.load(finished.folder)
    assert [title for title, _ in loaded.grids()][1:] == [f"seconds, over {MERGER}"]
    points = loaded.points
    assert [point.labels for point in points] == [{"factor": label} for label in FACTORS]
    (merged, small), (again, large) = (
        [average_of([row]).estimate for row in rows_of(point, MERGER, "scale")] for point in points
    )
    assert merged == again and small != large
    assert rows_of(points[1], "scale")[0].gain == pytest.approx(large - merged)
    assert "±" not in finished.page and "±" in (finished.folder / "report.md").read_text()


def test_notes_stay_with_their_points(finished: Any) -> None:
    page, text = (finished.folder / "report.md").read_text(), "ends below the merged model"
    reports = [Report.load(file.parent) for file in finished.folder.rglob(f"{MERGER}/report.json")]
    assert any(text in note.text for report in reports for note in report.notes)
    assert text not in page


def test_a_study_goes_on_with_new_points_and_runs_nothing_again(
    finished: Any, folder: Path
) -> None:
    assert finished.added == 3  # the merged model of seed 2, and two scaled ones
    assert run(folder) == 0 and (folder / "lines.csv").read_text() == finished.lines


def test_labels_of_over_are_averaged(folder: Path) -> None:
    assert run(folder, over=["factor"], seeds=[1]) == 0
    (point,) = Study.load(folder).points
    rows = point.rows(MERGER, "scale")
    first, second = (row.accuracy["average"] for row in rows)
    average = average_of(rows)
    assert (average.over, point.labels) == ("values of a label", {})
    assert average.estimate == pytest.approx((first + second) / 2)
    # Student's t for two values: 12.706 times their distance over two.
    assert average.half == pytest.approx(12.706 * abs(first - second) / 2, rel=1e-3)
    text = f"{100 * average.estimate:.1f} ± {100 * average.half:.1f}"
    assert text in (folder / "report.md").read_text()


def test_a_failing_cell_is_named_and_stops_no_other(folder: Path) -> None:
    repaired = folder / "repaired"
    methods = {**KEYS["post_merging_methods"], "bad": method(Failing, until=str(repaired))}
    message = r"2 cells .* failed; .*factor = small: .*seed 1.*flux"
    with pytest.raises(CalibrationError, match=message):
        run(folder, post_merging_methods=methods, seeds=[1])
    loaded = Study.load(folder)
    for point in loaded.points:
        assert point.rows(MERGER, "scale") and not point.rows(MERGER, "bad")
    assert len(loaded.failed) == 2
    text = f"factor = small: {MERGER}, bad failed (seed 1): the flux ran dry"
    assert text in (folder / "report.md").read_text()
    repaired.touch()
    assert run(folder, post_merging_methods=methods, seeds=[1]) == 1
    assert not Study.load(folder).failed


def test_rows_of_one_point_are_compared_with_the_row_that_they_change(folder: Path) -> None:
    methods = {
        name: method(Scale, factor=factor, seed="${method.seed}")
        for name, factor in (("whole", 1.0), ("half", -3.0))
    }
    against = {"whole": ["half"]}
    run(folder, axes=None, seeds=[1], post_merging_methods=methods, against=against)
    loaded = Study.load(folder)
    ((_, grid),) = loaded.grids()
    cells = {row: dict(zip(grid.columns, line, strict=True)) for row, line in grid.lines}
    whole, half = rows_of(loaded.points[0], "whole", "half")
    difference = 100 * (half.accuracy["average"] - whole.accuracy["average"])
    assert cells["half"]["against"] == "whole" and cells["half"]["points"] == f"{difference:+.1f}"
    assert cells["whole"]["points"] == "-"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"axs": {}}, r"method.axs is no setting of factors.*axes"),
        ({"axes": {"f": {"x": {SCALE.replace("factor", "fctor"): 1}}}}, r"fctor.*at the point f=x"),
    ],
)
def test_bad_input_leaves_nothing_behind(keys: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, CalibrationError), match=message) as caught:
        run(tmp_path / "results", **keys)
    assert "\n" not in str(caught.value) and not (tmp_path / "results").exists()


@pytest.mark.slow
def test_the_command_runs_two_points_and_shares_cells_with_compare(tmp_path: Path) -> None:
    pool = "clip-vit-mini_alphabets2"
    words = [f"modelpool={pool}", "method.post_merging=[ridge_surgery]", "method.references=[]"]
    store = tmp_path / "outputs" / "comparison" / pool
    axes = ["method.seeds=[42]", "method.axes.samples_per_task=[4,8]", "path.log_dir=log"]
    done = fusion_bench(["method=study/samples", *words, *axes], tmp_path)
    assert "+ ridge_surgery" in done.stdout and "n = 8" in done.stdout
    points = Study.load(tmp_path / "log").points
    assert [point.labels["samples_per_task"] for point in points] == [4, 8]
    assert len(finished_cells(store)) == 3  # merged once, and two corrections
    words += ["method.samples_per_task=8", f"method.upstreams=[{MERGER}]", "method.alone=[]"]
    fusion_bench(["method=compare", *words, "path.log_dir=compare"], tmp_path)
    assert len(finished_cells(store)) == 3  # all of them were finished
    report = Report.load(tmp_path / "compare" / MERGER)
    (row,) = rows_of(points[1], "ridge_surgery")
    assert row.accuracy == pytest.approx(report.rows["ridge_surgery"])
