"""Runs of the diagnosis on pools in Python, its refusals, and the command."""

import gc
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning
import pytest
from cli_runs import fusion_bench
from comparison_parts import MERGERS, FakeProgram
from fusion_bench import BaseTaskPool
from lightning.fabric.loggers import CSVLogger
from reports import featcal
from tiny_pools import TASKS, tiny_pool, write_models
from tiny_texts import text_pool
from transformers import CLIPVisionModel

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab.diagnosis import DiagnosisAlgorithm, measure
from fusion_bench_featcal.lab.diagnosis.views import by_block, by_task, rows_of
from fusion_bench_featcal.results import Run, read_run

MERGER, TASK = "task_arithmetic", TASKS[0]
FEW = {"base_method": MERGERS[MERGER], "compare_with": ["base", "merged"], "presets": {},
       "items": 6, "samples_per_task": 6}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A base and two experts."""
    folders = write_models(tmp_path_factory.mktemp("clips"))
    return {name: folder for name, folder in folders.items() if name != "_merged_"}


def diagnosed(pool: Any, taskpool: Any = None, **options: Any) -> Run:
    algorithm: Any = DiagnosisAlgorithm(**(FEW | options))
    algorithm._program = taskpool and FakeProgram(taskpool)
    with TemporaryDirectory() as folder:
        logger = CSVLogger(root_dir=folder, name="logs", version="")
        algorithm.fabric = lightning.Fabric(accelerator="cpu", devices=1, loggers=logger)
        algorithm.run(pool)
        return read_run(Path(folder) / "logs")


class EvenPool(BaseTaskPool):
    """A task pool of 10 items a task, half of which are right."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluations = 0
        self.test_dataloaders = dict.fromkeys(TASKS)

    def evaluate(self, model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.evaluations += 1
        return {task: {"accuracy": 0.5} for task in TASKS}


def test_all_metrics_with_one_row_and_one_expert_in_memory(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_memory() -> int:
        gc.collect()
        models = [x for x in gc.get_objects() if type(x) is CLIPVisionModel]
        return sum(next(model.parameters()).device.type == "cpu" for model in models)

    compare, of_other_tests, whole = measure._compare, in_memory(), list[int]()

    def counted(*args: Any) -> Any:
        whole.append(in_memory() - of_other_tests)
        return compare(*args)

    monkeypatch.setattr(measure, "_compare", counted)
    run = diagnosed(tiny_pool(models), EvenPool(), presets={"one": {"ridge_lambda": 0.5}})
    # At most the row, the expert, the merged model and the one that is returned.
    assert whole[0] == 3 and max(whole) <= 4 and len(whole) == 8, whole
    assert rows_of(run) == ["base", MERGER, "featcal", "featcal_one"]
    assert set(by_task(run, "items")[""]) == {6}
    places = [
        tuple(line[key] for key in ("row", "task", "block", "metric")) for line in run.all_lines()
    ]
    assert len(set(places)) == len(places)
    counts = Counter(line["metric"] for line in run.all_lines() if line["row"] == "featcal")
    per_block = ["drift", "relative", "mismatch", "propagation", "share"]
    per_task = ["final_cosine", "task_vector_cosine"]
    blocks = len(by_block(run, "drift")["featcal"])
    expected = dict.fromkeys(per_block, 2 * blocks) | dict.fromkeys(per_task, 3)
    expected |= dict.fromkeys(("pca_1", "pca_2"), 2 * 6)  # an item each
    expected["accuracy"] = 3  # as above: two tasks and their average
    assert blocks > 1 and expected.items() <= counts.items()
    assert "base" not in by_task(run, "task_vector_cosine")


def test_one_task_is_diagnosed_and_each_model_evaluated_once(models: Any) -> None:
    pool, references = EvenPool(), ["merged", "experts"]
    more: Any = {"compare_with": references, "tasks": [TASK], "items": 60}
    run = diagnosed(tiny_pool(models, test=60), pool, **more)
    assert pool.evaluations == 4  # two rows and two experts
    assert by_task(run, "items")[""].to_dict() == {TASK: 60}
    assert [*by_task(run, "final_cosine")["featcal"].index] == [TASK]


def test_a_language_model_has_the_blocks_of_both_stacks(tmp_path: Path) -> None:
    run = diagnosed(text_pool("seq2seq", tmp_path), tasks=["one"], compare_with=["merged"])
    assert rows_of(run) == [MERGER, "featcal"]
    assert len(by_block(run, "drift")["featcal"]) == 4


@pytest.mark.parametrize(
    ("tests", "keys", "message"),
    [
        (10, {"itmes": 3}, r"method\.itmes"),
        (10, {"tasks": ["onne"]}, rf"method\.tasks: .* 'onne'.*{TASK}"),
        (0, {}, rf"task '{TASK}' has 0 items of the test split, .*"
         rf"modelpool\.test_datasets\.{TASK} .*method\.tasks"),
    ],
)  # fmt: skip
def test_keys_and_data_that_do_not_fit_are_refused(
    tests: int, keys: Any, message: str, models: Any
) -> None:
    with pytest.raises((ValueError, CalibrationError), match=message) as caught:
        DiagnosisAlgorithm(**(FEW | keys)).run(tiny_pool(models, test=tests))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    words = ["modelpool=clip-vit-mini_alphabets2", "method.samples_per_task=24", "method.items=48"]
    log = tmp_path / "log"
    result = fusion_bench(["method=diagnose", *words, f"path.log_dir={log}"], tmp_path)
    run = read_run(log)
    assert rows_of(run) == ["base", MERGER, "featcal", "featcal_plus"]
    assert "featcal: relative drift changes by -" in result.stdout
    assert any(note.text.startswith("diagnosis: at most 48 items") for note in run.notes)
    done = featcal("report", log, "--figures", tmp_path / "figures")
    assert done.code == 0 and "cosine of final features" in done.out
    figures_of_run = {file.stem for file in (tmp_path / "figures").glob("*.svg")}
    assert {
        f"diagnosis-{name}" for name in ("drift", "terms", "cosines", "components", "gains")
    } < figures_of_run
