"""Runs of the diagnosis on pools in Python, its refusals, and the command."""

import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cli_runs import fusion_bench
from comparison_parts import MERGERS, FakeProgram
from fusion_bench import BaseTaskPool
from reports import featcal
from tiny_pools import TASKS, tiny_pool, write_models
from tiny_texts import text_pool
from transformers import CLIPVisionModel

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab.diagnosis import DiagnosisAlgorithm, measure
from fusion_bench_featcal.lab.report.diagnosis import by_block, rows_of
from fusion_bench_featcal.results import LINES_FILE, Line, means, read_lines, where

MERGER, TASK = "task_arithmetic", TASKS[0]
FEW = {"base_method": MERGERS[MERGER], "compare_with": ["base", "merged"], "presets": {},
       "items": 6, "samples_per_task": 6}  # fmt: skip
CLASSES = ("round", "square", "long")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A base and two experts."""
    folders = write_models(tmp_path_factory.mktemp("clips"))
    return {name: folder for name, folder in folders.items() if name != "_merged_"}


def diagnosed(pool: Any, taskpool: Any = None, **options: Any) -> list[Line]:
    algorithm: Any = DiagnosisAlgorithm(**(FEW | options))
    algorithm._program = taskpool and FakeProgram(taskpool)
    algorithm.run(pool)
    return algorithm._results.report.lines()


class LabelledPool(BaseTaskPool):
    """A task pool of 10 items a task that guesses classes by the sign of a model's last bias."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluations = 0
        self.test_dataloaders = dict.fromkeys(TASKS)
        self.item_correct: dict[str, Any] = {}
        self.item_classes = {task: [CLASSES[n % 3] for n in range(10)] for task in TASKS}

    def evaluate(self, model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.evaluations += 1
        even = bool(list(model.parameters())[-1].detach().sum() > 0)
        self.item_correct = {task: [n % 2 == even for n in range(10)] for task in TASKS}
        return {task: {"accuracy": sum(hits) / 10} for task, hits in self.item_correct.items()}


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
    lines = diagnosed(tiny_pool(models), LabelledPool(), presets={"one": {"ridge_lambda": 0.5}})
    # At most the row, the expert, the merged model and the one that is returned.
    assert whole[0] == 3 and max(whole) <= 4 and len(whole) == 8, whole
    assert rows_of(lines) == ["base", MERGER, "featcal", "featcal_one"]
    assert set(means(where(lines, metric="items", class_=""), "task").values()) == {6}
    assert len(means(lines, "row", "task", "block", "class", "metric")) == len(lines)
    counts = Counter(line["metric"] for line in where(lines, row="featcal", class_=""))
    per_block = ["drift", "relative", "cosine", "mismatch", "propagation", "between", "share"]
    per_task = ["final_cosine", "task_vector_norm", "task_vector_cosine", "pca_share_1"]
    blocks = len(by_block(lines, "featcal", "drift"))
    expected = dict.fromkeys(per_block, 2 * blocks) | dict.fromkeys(per_task, 2)
    expected["accuracy"] = 3  # two tasks and their average
    assert blocks > 1 and expected.items() <= counts.items()
    assert where(lines, row="base", metric="task_vector_cosine") == []
    assert {line["value"] for line in where(lines, row="base", metric="task_vector_norm")} == {0}


def test_classes_are_the_items_labels_and_their_accuracy_is_counted(models: Any) -> None:
    pool, references = LabelledPool(), ["merged", "experts"]
    more: Any = {"compare_with": references, "tasks": [TASK], "items": 60}
    lines = diagnosed(tiny_pool(models, test=60), pool, **more)
    assert pool.evaluations == 4  # two rows and two experts: each model once

    def of(metric: str, row: str | None = None) -> dict[str, float]:
        more = {} if row is None else {"row": row}
        chosen = means(where(lines, metric=metric, task=TASK, **more), "class")
        return {name: value for (name,), value in chosen.items()}

    sizes = of("items")
    assert sizes.pop("") == 60 and sizes == {"0": 20, "1": 20, "2": 20}
    cosines = of("final_cosine", "featcal")
    weighted = sum(sizes[name] * cosines[name] for name in sizes) / 60
    assert weighted == pytest.approx(cosines[""], abs=1e-5)
    sizes = of("test_items")
    assert sizes == dict(Counter(pool.item_classes[TASK]))
    for row in (MERGER, "featcal", "experts"):
        values = of("accuracy", row)
        right = sum(sizes[name] * values[name] for name in sizes)
        assert right / sum(sizes.values()) == pytest.approx(values[""], abs=1e-5)


def test_a_language_model_has_the_blocks_of_both_stacks(tmp_path: Path) -> None:
    lines = diagnosed(text_pool("seq2seq", tmp_path), tasks=["one"], compare_with=["merged"])
    assert rows_of(lines) == [MERGER, "featcal"]
    assert len(by_block(lines, "featcal", "drift")) == 4


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
    lines = read_lines(log / LINES_FILE)
    assert rows_of(lines) == ["base", MERGER, "featcal", "featcal_plus"]
    report = json.loads((log / "report.json").read_text())
    for row, accuracies in report["rows"].items():  # the report's rows are the measured ones
        values = means(where(lines, row=row, metric="accuracy", class_=""), "task")
        assert {task: v for (task,), v in values.items()} == pytest.approx(accuracies, abs=1e-5)
    assert "featcal: relative drift changes by -" in result.stdout
    assert any(note["text"].startswith("diagnosis: at most 48 items") for note in report["notes"])
    done = featcal("report", log)
    assert done.code == 0 and "cosine of final features" in done.out
