"""Comparisons from end to end: reports, failures, interruptions and the command."""

import csv
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from comparison_parts import (
    MERGERS,
    TASKS,
    Failing,
    Head,
    Scale,
    SignTaskPool,
    comparison,
    linear,
    method,
    model_pool,
)
from fusion_bench import BaseModelPool
from lightning.fabric.loggers import CSVLogger
from reports import content_of, featcal
from tiny_models import add_up
from torch import nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.results import Report

DOUBLE = {"double": method(Scale)}
METHODS = {
    **DOUBLE,
    "a+b": method(Scale, factor=-1.0),
    "head": method(Head),
}
LOSSES = {"left": 0.25, "right": float("nan")}
FAILED = "the flux ran dry"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A comparison with a logger, losses, and a method that fails. Its screen and folders."""
    folder, screen = tmp_path_factory.mktemp("compared"), io.StringIO()
    failing = method(Failing, until=str(folder / "never"))
    algorithm = comparison(folder, post_merging_methods={**METHODS, "failing": failing})
    logger = CSVLogger(root_dir=folder, name="logs", version="")
    algorithm.fabric = lightning.Fabric(accelerator="cpu", devices=1, loggers=logger)
    pool = algorithm._program.taskpool
    evaluate = pool.evaluate
    pool.evaluate = lambda model: {
        task: {**scores, "loss": LOSSES[task]} for task, scores in evaluate(model).items()
    }
    with redirect_stdout(screen), pytest.raises(CalibrationError) as caught:
        algorithm.run(model_pool())
    logs = folder / "logs"
    report = Report.load(logs / "task_arithmetic")
    return SimpleNamespace(
        folder=logs, report=report, error=str(caught.value), screen=screen.getvalue()
    )


def test_every_merger_has_a_report(compared: Any) -> None:
    for merger in MERGERS:
        report = Report.load(compared.folder / merger)
        assert set(report.rows) == {"base", "experts", merger, *METHODS}
        assert report.upstream == merger and set(report.items) == set(report.rows)
        assert report.rows["experts"]["average"] == 1
        assert report.seeds.items() >= {"comparison": 42, "double": 42}.items()
        assert report.samples["double"]["left"] == {"samples": 5, "split": "train"}
        curve = {"name": "head", "task": "left", "losses": [[0, 2.0], [20, 1.0]]}
        curves = (compared.folder / merger / "training_curves.jsonl").read_text()
        assert json.loads(curves) == curve
    assert content_of(compared.folder)["runs"] == list(MERGERS)
    assert "+ double" in compared.screen
    assert compared.report.loss["double"] == {"left": 0.25}  # that of `right` is not finite
    with (compared.folder / "metrics.csv").open() as file:  # of the logger
        (line,) = csv.DictReader(file)
    average = compared.report.rows["a+b"]["average"]
    assert float(line["task_arithmetic/a_b/average"]) == pytest.approx(average)


def test_rows_are_those_of_the_methods_models(compared: Any) -> None:
    base, experts = linear(0), {task: linear(n) for n, task in enumerate(TASKS, 1)}
    for merger, share in (("simple_average", 0.5), ("task_arithmetic", 0.3)):
        rows = Report.load(compared.folder / merger).rows
        for row, factor in ((merger, 1), ("double", 2), ("a+b", -1), ("head", 1)):
            model = add_up(base, experts, share)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(factor)
            expected = SignTaskPool().evaluate(model)
            assert {t: rows[row][t] for t in TASKS} == {t: expected[t]["accuracy"] for t in TASKS}


def test_costs_name_what_a_method_adds(compared: Any) -> None:
    cost = compared.report.cost
    added = ("modules_added", "parameters_added", "task_id_at_inference")
    assert [cost["head"][name] for name in added] == [1, 6, "yes"]
    assert [cost["double"][name] for name in added] == [0, 0, "no"]
    total = cost["task_arithmetic"]["seconds"] + cost["double"]["seconds"]
    assert cost["double"]["seconds_with_merger"] == pytest.approx(total)


def test_a_failed_cell_is_reported_beside_the_others(compared: Any) -> None:
    assert "2 of 12 cells failed" in compared.error and f"failing: {FAILED}" in compared.error
    assert [note.row for note in compared.report.notes if note.kind == "failed"] == ["failing"]
    cell = {"name": "failing", "reason": FAILED, "seed": 42}
    assert content_of(compared.folder)["failed"] == [{"upstream": m, **cell} for m in MERGERS]
    assert f"failed: {FAILED}" in (compared.folder / "report.csv").read_text()
    assert FAILED in (compared.folder / "report.md").read_text() and "+ failing" in compared.screen


def test_a_report_is_rebuilt_from_the_files(compared: Any, tmp_path: Path) -> None:
    """A folder left from before has no part in it."""
    folder, out = compared.folder, tmp_path / "again"
    Report.load(folder / "task_arithmetic").write(folder / "from_before")
    tables = featcal("report", folder, "--out", out).out.removesuffix(f"written: {out}\n")
    assert "failing" in tables and tables in compared.screen
    for name in ("report.md", "report.csv"):
        assert (out / name).read_text() == (folder / name).read_text()
    first, again = content_of(folder), content_of(out)
    assert again.pop("runs") == [str(folder / name) for name in first.pop("runs")]
    assert again == first


def test_a_merger_that_fails_takes_only_its_cells_with_it(tmp_path: Path) -> None:
    mergers = {"broken": MERGERS["task_arithmetic"] | {"scaling_factor": "much"}, **MERGERS}
    choices = {"upstreams": ["broken", "simple_average"], "post_merging_methods": DOUBLE}
    with pytest.raises(CalibrationError, match=r"2 of 6 .*broken, double: not merged: "):
        comparison(tmp_path, upstream_mergers=mergers, **choices).run(model_pool())
    assert (tmp_path / "results" / "simple_average" / "report.json").is_file()
    assert not (tmp_path / "results" / "broken").exists()


def tied(shift: float) -> nn.Module:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).bfloat16()
    model[1].weight = model[0].weight
    nn.init.constant_(model[0].bias, shift)
    return model


def test_methods_get_the_merged_model_bit_by_bit_with_its_ties(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, received = {name: tied(n) for n, name in enumerate(("_pretrained_", *TASKS))}, []
    keep = lambda _, model, inputs: received.append(model) or model  # noqa: E731
    monkeypatch.setattr(Scale, "post_merge", keep)
    choices: Any = {"upstreams": ["task_arithmetic"], "post_merging_methods": DOUBLE}
    comparison(tmp_path, **choices).run(BaseModelPool(dict(models)))
    (merged,) = received
    expected = add_up(models.pop("_pretrained_"), models, 0.3).state_dict()
    torch.testing.assert_close(dict(merged.state_dict()), dict(expected))
    assert merged[1].weight is merged[0].weight
