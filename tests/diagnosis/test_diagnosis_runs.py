"""Runs of the diagnosis on pools in Python, its refusals, and the command."""

import gc
import json
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cli_runs import fusion_bench
from comparison_parts import MERGERS, FakeProgram
from fusion_bench import BaseTaskPool
from fusion_bench.modelpool import CLIPVisionModelPool
from text_pools import text_pool
from transformers import CLIPVisionModel

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.lab.diagnosis import DiagnosisAlgorithm, measure
from fusion_bench_featcal.lab.report.diagnosis import by_block, rows_of
from fusion_bench_featcal.results.long_table import LINES_FILE, Line, means, read_lines, where
from fusion_bench_featcal.suites import image

MERGER = "task_arithmetic"
FEW = {"base_method": MERGERS[MERGER], "compare_with": ["base", "merged"], "presets": {},
       "items": 6, "samples_per_task": 6}  # fmt: skip
TASK = "mini_korean"


def rows(task: str, count: int | None = None) -> Any:
    items = image.load_split(task, "test")
    items.grey, items.labels = items.grey[:count], items.labels[:count]
    return items


def image_pool(tests: Any = None) -> Any:
    """Two tasks of the bundled suite. `tests` are other test items by task."""
    tasks = image.ALPHABETS2
    tests = {task: rows(task) for task in tasks} if tests is None else tests
    options: dict[str, Any] = {
        "models": {"_pretrained_": image.path(), **{task: image.path(task) for task in tasks}},
        "train_datasets": {task: {} for task in tasks},
        "test_datasets": {task: {} for task in tests},
        "processor": {"_target_": "fusion_bench_featcal.suites.image.load_processor"},
    }
    pool: Any = CLIPVisionModelPool(**options)
    pool.load_train_dataset = lambda task: image.load_split(task, "train")
    pool.load_test_dataset = tests.__getitem__
    return pool


def diagnosed(pool: Any, taskpool: Any = None, **options: Any) -> list[Line]:
    algorithm: Any = DiagnosisAlgorithm(**(FEW | options))
    algorithm._program = taskpool and FakeProgram(taskpool)
    algorithm.run(pool)
    return algorithm._results.report.lines()


class LabelledPool(BaseTaskPool):
    """A task pool that guesses classes by the sign of a model's last bias."""

    def __init__(self, *, flags: bool = True) -> None:
        super().__init__()
        self.evaluations = 0
        self.test_dataloaders = dict.fromkeys(image.ALPHABETS2)
        self._labels = {task: image.load_split(task, "test").labels for task in image.ALPHABETS2}
        names = {task: image.load_arrays(task).classnames for task in image.ALPHABETS2}
        if flags:
            self.item_correct: dict[str, Any] = {}
            self.item_classes = {
                task: [names[task][label] for label in labels]
                for task, labels in self._labels.items()
            }

    def evaluate(self, model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.evaluations += 1
        even = bool(list(model.parameters())[-1].detach().sum() > 0)
        right = {task: self._labels[task] % 2 == even for task in self.test_dataloaders}
        if hasattr(self, "item_correct"):
            self.item_correct = right
        return {task: {"accuracy": float(hits.mean())} for task, hits in right.items()}


def test_all_metrics_with_one_row_and_one_expert_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def models() -> list[Any]:
        gc.collect()
        return [model for model in gc.get_objects() if type(model) is CLIPVisionModel]

    before: Any = weakref.WeakSet(models())  # of other tests
    whole: list[int] = []
    compare = measure._compare

    def counted(*args: Any) -> Any:
        new = [model for model in models() if model not in before]
        whole.append(sum(next(model.parameters()).device.type != "meta" for model in new))
        return compare(*args)

    monkeypatch.setattr(measure, "_compare", counted)
    pool = LabelledPool(flags=False)
    lines = diagnosed(image_pool(), pool, presets={"one": {"ridge_lambda": 0.5}})
    # At most the row, the expert, the merged model and the one that is returned.
    assert whole[0] == 3 and max(whole) <= 4 and len(whole) == 8, whole
    assert rows_of(lines) == ["base", MERGER, "featcal", "featcal:one"]
    assert set(means(where(lines, metric="items", class_=""), "task").values()) == {6}
    assert len(means(lines, "row", "task", "block", "class", "metric")) == len(lines)
    counts = Counter(line["metric"] for line in where(lines, row="featcal", class_=""))
    blocks = ["drift", "relative", "cosine", "mismatch", "propagation", "between", "share"]
    tasks = ["final_cosine", "task_vector_norm", "task_vector_cosine"]
    expected = dict.fromkeys(blocks, 8) | dict.fromkeys([*tasks, "pca_share_1", "pca_share_2"], 2)
    expected["accuracy"] = 3  # two tasks and their average
    assert expected.items() <= counts.items()
    assert where(lines, row="base", metric="task_vector_cosine") == []
    assert {line["value"] for line in where(lines, row="base", metric="task_vector_norm")} == {0}
    assert where(lines, class_="") == lines  # the pool has no flags, and few items share a class


def test_classes_are_the_items_labels_and_their_accuracy_is_counted() -> None:
    pool, references = LabelledPool(), ["merged", "experts"]
    lines = diagnosed(image_pool(), pool, compare_with=references, tasks=[TASK], items=140)
    assert pool.evaluations == 4  # two rows and two experts: each model once

    def of(metric: str, row: str | None = None) -> dict[str, float]:
        more = {} if row is None else {"row": row}
        chosen = means(where(lines, metric=metric, task=TASK, **more), "class")
        return {name: value for (name,), value in chosen.items()}

    sizes = of("items")
    total = sizes.pop("")
    assert total == 140 and sizes.keys() == set(image.load_arrays(TASK).classnames)
    cosines, whole = of("final_cosine", "featcal"), sum(sizes.values())
    weighted = sum(sizes[name] * cosines[name] for name in sizes) / whole
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
        (None, {"itmes": 3}, r"method\.itmes"),
        (None, {"tasks": ["mini_corean"]}, rf"method\.tasks: .* 'mini_corean'.*{TASK}"),
        ({"mini_balinese": 9}, {}, rf"task '{TASK}' has 0 items of the test split, .*"
         rf"modelpool\.test_datasets\.{TASK} .*method\.tasks"),
        ({TASK: 1}, {"tasks": [TASK]}, f"'{TASK}' has 1 item of the test split, a diagnosis needs"),
    ],
)  # fmt: skip
def test_keys_and_data_that_do_not_fit_are_refused(tests: Any, keys: Any, message: str) -> None:
    few = tests and {task: rows(task, count) for task, count in tests.items()}
    with pytest.raises((ValueError, CalibrationError), match=message) as caught:
        DiagnosisAlgorithm(**(FEW | keys)).run(image_pool(few))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["modelpool=clip-vit-mini_alphabets2", "method.samples_per_task=24", "method.items=48"]
    log = tmp_path / "log"
    result = fusion_bench(["method=diagnose", *words, f"path.log_dir={log}"], tmp_path)
    lines = read_lines(log / LINES_FILE)
    assert rows_of(lines) == ["base", MERGER, "featcal", "featcal:plus"]
    report = json.loads((log / "report.json").read_text())
    for row, accuracies in report["rows"].items():  # the report's rows are the measured ones
        values = means(where(lines, row=row, metric="accuracy", class_=""), "task")
        assert {task: v for (task,), v in values.items()} == pytest.approx(accuracies, abs=1e-5)
    assert "featcal: relative drift changes by -" in result.stdout
    assert any(note["text"].startswith("diagnosis: at most 48 items") for note in report["notes"])
    assert main(["report", str(log)]) == 0
    assert "cosine of final features" in capsys.readouterr().out
