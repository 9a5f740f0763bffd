"""A study from its points to its files, on one-layer models."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from comparison_parts import MERGERS, Failing, FakeProgram, Scale, SignTaskPool, method, model_pool
from omegaconf import OmegaConf

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.json_files import json_text
from fusion_bench_featcal.results import Report, ReportError, study_figures
from fusion_bench_featcal.results.study import Study
from fusion_bench_featcal.studies import StudyAlgorithm

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
    with (tmp_path / "table.csv").open() as file:
        lines = list(csv.DictReader(file))
    heads = ["study", "suite", "factor", "merger", "row", "task", "seed", "metric", "value"]
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
    found = Study.load(tmp_path)
    small, large = ({r["name"]: r for r in p["rows"]} for p in found.points)
    assert small["task_arithmetic"]["accuracy"] == large["task_arithmetic"]["accuracy"]
    assert small["scale"]["accuracy"] != large["scale"]["accuracy"]
    gain = large["scale"]["difference"]
    merged, row = large["task_arithmetic"]["accuracy"], large["scale"]["accuracy"]
    assert gain["estimate"] == pytest.approx(row["average"] - merged["average"])
    assert gain["low"] <= gain["estimate"] <= gain["high"]


def test_the_log_says_beforehand_how_much_there_is_to_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "fusion_bench_featcal.studies.run"):
        study(tmp_path).run(model_pool())
    # base, experts, the merger and its scaled model, at two points with two seeds each
    own = [r.getMessage() for r in caplog.records if r.name == "fusion_bench_featcal.studies.run"]
    assert own[0].startswith("factors: points: 2, seeds: 2, cells: 16; finished cells")
    assert own[1].startswith("point ")


def test_a_finished_study_runs_nothing_again(tmp_path: Path) -> None:
    study(tmp_path).run(model_pool())
    before = Study.load(tmp_path)
    again = study(tmp_path)
    again.run(model_pool())
    assert again._program.taskpool.evaluated == 0
    assert replace(Study.load(tmp_path), minutes=before.minutes) == before


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
    with pytest.raises(CalibrationError, match=r"4 cells .* failed; .*factor=small seed=1.*flux"):
        broken.run(model_pool())
    found = Study.load(tmp_path)
    assert all({"scale", "task_arithmetic"} <= {r["name"] for r in p["rows"]} for p in found.points)
    assert "the flux ran dry" in (tmp_path / "study.md").read_text()
    repaired.touch()
    study(tmp_path, post_merging_methods=methods).run(model_pool())
    assert not any(point["failed"] for point in Study.load(tmp_path).points)


def test_one_seed_has_no_interval_over_seeds_and_says_so(tmp_path: Path) -> None:
    study(tmp_path, seeds=[1]).run(model_pool())
    found = Study.load(tmp_path)
    assert {row["half_width"] for point in found.points for row in point["rows"]} == {0.0}
    assert any("one seed (1): intervals are over test items" in note for note in found.notes)


def test_report_reads_the_studys_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study(tmp_path / "study").run(model_pool())
    folder, out = tmp_path / "study", tmp_path / "out"
    page = (folder / "study.md").read_text()
    assert main(["report", str(folder), "--out", str(out)]) == 0
    assert "+ scale" in capsys.readouterr().out
    assert (out / "study.md").read_text() == page
    assert main(["report", str(folder / "points" / "factor-small_seed-1")]) == 0
    assert main(["report", str(folder), "--against", "scale"]) == 2
    assert "is a study: report it by itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "run"}, 'is not a study .no "kind": "study"'),
        ({"schema": 99}, "has schema 99"),
        ({"points": [{"labels": {}, "rows": [{}], "failed": []}]}, r"points.*no upstream"),
    ],
)
def test_a_damaged_study_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_figures, "draw_study", lambda *_: [])
    study(tmp_path, seeds=[1]).run(model_pool())
    content = json.loads((tmp_path / "study.json").read_text())
    content = {key: value for key, value in content.items() if key != "digest"} | change
    (tmp_path / "study.json").write_text(json_text(content))
    with pytest.raises(ReportError, match=message):
        Study.load(tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"axes": {"factr": [1]}}, "method.axes.factr is no axis"),
        ({"post_merging": ["scal"]}, r"'scal' is unknown.*nearest is 'scale'"),
        ({"axes": {"f": {"x": {SCALE.replace("factor", "fctor"): 1}}}}, r"fctor.*at the point f=x"),
        ({"over": ["subst"]}, "method.over: 'subst' is no label of this study's points: factor"),
        ({"process_per_cell": True}, "process_per_cell=true starts the command again"),
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
        ({"against": "featcal"}, r"method.against must map a row .* got 'featcal'"),
        ({"against": {"featcal": "x"}}, "method.against.featcal must be a list of names, got 'x'"),
    ],
)
def test_keys_of_the_report_are_checked_before_anything_runs(keys: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StudyAlgorithm(study="x", **keys)


def test_tuples_are_lists_of_names() -> None:
    study = StudyAlgorithm(study="x", over=("subset",), against={"featcal": ("featcal:plus",)})
    assert study.over == ["subset"]


def test_a_study_needs_a_task_pool(tmp_path: Path) -> None:
    without = study(tmp_path)
    without._program.taskpool = None
    with pytest.raises(CalibrationError, match="study needs a task pool"):
        without.run(model_pool())
