"""A study from its points to its files, on one-layer models."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from comparison_parts import MERGERS, Failing, FakeProgram, Scale, SignTaskPool, method, model_pool
from omegaconf import OmegaConf

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.lab.compare import StudyAlgorithm
from fusion_bench_featcal.lab.report.study import Study, average_of, curves_of
from fusion_bench_featcal.results import Report, ReportError
from fusion_bench_featcal.results.long_table import DIMENSIONS

SCALE = "method.post_merging_methods.scale.factor"
KEYS: dict[str, Any] = {
    "study": "factors",
    "axes": {"factor": {"small": {SCALE: 0.5}, "large": {SCALE: -3.0}}},
    "seeds": [1, 2],
    "upstream_mergers": MERGERS,
    "upstreams": ["task_arithmetic"],
    "post_merging_methods": {"scale": method(Scale, factor=1.0, seed="${method.seed}")},
}


def study(folder: Path, **keys: Any) -> Any:
    """The algorithm with its program, as FusionBench would set it up."""
    chosen = {**KEYS, "results_dir": str(folder), **keys}
    program: Any = FakeProgram(SignTaskPool())
    program.config = OmegaConf.create({"method": chosen, "modelpool": {}, "taskpool": {}})
    method: Any = OmegaConf.to_container(program.config.method, resolve=False)
    algorithm: Any = StudyAlgorithm(**method)
    algorithm._program = program
    return algorithm


def test_every_point_is_in_the_table(tmp_path: Path) -> None:
    study(tmp_path).run(model_pool())
    with (tmp_path / "lines.csv").open() as file:
        lines = list(csv.DictReader(file))
    heads = ["factor", *DIMENSIONS, "value"]
    assert [*lines[0]] == heads
    accuracies = [line for line in lines if line["metric"] == "accuracy"]
    keys = [tuple(line[head] for head in heads[:-1]) for line in accuracies]
    assert len(set(keys)) == len(keys)
    rows, tasks = ("base", "experts", "task_arithmetic", "scale"), ("left", "right", "average")
    assert {(line["factor"], line["row"], line["task"], line["seed"]) for line in accuracies} == {
        (factor, row, task, seed)
        for factor in ("small", "large")
        for row in rows
        for task in tasks
        for seed in ("1", "2")
    }
    for line in accuracies:
        place = tmp_path / "points" / f"factor-{line['factor']}_seed-{line['seed']}"
        report = Report.load(place / line["merger"])
        assert float(line["value"]) == pytest.approx(report.rows[line["row"]][line["task"]])


def test_the_points_change_what_their_labels_say(tmp_path: Path) -> None:
    study(tmp_path).run(model_pool())
    for label, factor in (("small", 0.5), ("large", -3.0)):
        for seed in (1, 2):
            folder = tmp_path / "points" / f"factor-{label}_seed-{seed}" / "task_arithmetic"
            settings = Report.load(folder).settings["scale"]
            assert settings == {"factor": factor, "seed": seed}
    small, large = Study.load(tmp_path).points
    assert (small.labels, large.labels) == ({"factor": "small"}, {"factor": "large"})
    names = ("task_arithmetic", "scale")
    averages = [
        [average_of(point.rows(names[0], name)).estimate for name in names]
        for point in (small, large)
    ]
    assert averages[0][0] == averages[1][0] and averages[0][1] != averages[1][1]
    (row,) = large.rows("task_arithmetic", "scale")
    assert row.gain == pytest.approx(averages[1][1] - averages[1][0])


def test_the_log_says_beforehand_how_much_there_is_to_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "fusion_bench_featcal.lab.compare"):
        study(tmp_path).run(model_pool())
    said = [r.getMessage() for r in caplog.records if r.name.startswith("fusion_bench_featcal.lab")]
    # base, experts, the merger and its scaled model, at two points with two seeds each
    size = "factors: points: 2, seeds: 2, cells: 16; finished cells"
    (first,) = (number for number, line in enumerate(said) if line.startswith(size))
    # base, experts and the merger with each seed, before four scaled models
    assert next(line for line in said[first:] if line.startswith("cell")) == "cell 1 of 4: base"


def test_a_finished_study_runs_nothing_again(tmp_path: Path) -> None:
    study(tmp_path).run(model_pool())
    before = (tmp_path / "lines.csv").read_text()
    again = study(tmp_path)
    again.run(model_pool())
    assert again._program.taskpool.evaluated == 0
    assert (tmp_path / "lines.csv").read_text() == before


def test_a_study_goes_on_with_new_points(tmp_path: Path) -> None:
    study(tmp_path, seeds=[1]).run(model_pool())
    more = study(tmp_path)
    more.run(model_pool())
    # of seed 2: the merged model, and two scaled ones
    assert more._program.taskpool.evaluated == 3


def test_a_failing_cell_is_named_and_stops_no_other(tmp_path: Path) -> None:
    repaired = tmp_path / "repaired"
    methods = {**KEYS["post_merging_methods"], "bad": method(Failing, until=str(repaired))}
    broken = study(tmp_path, post_merging_methods=methods)
    with pytest.raises(
        CalibrationError, match=r"4 cells .* failed; .*factor = small: .*seed 1.*flux"
    ):
        broken.run(model_pool())
    found = Study.load(tmp_path)
    for point in found.points:
        assert point.rows("task_arithmetic", "scale") and not point.rows("task_arithmetic", "bad")
    assert len(found.failed) == 4
    page = (tmp_path / "report.md").read_text()
    assert "factor = small: task_arithmetic, bad failed (seed 1): the flux ran dry" in page
    repaired.touch()
    study(tmp_path, post_merging_methods=methods).run(model_pool())
    assert not Study.load(tmp_path).failed


def test_one_seed_has_no_interval_over_seeds(tmp_path: Path) -> None:
    study(tmp_path, seeds=[1]).run(model_pool())
    for point in Study.load(tmp_path).points:
        assert average_of(point.rows("task_arithmetic", "scale")).over == ""
    assert "±" not in (tmp_path / "report.md").read_text()


def test_labels_of_over_are_averaged(tmp_path: Path) -> None:
    study(tmp_path, over=["factor"]).run(model_pool())
    (point,) = Study.load(tmp_path).points
    rows = point.rows("task_arithmetic", "scale")
    values = [row.accuracy["average"] for row in rows]
    average = average_of(rows)
    mean, half = average.estimate, average.half
    assert (
        average.over == "values of a label"
        and point.labels == {}
        and mean == pytest.approx(sum(values) / 2)
    )
    # Student's t for two values: 12.706 times their distance over two.
    assert half == pytest.approx(12.706 * abs(values[0] - values[1]) / 2, rel=1e-3)
    assert f"{100 * mean:.1f} ± {100 * half:.1f}" in (tmp_path / "report.md").read_text()


def test_rows_of_one_point_are_compared_with_the_row_that_they_change(tmp_path: Path) -> None:
    methods = {
        "whole": method(Scale, factor=1.0, seed="${method.seed}"),
        "half": method(Scale, factor=-3.0, seed="${method.seed}"),
    }
    keys = {"axes": None, "post_merging_methods": methods, "against": {"whole": ["half"]}}
    study(tmp_path, **keys).run(model_pool())
    ((title, grid),) = Study.load(tmp_path).grids()
    assert title == "over task_arithmetic"
    cells = dict(zip(grid.columns, dict(grid.lines)["half"], strict=True))
    (point,) = Study.load(tmp_path).points
    whole, half = (point.rows("task_arithmetic", name)[0] for name in ("whole", "half"))
    difference = 100 * (half.accuracy["average"] - whole.accuracy["average"])
    assert cells["against"] == "whole" and cells["points"] == f"{difference:+.1f}"
    assert dict(zip(grid.columns, dict(grid.lines)["whole"], strict=True))["points"] == "-"
    meanings = [line.partition(":")[0] for line in Study.load(tmp_path).sentences()]
    assert "points" in meanings and not {"normalised", "recovered gap"} & {*meanings}
    (figure,) = Study.load(tmp_path).figures().values()
    names = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert {"merged", "whole", "half"} <= {*names}


def test_columns_have_tables_by_point(tmp_path: Path) -> None:
    study(tmp_path, columns=["seconds"]).run(model_pool())
    titles = [title for title, _ in Study.load(tmp_path).grids()]
    assert titles[1:] == ["seconds, over task_arithmetic"]
    assert sum(line.startswith("seconds: ") for line in Study.load(tmp_path).sentences()) == 1


def test_curves_go_along_numeric_axes(tmp_path: Path) -> None:
    study(tmp_path, axes={"steps": [3, 1]}).run(model_pool())
    points = Study.load(tmp_path).points
    curves = curves_of(points, "task_arithmetic")
    assert [*curves["steps"]["scale"]] == [1, 3]
    (row,) = points[1].rows("task_arithmetic", "scale")
    assert curves["steps"]["scale"][1].estimate == pytest.approx(100 * row.accuracy["average"])
    assert [*Study.load(tmp_path).figures()] == ["factors_task_arithmetic"]


def test_the_verb_report_reads_the_folder_of_a_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study(tmp_path / "study").run(model_pool())
    folder, out = tmp_path / "study", tmp_path / "out"
    words = ["report", str(folder), "--out", str(out), "--figures", str(tmp_path / "drawn")]
    assert main(words) == 0
    assert "+ scale" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "drawn").iterdir()] == ["factors_task_arithmetic.svg"]
    for name in ("report.md", "lines.csv"):
        assert (out / name).read_text() == (folder / name).read_text()
    assert main(["report", str(out)]) == 0  # it names the runs
    assert main(["report", str(folder / "points" / "factor-small_seed-1")]) == 0
    assert main(["report", str(folder), "--against", "scale"]) == 2
    assert "is a study: report it by itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "has schema 99"),
        ({"runs": 1}, "runs must be a list"),
        ({"runs": ["nowhere"]}, "nowhere"),
    ],
)
def test_a_damaged_study_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    study(tmp_path, seeds=[1]).run(model_pool())
    content = json.loads((tmp_path / "report.json").read_text())
    content = {key: value for key, value in content.items() if key != "digest"} | change
    (tmp_path / "report.json").write_text(json.dumps(content))
    with pytest.raises(ReportError, match=message):
        Study.load(tmp_path).grids()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"axes": {"factr": [1]}}, "method.axes.factr is no axis"),
        ({"post_merging": ["scal"]}, r"'scal' is unknown.*nearest: 'scale'"),
        ({"axes": {"f": {"x": {SCALE.replace("factor", "fctor"): 1}}}}, r"fctor.*at the point f=x"),
        ({"over": ["subst"]}, "method.over: 'subst' is no label of this study's points: factor"),
        ({"backend_options": {"address": "x"}}, "backend_options needs method.backend=dask or ray"),
    ],
)
def test_bad_input_leaves_nothing_behind(keys: dict, message: str, tmp_path: Path) -> None:
    place = tmp_path / "results"
    with pytest.raises((ValueError, CalibrationError), match=message) as caught:
        study(place, **keys).run(model_pool())
    assert "\n" not in str(caught.value)
    assert not place.exists()


def test_unknown_keys_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"method.axs is no setting of x.*axes"):
        StudyAlgorithm(study="x", axs={})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"over": "subset"}, "method.over must be a list of names, got 'subset'"),
        ({"against": "featcal"}, r"method.against must be a mapping of a row .* got 'featcal'"),
        (
            {"against": {"featcal": "x"}},
            "must be a mapping .* got {'featcal': 'x'}",
        ),
    ],
)
def test_keys_of_the_report_are_checked_before_anything_runs(keys: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StudyAlgorithm(study="x", **keys)


def test_a_study_needs_a_task_pool(tmp_path: Path) -> None:
    without = study(tmp_path)
    without._program.taskpool = None
    with pytest.raises(CalibrationError, match="study needs a task pool"):
        without.run(model_pool())
