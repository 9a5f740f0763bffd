"""`method=compare`: its rows, its files, failing cells, and choices that are refused."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
from comparison_parts import (
    MERGERS,
    TASKS,
    Failing,
    Head,
    Scale,
    ScaleAlgorithm,
    SignTaskPool,
    comparison,
    linear,
    method,
    model_pool,
    program_of,
)
from lightning.fabric.loggers import CSVLogger
from reports import featcal
from tiny_models import add_up
from tiny_pools import ARITHMETIC, AVERAGE, refusing

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab.compare.grid import cells_of
from fusion_bench_featcal.results import read_run

DOUBLE = {"double": method(Scale)}
FACTORS = {"double": 2.0, "a+b": -1.0, "head": 1.0}  # of a method's model, to the merged one
ALL = {**DOUBLE, "a+b": method(Scale, factor=-1.0), "head": method(Head)}
FAILED = "the flux ran dry"


def logging_to(folder: Path) -> Any:
    logger = CSVLogger(root_dir=folder, name="logs", version="")
    return lightning.Fabric(accelerator="cpu", devices=1, loggers=logger)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A comparison with a logger and a method that fails. Its screen and folders."""
    folder, screen = tmp_path_factory.mktemp("compared"), io.StringIO()
    failing = method(Failing, until=str(folder / "never"))
    algorithm = comparison(folder, post_merging_methods={**ALL, "failing": failing})
    algorithm.fabric = logging_to(folder)
    with redirect_stdout(screen), pytest.raises(CalibrationError) as caught:
        algorithm.run(model_pool())
    run = read_run(folder / "logs")
    rows = {(row.merger, row.name): row for row in run.rows}
    return SimpleNamespace(
        folder=folder, run=run, rows=rows, error=str(caught.value), screen=screen.getvalue()
    )


def test_rows_are_those_of_the_methods_models(compared: Any) -> None:
    references = [("", "base"), ("", "experts")]
    expected = [(merger, row) for merger in MERGERS for row in (merger, *ALL)]
    assert list(compared.rows) == references + expected
    assert compared.rows["", "experts"].accuracy["average"] == 1
    base, experts = linear(0), {task: linear(n) for n, task in enumerate(TASKS, 1)}
    for merger, share in (("simple_average", 0.5), ("task_arithmetic", 0.3)):
        for row, factor in {merger: 1.0, **FACTORS}.items():
            model = add_up(base, experts, share)
            for parameter in model.parameters():
                parameter.data.mul_(factor)
            scores = {t: s["accuracy"] for t, s in SignTaskPool().evaluate(model).items()}
            assert compared.rows[merger, row].scores["accuracy"] == scores
            assert compared.rows[merger, row].correct


def test_a_row_has_settings_samples_curves_and_costs(compared: Any) -> None:
    merger, head, row = (
        compared.rows["task_arithmetic", name] for name in ("task_arithmetic", "head", "double")
    )
    assert row.seed == 42 and row.samples["left"] == {"samples": 5, "split": "train"}
    assert row.conditions["scaling_factor"] == 0.3 and row.settings["factor"] == 2.0
    curves = [line for line in compared.run.lines if line["metric"] == "training_loss"]
    values = {(line["merger"], line["task"], line["block"]): line["value"] for line in curves}
    assert values["task_arithmetic", "left", "step 20"] == 1.0 and len(values) == 4
    added = ("modules_added", "parameters_added", "task_id_at_inference")
    assert [head.cost[name] for name in added] == [1, 6, 1]
    assert [row.cost[name] for name in added] == [0, 0, 0]
    total = merger.cost["seconds"] + row.cost["seconds"]
    assert row.cost["seconds_with_merger"] == pytest.approx(total)


def test_a_failed_cell_is_named_beside_the_others(compared: Any) -> None:
    assert "2 of 12 runs failed" in compared.error and f"failing: {FAILED}" in compared.error
    failed = [(note.merger, note.row) for note in compared.run.notes if note.kind == "failed"]
    assert failed == [(merger, "failing") for merger in MERGERS]
    assert f"task_arithmetic, failing failed: {FAILED}" in " ".join(compared.screen.split())


def test_the_table_is_read_again_from_the_files(compared: Any) -> None:
    table = featcal("report", compared.folder / "logs").out
    assert "+ double" in table and table in compared.screen
    cell_table = featcal("report", compared.folder / "results").out
    assert table.startswith(cell_table.partition("gain: ")[0])


def test_a_repaired_model_is_an_upstream(compared: Any, tmp_path: Path) -> None:
    mergers = {"turned": TURNED, "x": ARITHMETIC}
    rows = {"turned": method(Scale, factor=-1.0), "head": method(Head)}
    algorithm = comparison(tmp_path, upstream_mergers=mergers, post_merging_methods=rows)
    algorithm.fabric = logging_to(tmp_path)
    algorithm.run(model_pool())
    made = {(row.merger, row.name): row for row in read_run(tmp_path / "logs").rows}
    assert {name for merger, name in made if merger == "turned"} == {"turned", "head"}
    for row in (made["turned", "turned"], made["x", "turned"]):
        assert row.accuracy == compared.rows["task_arithmetic", "a+b"].accuracy
    assert made["turned", "head"].conditions["base_method"] == ARITHMETIC


def test_a_method_by_itself_reports_its_model_beside_the_merged_one(tmp_path, capsys) -> None:
    algorithm: Any = ScaleAlgorithm(factor=-2.0, base_method=AVERAGE)
    algorithm.fabric = logging_to(tmp_path)
    taskpool = SignTaskPool()
    program = algorithm._program = program_of(taskpool)
    program.method, program.report_save_path = algorithm, str(tmp_path / "report.json")
    algorithm.run(model_pool())
    report = read_run(tmp_path / "logs")
    assert list(report.accuracy) == ["simple_average", "scale"]
    assert report.row("scale").settings["factor"] == -2.0
    assert report.row("scale").conditions.items() >= AVERAGE.items()
    advice = (
        "Do not use the repaired model: it is worse than the merged model on 1 of 2 tasks, left (-"
    )
    assert capsys.readouterr().out.count(advice) == 1
    # FusionBench evaluates no model again. The report that it would write is there.
    assert taskpool.evaluated == 2 and program.taskpool is None
    again = json.loads((tmp_path / "report.json").read_text())
    assert again["left"]["accuracy"] == report.accuracy["scale"]["left"]


# --- choices ---

METHODS, UPSTREAM = "post_merging_methods", "upstream_mergers"
OURS = {kind: {"_target_": f"fusion_bench_featcal.lab.rivals.{kind}"}
        for kind in ("FeatCal", "Surgery")}  # fmt: skip
TWO = {METHODS: {"scale": method(Scale), "twice": method(Scale)}, "references": []}
TURNED = {**method(ScaleAlgorithm, factor=-1.0), "base_method": ARITHMETIC}  # an upstream
DEFAULT = {"upstreams": ["task_arithmetic"], "post_merging": ["scale"]}


@pytest.mark.parametrize(
    ("suite", "choices", "expected"),
    [
        ({}, {"references": []},
         "simple_average simple_average+double task_arithmetic task_arithmetic+double"),
        ({"compare": DEFAULT}, TWO, "task_arithmetic task_arithmetic+scale"),
        ({"compare": DEFAULT}, TWO | {"post_merging": ["twice"]},
         "task_arithmetic task_arithmetic+twice"),
        ({"compare": {"post_merging": ["twice"]}}, TWO | {"default_rows": DEFAULT},
         "task_arithmetic task_arithmetic+twice"),
        ({}, {UPSTREAM: {"x": AVERAGE, "double": TURNED}},
         "base experts x x+double double"),
        ({"presets": {"mini": {"mix_alpha": 0.5}}},
         {METHODS: {"featcal": OURS["FeatCal"]}, UPSTREAM: {"x": AVERAGE}, "references": [],
          "default_rows": {"post_merging": ["featcal"]}},
         "x x+featcal x+featcal_mini"),
    ],
)  # fmt: skip
def test_cells_of_choices_and_pools(suite: Any, choices: Any, expected: str) -> None:
    settings = comparison(Path("never"), **({METHODS: DOUBLE} | choices)).settings
    assert [cell.title for cell in cells_of(settings, suite)] == expected.split()


def test_a_calibrated_task_without_tests_is_noted_once(tmp_path: Path) -> None:
    algorithm: Any = ScaleAlgorithm(base_method=AVERAGE)
    algorithm.fabric = logging_to(tmp_path)
    taskpool = SignTaskPool()
    taskpool.test_dataloaders = {"left": None}
    algorithm._program = program_of(taskpool)
    algorithm._program.method = algorithm
    algorithm.run(model_pool())
    (note,) = [note.text for note in read_run(tmp_path / "logs").notes]
    assert note.startswith(
        "right: calibrated but not evaluated, so not part of any average. Add test data"
    )
    assert "default_taskpool.tasks" in note


def test_methods_draw_the_comparisons_samples_unless_they_have_their_own_settings() -> None:
    methods: dict[str, Any] = {"scale": method(Scale), "own": method(Scale, seed=5)} | OURS
    chosen: Any = {"seed": 7, "samples_per_task": 9, UPSTREAM: {"x": AVERAGE}, METHODS: methods}
    cells = {cell.name: cell for cell in cells_of(comparison(Path("never"), **chosen).settings, {})}
    used = {n: cells[n].method.settings for n in methods}
    assert [used[name]["seed"] for name in methods] == [7, 5, 7, 7]
    assert [used[name]["samples_per_task"] for name in OURS] == [9, 9]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"upstream": ["wudi"]}, r"method\.upstream .*nearest: 'upstreams'"),
    ({"post_merging": ["duoble"]}, r"method\.post_merging: duoble is unknown.*: 'double'"),
    ({UPSTREAM: {"base": AVERAGE}}, r"'base' is the name of a reference"),
    ({"default_rows": {"post_merging": ["duoble"]}}, r"default post_merging: duoble.*: 'double'"),
    ({"default_rows": {"upstream": []}}, r"method\.default_rows\.upstream .*'upstreams'"),
    ({"upstreams": []}, r"there is nothing to run"),
    ({"tasks": ["rihgt"]}, r"method\.tasks: rihgt is unknown.*'right'"),
    ({"tasks": 3}, r"method\.tasks=3, but the pool has 2 tasks"),
    ({UPSTREAM: {"x": {"_target_": "no_such.Merger"}}}, r"mergers\.x.*=no_such\.Merger cannot be"),
    ({UPSTREAM: {"x": ARITHMETIC | {"scaling_facter": 1}}}, r"method\.upstream_mergers.*_factor'"),
    ({METHODS: {"x": OURS["FeatCal"] | {"ridge_lamda": 1}}},
     r"ing_methods\.x.*ridge_lamda.*'ridge_lambda'"),
    ({METHODS: {"x": OURS["Surgery"] | {"rank": 0}}}, r"methods\.x: rank must be an integer"),
    ({METHODS: {"featcal_plus": OURS["FeatCal"]}},
     r"methods\.featcal_plus: the name featcal_plus stands for FeatCal\+: set .*\.rule=plus, or "
     "rename"),
    ({METHODS: {"x": AVERAGE}}, r"is not a post-merging method: derive it"),
    ({"merged_model_save_path": "x"}, "merged_model_save_path"),
]  # fmt: skip


@pytest.mark.parametrize(("choices", "message"), REFUSED)
def test_wrong_choices_are_named_before_anything_is_loaded(choices, message, tmp_path) -> None:
    choices = {METHODS: DOUBLE} | choices
    path = choices.pop("merged_model_save_path", None)
    with pytest.raises((ValueError, CalibrationError), match=message):
        algorithm = comparison(tmp_path, **choices)
        algorithm._program.merged_model_save_path = path
        algorithm.run(refusing(model_pool()))
    assert not (tmp_path / "results").exists()
