"""The literal command on the bundled suite."""

import csv
import json
from pathlib import Path

import pytest
from cli_runs import fusion_bench

from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.study import Study

WORDS = [
    "method=study/samples", "modelpool=clip-vit-mini_alphabets2", "method.seeds=[42]",
    "method.post_merging=[ridge_surgery]", "method.references=[]", "path.log_dir=log",
]  # fmt: skip


@pytest.mark.slow
def test_command_runs_two_points_and_shares_cells_with_compare(tmp_path: Path) -> None:
    done = fusion_bench([*WORDS, "method.axes.samples_per_task=[4,8]"], tmp_path)
    assert "+ ridge_surgery" in done.stdout and "n = 8" in done.stdout
    study = Study.load(tmp_path / "log")
    assert [point["labels"] for point in study.points] == [
        {"samples_per_task": 4},
        {"samples_per_task": 8},
    ]
    assert {path.name for path in (tmp_path / "log").glob("samples.*")} == {
        "samples.png",
        "samples.svg",
    }
    with (tmp_path / "log" / "table.csv").open() as file:
        samples = {line["samples_per_task"] for line in csv.DictReader(file)}
    assert samples == {"4", "8"}
    kept = tmp_path / "outputs" / "comparison" / "clip-vit-mini_alphabets2"
    assert len(list(kept.glob("cells/*/result.json"))) == 3  # merged once, and two corrections
    compare = [
        "method=compare", "modelpool=clip-vit-mini_alphabets2", "method.samples_per_task=8",
        "method.upstreams=[task_arithmetic]", "method.alone=[]", "method.references=[]",
        "method.post_merging=[ridge_surgery]", "path.log_dir=compare",
    ]  # fmt: skip
    fusion_bench(compare, tmp_path)
    assert len(list(kept.glob("cells/*/result.json"))) == 3  # all of them were finished
    report = Report.load(tmp_path / "compare" / "task_arithmetic")
    rows = {row["name"]: row for row in study.points[1]["rows"]}
    assert rows["ridge_surgery"]["accuracy"] == pytest.approx(report.rows["ridge_surgery"])


@pytest.mark.slow
def test_command_merges_subsets_of_tasks_and_measures_cells_apart(tmp_path: Path) -> None:
    words = [
        "method=study/tasks", "modelpool=clip-vit-mini_TA6", "method.axes.tasks=[2]",
        "method.subsets=1", "method.post_merging=[none]", "path.log_dir=log",
    ]  # fmt: skip
    fusion_bench(words, tmp_path)
    (point,) = json.loads((tmp_path / "log" / "study.json").read_text())["points"]
    tasks = set(point["labels"]["subset"].split("+"))
    assert len(tasks) == 2
    for row in point["rows"]:
        assert set(row["accuracy"]) == tasks | {"average"}
    cost = ["method=study/cost", *WORDS[1:], "method.axes.samples_per_task=[4]"]
    fusion_bench(cost, tmp_path)
    (point,) = json.loads((tmp_path / "log" / "study.json").read_text())["points"]
    (row,) = [row for row in point["rows"] if row["name"] == "ridge_surgery"]
    assert row["cost"]["seconds"] > 0 and row["cost"]["peak_rss_bytes"] > 0
    assert row["samples"] == "4 train"


@pytest.mark.slow
def test_command_refuses_bad_points_in_one_line(tmp_path: Path) -> None:
    words = [*WORDS, "method.axes.samples_per_task=[0]"]
    done = fusion_bench(words, tmp_path, check=False)
    assert done.returncode != 0
    said = " ".join((done.stdout + done.stderr).split())
    assert "method.axes.samples_per_task: method.samples_per_task must be an integer >= 1" in said
    assert not (tmp_path / "outputs" / "comparison").exists()
