"""Comparisons from end to end: reports, failures, interruptions and the command."""

import io
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
from reports import featcal
from tiny_models import add_up
from torch import nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.results import read_run

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
    run = read_run(folder / "logs")
    rows = {(row.merger, row.name): row for row in run.rows}
    return SimpleNamespace(
        folder=folder, run=run, rows=rows, error=str(caught.value), screen=screen.getvalue()
    )


def test_all_rows_are_one_run(compared: Any) -> None:
    references = [("", "base"), ("", "experts")]
    expected = [(merger, row) for merger in MERGERS for row in (merger, *METHODS)]
    assert list(compared.rows) == references + expected
    assert all(row.correct for row in compared.rows.values())
    assert compared.rows["", "experts"].accuracy["average"] == 1
    row = compared.rows["task_arithmetic", "double"]
    assert row.seed == 42 and row.samples["left"] == {"samples": 5, "split": "train"}
    assert row.conditions["scaling_factor"] == 0.3 and row.settings["factor"] == 2.0
    assert row.scores["loss"] == {"left": 0.25}  # that of `right` is not finite
    curves = [line for line in compared.run.lines if line["metric"] == "training_loss"]
    values = {(line["merger"], line["task"], line["block"]): line["value"] for line in curves}
    assert values["task_arithmetic", "left", "step 20"] == 1.0 and len(values) == 4
    assert "+ double" in compared.screen


def test_rows_are_those_of_the_methods_models(compared: Any) -> None:
    base, experts = linear(0), {task: linear(n) for n, task in enumerate(TASKS, 1)}
    for merger, share in (("simple_average", 0.5), ("task_arithmetic", 0.3)):
        for row, factor in ((merger, 1), ("double", 2), ("a+b", -1), ("head", 1)):
            model = add_up(base, experts, share)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(factor)
            expected = SignTaskPool().evaluate(model)
            rows = compared.rows[merger, row].scores["accuracy"]
            assert rows == {t: expected[t]["accuracy"] for t in TASKS}


def test_costs_name_what_a_method_adds(compared: Any) -> None:
    merger, head, double = (compared.rows["task_arithmetic", name].cost
                            for name in ("task_arithmetic", "head", "double"))  # fmt: skip
    added = ("modules_added", "parameters_added", "task_id_at_inference")
    assert [head[name] for name in added] == [1, 6, 1]
    assert [double[name] for name in added] == [0, 0, 0]
    total = merger["seconds"] + double["seconds"]
    assert double["seconds_with_merger"] == pytest.approx(total)


def test_a_failed_cell_is_named_beside_the_others(compared: Any) -> None:
    assert "2 of 12 cells failed" in compared.error and f"failing: {FAILED}" in compared.error
    failed = [(note.merger, note.row) for note in compared.run.notes if note.kind == "failed"]
    assert failed == [(merger, "failing") for merger in MERGERS]
    assert f"task_arithmetic, failing failed: {FAILED}" in " ".join(compared.screen.split())


def test_the_table_is_read_again_from_the_files(compared: Any) -> None:
    table = featcal("report", compared.folder / "logs").out
    assert "+ double" in table and table in compared.screen
    of_cells = featcal("report", compared.folder / "results").out
    assert table.startswith(of_cells.partition("gain: ")[0])


def test_a_merger_that_fails_takes_only_its_cells_with_it(tmp_path: Path) -> None:
    mergers = {"broken": MERGERS["task_arithmetic"] | {"scaling_factor": "much"}, **MERGERS}
    choices = {"upstreams": ["broken", "simple_average"], "post_merging_methods": DOUBLE}
    with pytest.raises(CalibrationError, match=r"2 of 6 .*broken, double: not merged: "):
        comparison(tmp_path, upstream_mergers=mergers, **choices).run(model_pool())
    run = read_run(tmp_path / "results" / "table")
    assert {row.merger for row in run.rows} == {"", "simple_average"}


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
