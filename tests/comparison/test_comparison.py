"""A comparison from end to end: reports, failures, and what is not run again."""

import csv
import importlib
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from comparison_parts import (
    MERGERS,
    BrokenMerger,
    Failing,
    Scale,
    Waiting,
    WithHead,
    comparison,
    method,
    model_pool,
)
from lightning.fabric.loggers import CSVLogger

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.lab.report.find import find
from fusion_bench_featcal.results import Report, ReportError

DOUBLE = {"double": method(Scale)}
ONE: dict[str, Any] = {"upstreams": ["task_arithmetic"]}


def results_of(folder: Path) -> dict[str, int]:
    """Finished cells, with the time of their last change."""
    files = sorted((folder / "results" / "cells").glob("*/result.json"))
    return {file.parent.name: file.stat().st_mtime_ns for file in files}


def evaluations(algorithm: Any) -> int:
    return algorithm._program.taskpool.evaluated


def test_every_merger_has_a_report_and_all_are_side_by_side(tmp_path: Path, capsys) -> None:
    methods = {**DOUBLE, "head": method(WithHead)}
    assert comparison(tmp_path, post_merging_methods=methods).run(model_pool()) is None
    folder = tmp_path / "results"
    report = Report.load(folder / "task_arithmetic")
    assert list(report.rows) == ["base", "experts", "task_arithmetic", "double", "head"]
    assert report.upstream == "task_arithmetic"
    assert report.rows["experts"]["average"] == 1
    assert report.seeds == {"comparison": 42, "double": 42, "head": 42}
    assert report.samples["double"]["left"] == {"samples": 5, "split": "train"}
    assert set(report.items) == set(report.rows)
    assert find([folder]).runs == [folder / "simple_average", folder / "task_arithmetic"]
    content = json.loads((folder / "report.json").read_text())
    rows = {(row["upstream"], row["name"]): row for row in content["rows"]}
    head = rows["simple_average", "head"]
    assert head["cost"]["parameters_added"] == 6
    assert head["cost"]["modules_added"] == 1
    assert head["cost"]["task_id_at_inference"] == "yes"
    assert rows["simple_average", "double"]["cost"]["task_id_at_inference"] == "no"
    merging = rows["simple_average", "simple_average"]["cost"]
    costs = rows["simple_average", "double"]["cost"]
    assert costs["seconds_with_merger"] == pytest.approx(merging["seconds"] + costs["seconds"])
    assert "seconds_with_merger" not in merging
    printed = capsys.readouterr().out
    assert "+ double" in printed


def test_models_are_what_the_method_made(tmp_path: Path) -> None:
    """Doubling both layers' weights and shifts of a model without shifts changes no answer."""
    pool: Any = model_pool()
    for model in pool._models.values():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.zeros_(parameter)
    comparison(tmp_path, **ONE, post_merging_methods=DOUBLE).run(pool)
    rows = Report.load(tmp_path / "results" / "task_arithmetic").rows
    assert rows["double"] == rows["task_arithmetic"]


def test_repeated_comparison_runs_what_changed(tmp_path: Path) -> None:
    methods = {**DOUBLE, "other": method(Scale, factor=3)}
    pool: Any = model_pool()

    def run(**choices: Any) -> int:
        algorithm = comparison(tmp_path, **ONE, post_merging_methods=methods, **choices)
        algorithm.run(pool)
        return evaluations(algorithm)

    assert run() == 1 + 2 + 3  # base, experts, merger and cells
    before = results_of(tmp_path)
    assert run() == 0
    assert results_of(tmp_path) == before
    methods["other"] = method(Scale, factor=4)
    assert run() == 1
    assert run(seed=7) == 3  # all but the references
    torch.nn.init.zeros_(pool._models["left"][0].bias)
    assert run() == 1 + 2 + 3


def test_changed_source_of_an_own_method_runs_its_cells_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "my_scale.py"

    def run(source: str) -> int:
        file.write_text(
            f"from comparison_parts import Scale\n\n\nclass Mine(Scale):\n    {source}\n"
        )
        monkeypatch.delitem(sys.modules, "my_scale", raising=False)
        importlib.invalidate_caches()
        methods = {**DOUBLE, "mine": {"_target_": "my_scale.Mine"}}
        algorithm = comparison(tmp_path, **ONE, post_merging_methods=methods)
        algorithm.run(model_pool())
        return evaluations(algorithm)

    assert run("x = 1") == 1 + 2 + 3
    assert run("x = 1") == 0
    assert run("x = 2") == 1


def test_damage_in_the_results_runs_only_what_it_hit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choices = {**ONE, "post_merging_methods": DOUBLE}
    comparison(tmp_path, **choices).run(model_pool())
    before = Report.load(tmp_path / "results" / "task_arithmetic").rows
    for pattern, again, upstreams in (
        ("cells/task_arithmetic--double-*/items.npz", 1, 0),
        ("cells/base-*/result.json", 1, 0),
        ("cells/task_arithmetic--double-*/result.json", 1, 1),  # with its merged model, below
    ):
        (file,) = (tmp_path / "results").glob(pattern)
        files = [file, *((tmp_path / "results").glob("upstreams/*/*") if upstreams else ())]
        for place in files:
            content = bytearray(place.read_bytes())
            content[len(content) // 2] ^= 4
            place.write_bytes(content)
        caplog.clear()
        algorithm = comparison(tmp_path, **choices)
        algorithm.run(model_pool())
        assert evaluations(algorithm) == again
        assert caplog.text.count("is damaged and made again") == 1 + upstreams
        assert Report.load(tmp_path / "results" / "task_arithmetic").rows == before


@pytest.mark.parametrize(
    "place", ["task_arithmetic", "report.json/x", "task_arithmetic/report.md/x"]
)
def test_what_is_in_the_way_of_reports_is_told_before_any_work(tmp_path: Path, place: str) -> None:
    file = tmp_path / "results" / place
    file.parent.mkdir(parents=True)
    file.touch()
    algorithm = comparison(tmp_path, **ONE, post_merging_methods=DOUBLE)
    with pytest.raises(ReportError, match=rf"{place.removesuffix('/x')} is in the way.*remove it"):
        algorithm.run(model_pool())
    assert evaluations(algorithm) == 0


def test_every_row_has_its_loss(tmp_path: Path) -> None:
    algorithm: Any = comparison(tmp_path, **ONE, post_merging_methods=DOUBLE)
    pool = algorithm._program.taskpool
    evaluate = pool.evaluate
    losses = {"left": 0.25, "right": float("nan")}
    pool.evaluate = lambda model, *args, **kwargs: {
        task: {**scores, "loss": losses[task]} for task, scores in evaluate(model).items()
    }
    algorithm.run(model_pool())
    results = [
        json.loads(file.read_text())
        for file in (tmp_path / "results" / "cells").glob("task_arithmetic*/result.json")
    ]
    assert [result["loss"] for result in results] == [{"left": 0.25}] * 2
    assert all("the loss of right is nan" in result["notes"] for result in results)


def test_failed_cell_is_reported_and_the_rest_goes_on(tmp_path: Path, capsys) -> None:
    methods = {"failing": method(Failing, until=str(tmp_path / "fixed")), **DOUBLE}
    choices = {"post_merging_methods": methods, **ONE}
    with pytest.raises(CalibrationError, match=r"1 of 5 cells failed.*failing: the flux ran dry"):
        comparison(tmp_path, **choices).run(model_pool())
    folder = tmp_path / "results"
    report = Report.load(folder / "task_arithmetic")
    assert list(report.rows) == ["base", "experts", "task_arithmetic", "double"]
    assert [note.row for note in report.notes if note.kind == "failed"] == ["failing"]
    content = json.loads((folder / "report.json").read_text())
    assert content["failed"] == [
        {
            "upstream": "task_arithmetic",
            "name": "failing",
            "reason": "the flux ran dry",
            "seed": 42,
            "point": "",
        }
    ]
    assert "failed: the flux ran dry" in (folder / "report.csv").read_text()
    assert "the flux ran dry" in (folder / "report.md").read_text()
    assert "+ failing" in capsys.readouterr().out
    (tmp_path / "fixed").touch()
    again = comparison(tmp_path, **choices)
    again.run(model_pool())
    assert evaluations(again) == 1
    assert "failing" in Report.load(folder / "task_arithmetic").rows


def test_merger_that_fails_takes_only_its_own_cells_with_it(tmp_path: Path) -> None:
    mergers = {"broken": {"_target_": "comparison_parts.BrokenMerger"}, **MERGERS}
    assert BrokenMerger.__name__ in mergers["broken"]["_target_"]
    algorithm = comparison(tmp_path, upstream_mergers=mergers, post_merging_methods=DOUBLE)
    with pytest.raises(CalibrationError, match=r"2 of 8 .*broken, none: experts do not agree"):
        algorithm.run(model_pool())
    assert (tmp_path / "results" / "simple_average" / "report.json").is_file()
    assert not (tmp_path / "results" / "broken").exists()


_KILLED = """
import sys
from pathlib import Path
from comparison_parts import Scale, Waiting, comparison, method, model_pool
folder = Path(sys.argv[1])
methods = {"double": method(Scale), "waiting": method(Waiting, folder=str(folder))}
comparison(folder, post_merging_methods=methods).run(model_pool())
"""


@pytest.mark.slow
def test_killed_comparison_resumes(tmp_path: Path) -> None:
    """Killed without warning in a cell; what was finished is not touched, the rest is made."""
    tests = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join(
        [str(tests / "kit"), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    )
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
    )
    try:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None, "the comparison ended before it could be killed"
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    finished = results_of(tmp_path)
    assert [name.rsplit("-", 1)[0] for name in finished] == [
        "base",
        "experts",
        "simple_average--double",
        "simple_average--none",
        "task_arithmetic--none",
    ]
    assert not (tmp_path / "results" / "report.json").exists()
    (tmp_path / "go_on").touch()
    methods = {**DOUBLE, "waiting": method(Waiting, folder=str(tmp_path))}
    again = comparison(tmp_path, post_merging_methods=methods)
    again.run(model_pool())
    assert evaluations(again) == 3
    assert finished.items() <= results_of(tmp_path).items()
    comparison(tmp_path / "fresh", post_merging_methods=methods, **ONE).run(model_pool())
    resumed = Report.load(tmp_path / "results" / "task_arithmetic")
    assert resumed.rows == Report.load(tmp_path / "fresh" / "results" / "task_arithmetic").rows


def test_report_is_rebuilt_from_what_the_comparison_left(tmp_path: Path, capsys) -> None:
    """Published numbers, costs and failed cells too; a folder left from before has no part."""
    methods = {**DOUBLE, "failing": method(Failing, until=str(tmp_path / "never"))}
    with pytest.raises(CalibrationError, match="2 of 8 cells failed"):
        comparison(tmp_path, post_merging_methods=methods).run(model_pool())
    folder = tmp_path / "results"
    printed = capsys.readouterr().out
    Report.load(folder / "task_arithmetic").write(folder / "from_before")
    assert main(["report", str(folder), "--out", str(tmp_path / "again")]) == 0
    rebuilt = capsys.readouterr().out
    tables = rebuilt.removesuffix(f"written: {tmp_path / 'again'}\n")
    assert "failing" in tables and tables in printed
    for name in ("report.md", "report.csv"):
        assert (tmp_path / "again" / name).read_text() == (folder / name).read_text()
    own, again = (
        json.loads((place / "report.json").read_text()) for place in (folder, tmp_path / "again")
    )
    assert own.pop("runs") == ["simple_average", "task_arithmetic"]
    names = ("simple_average", "task_arithmetic")
    assert again.pop("runs") == [str(folder / name) for name in names]
    assert again == own


def test_several_seeds_are_one_table(tmp_path: Path, capsys) -> None:
    """The cell that failed with one seed stands beside its mean over the others."""
    for seed in (1, 2, 3):
        folder = tmp_path / f"seed{seed}"
        folder.mkdir()
        fixed = folder / "fixed"
        if seed != 2:
            fixed.touch()
        methods = {**DOUBLE, "failing": method(Failing, until=str(fixed))}
        algorithm = comparison(folder, **ONE, post_merging_methods=methods, seed=seed)
        if seed == 2:
            with pytest.raises(CalibrationError):
                algorithm.run(model_pool())
        else:
            algorithm.run(model_pool())
    capsys.readouterr()
    assert main(["report", str(tmp_path), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "means over comparisons with the seeds 1, 2, 3\n" in printed
    assert "task_arithmetic, failing failed (seed 2): the flux ran dry" in printed
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["seeds"] == [1, 2, 3]
    runs = {row["name"]: row["runs"] for row in content["rows"]}
    assert runs == {"base": 3, "experts": 3, "task_arithmetic": 3, "double": 3, "failing": 2}
    (double,) = (row for row in content["rows"] if row["name"] == "double")
    costs = [
        Report.load(tmp_path / f"seed{seed}" / "results" / "task_arithmetic").cost["double"]
        for seed in (1, 2, 3)
    ]
    seconds = [cost["seconds"] for cost in costs]
    assert double["cost"]["seconds"] == pytest.approx(statistics.fmean(seconds))
    assert double["spread"]["seconds"] == pytest.approx(statistics.stdev(seconds))
    # The report that now stands above the comparisons is not read as one of them.
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == printed.replace(f"written: {tmp_path}\n", "")


def test_loggers_get_the_same_numbers(tmp_path: Path) -> None:
    algorithm = comparison(tmp_path, **ONE, post_merging_methods={**DOUBLE, "a+b": method(Scale)})
    logger = CSVLogger(root_dir=tmp_path, name="logs", version="")
    algorithm.fabric = lightning.Fabric(accelerator="cpu", devices=1, loggers=logger)
    algorithm.run(model_pool())
    report = Report.load(tmp_path / "logs" / "task_arithmetic")
    text = (tmp_path / "logs" / "metrics.csv").read_text()
    (line,) = csv.DictReader(io.StringIO(text))
    logged = {name: float(value) for name, value in line.items()}
    for name, expected in {
        "base/accuracy/left": report.rows["base"]["left"],
        "task_arithmetic/average": report.rows["task_arithmetic"]["average"],
        "task_arithmetic/double/accuracy/right": report.rows["double"]["right"],
        "task_arithmetic/a_b/average": report.rows["a+b"]["average"],
    }.items():
        assert logged[name] == pytest.approx(expected), name
