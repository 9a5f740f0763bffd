"""Runs of the diagnosis on pools in Python, what it refuses, and the real command."""

import gc
import json
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cli_runs import fusion_bench
from comparison_parts import FakeProgram
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

MERGER = {"_target_": "fusion_bench.method.TaskArithmeticAlgorithm", "scaling_factor": 0.3}
FEW = {"base_method": MERGER, "compare_with": ["base", "merged"], "presets": {}, "items": 6,
       "samples_per_task": 6}  # fmt: skip


def image_pool(tests: Any = None) -> Any:
    """Two tasks of the bundled suite; `tests` are other test items by task."""
    tasks = image.ALPHABETS2
    tests = {task: image.load_split(task, "test") for task in tasks} if tests is None else tests
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


def test_rows_and_metrics_of_an_image_pool():
    lines = diagnosed(image_pool(), items=40)
    assert rows_of(lines) == ["base", "task_arithmetic", "featcal"]
    assert set(means(where(lines, metric="items", class_=""), "task").values()) == {40}
    values = means(lines, "row", "task", "block", "class", "metric")
    assert len(values) == len(lines)  # every number once
    counts = Counter(line["metric"] for line in where(lines, row="featcal", class_=""))
    assert counts == {
        **dict.fromkeys(
            ("drift", "relative", "cosine", "mismatch", "propagation", "between", "share"), 8
        ),
        **dict.fromkeys(("final_cosine", "task_vector_norm", "task_vector_cosine"), 2),
        **dict.fromkeys(("pca_share_1", "pca_share_2"), 2),
    }
    assert where(lines, row="base", metric="task_vector_cosine") == []
    assert {line["value"] for line in where(lines, row="base", metric="task_vector_norm")} == {0}
    assert len(where(lines, row="experts")) == 2 * 3


def test_one_row_and_one_expert_besides_the_kept_models(monkeypatch: pytest.MonkeyPatch):
    def models() -> list[Any]:
        gc.collect()
        return [one for one in gc.get_objects() if type(one) is CLIPVisionModel]

    others: Any = weakref.WeakSet(models())  # of other tests
    whole: list[int] = []
    compare = measure._compare

    def counted(*args: Any) -> Any:
        own = [one for one in models() if one not in others]
        whole.append(sum(next(one.parameters()).device.type != "meta" for one in own))
        return compare(*args)

    monkeypatch.setattr(measure, "_compare", counted)
    few = {"ridge_lambda": 0.5}
    lines = diagnosed(image_pool(), presets={"one": few, "two": few})
    assert rows_of(lines)[2:] == ["featcal", "featcal:one", "featcal:two"]
    # The row, the expert, the merged model and the one that is returned, which is the first row.
    assert whole[:6] == [3, 3, 4, 4, 4, 4], whole
    assert max(whole) <= 4


def test_classes_are_the_items_labels():
    task = "mini_balinese"
    lines = where(diagnosed(image_pool(), items=140, tasks=[task]), task=task)
    sizes = means(where(lines, metric="items"), "class")
    assert sizes.pop(("",)) == 140
    assert {name for (name,) in sizes} == set(image.load_arrays(task).classnames)
    cosines = means(where(lines, row="featcal", metric="final_cosine"), "class")
    weighted = sum(sizes[name] * cosines[name] for name in sizes) / 140
    assert weighted == pytest.approx(cosines[("",)], abs=1e-5)
    few = diagnosed(image_pool(), items=6, tasks=[task])
    assert where(few, class_="") == few  # hardly any two items share one


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


def test_accuracy_by_class_is_counted_from_the_evaluation():
    pool, task = LabelledPool(), "mini_korean"
    references = ["base", "merged", "experts"]
    lines = diagnosed(image_pool(), pool, compare_with=references, tasks=[task], items=60)
    assert pool.evaluations == 5  # three rows and two experts: each model once
    sizes = means(where(lines, metric="test_items"), "class")
    assert sizes == {(name,): n for name, n in Counter(pool.item_classes[task]).items()}
    for row in ("base", "task_arithmetic", "featcal", "experts"):
        values = means(where(lines, row=row, task=task, metric="accuracy"), "class")
        right = sum(sizes[name] * values[name] for name in sizes)
        assert right / sum(sizes.values()) == pytest.approx(values[("",)], abs=1e-5)


def test_a_pool_without_flags_has_no_accuracy_by_class():
    lines = where(diagnosed(image_pool(), LabelledPool(flags=False)), metric="accuracy")
    assert lines and where(lines, class_="") == lines


@pytest.mark.parametrize("kind", ["seq2seq", "causal"])
def test_texts(kind: str, tmp_path: Path):
    lines = diagnosed(text_pool(kind, tmp_path), tasks=["one"])
    assert rows_of(lines) == ["base", "task_arithmetic", "featcal"]
    assert len(by_block(lines, "featcal", "drift")) == (4 if kind == "seq2seq" else 2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"items": 1}, r"method\.items must be an integer >= 2, got 1"),
        ({"split": "tset"}, r"method\.split must be one of train, val, test, got 'tset'"),
        ({"itmes": 3}, r"method\.itmes"),
    ],
)
def test_keys_are_checked_before_anything_is_loaded(keys: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message) as caught:
        DiagnosisAlgorithm(**keys)
    assert "\n" not in str(caught.value)


def few_items(task: str, count: int) -> Any:
    rows = image.load_split(task, "test")
    rows.grey, rows.labels = rows.grey[:count], rows.labels[:count]
    return rows


@pytest.mark.parametrize(
    ("pool", "keys", "message"),
    [
        (None, {"tasks": ["mini_corean"]}, r"method\.tasks: .* 'mini_corean'.*mini_korean"),
        (
            {"mini_balinese": few_items("mini_balinese", 9)},
            {},
            r"task 'mini_korean' has 0 items of the test split, .*"
            r"modelpool\.test_datasets\.mini_korean .*method\.tasks",
        ),
        (
            {"mini_korean": few_items("mini_korean", 1)},
            {"tasks": ["mini_korean"]},
            "task 'mini_korean' has 1 item of the test split, a diagnosis needs 2",
        ),
    ],
)
def test_what_cannot_be_diagnosed_is_refused(pool: Any, keys: Any, message: str):
    with pytest.raises(CalibrationError, match=message) as caught:
        DiagnosisAlgorithm(**(FEW | keys)).run(image_pool(pool))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log = tmp_path / "log"
    result = fusion_bench(
        ["method=diagnose", "modelpool=clip-vit-mini_alphabets2", "method.samples_per_task=24",
         "method.items=48", f"path.log_dir={log}"],
        tmp_path,
    )  # fmt: skip
    lines = read_lines(log / LINES_FILE)
    assert rows_of(lines) == ["base", "task_arithmetic", "featcal", "featcal:plus"]
    assert len(where(lines, metric="share")) == 4 * 2 * 4
    report = json.loads((log / "report.json").read_text())
    for row, wanted in report["rows"].items():  # the report's rows are those that were measured
        values = means(where(lines, row=row, metric="accuracy", class_=""), "task")
        assert {task: value for (task,), value in values.items()} == pytest.approx(wanted, abs=1e-5)
    classes = means(where(lines, metric="test_items"), "task", "class")
    diagnosed = means(where(lines, metric="items"), "task", "class")
    assert {key for key in diagnosed if key[1]} <= set(classes)  # both pools name the same ones
    assert "featcal: relative drift changes by -" in result.stdout
    assert any(note["text"].startswith("diagnosis: at most 48 items") for note in report["notes"])
    assert main(["report", str(log)]) == 0
    assert "cosine of final features" in capsys.readouterr().out
