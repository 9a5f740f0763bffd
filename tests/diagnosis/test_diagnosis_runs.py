"""Runs of the diagnosis on pools in Python, what it refuses, and the real command."""

import csv
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_runs import fusion_bench
from fusion_bench.modelpool import CLIPVisionModelPool
from text_pools import text_pool
from transformers import CLIPVisionConfig, CLIPVisionModel

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.diagnosis import DiagnosisAlgorithm
from fusion_bench_featcal.diagnosis.passes import Passes
from fusion_bench_featcal.results.diagnosis import MEASURES, Diagnosis
from fusion_bench_featcal.suites import image

MERGER = {"_target_": "fusion_bench.method.TaskArithmeticAlgorithm", "scaling_factor": 0.3}
FEW = {"base_method": MERGER, "compare_with": ["base", "merged"], "presets": {}, "items": 6,
       "samples_per_task": 6, "projections": ["pca"]}  # fmt: skip


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


def diagnosed(pool: Any, **options: Any) -> Diagnosis:
    algorithm = DiagnosisAlgorithm(**(FEW | options))
    algorithm.run(pool)
    return algorithm._results.diagnosis  # type: ignore[union-attr]


def test_rows_blocks_and_classes_of_an_image_pool():
    found = diagnosed(image_pool(), items=40)
    assert found.rows == ["base", "task_arithmetic", "featcal"]
    assert found.repairs == ["featcal"]
    assert found.items == dict.fromkeys(image.ALPHABETS2, 40)
    assert found.features == "projected image features"
    assert len(found.blocks) == 4
    for row in found.rows:
        for task in image.ALPHABETS2:
            assert set(found.drift[row][task]) == set(MEASURES)
            assert len(found.cosines[row][task]) == 40
    assert "base" not in found.task_vectors
    assert set(found.projections["pca"]["mini_korean"]) == {"experts", "task_arithmetic", "featcal"}


def test_all_rows_lie_in_one_projection(tmp_path: Path):
    for task in image.ALPHABETS2:
        expert = CLIPVisionModel.from_pretrained(image.path(task))
        expert.save_pretrained(tmp_path / task)
    pool = image_pool()
    rows = {task: str(tmp_path / task) for task in image.ALPHABETS2}
    found = diagnosed(pool, rows=rows, items=70)
    for task, points in found.projections["pca"].items():
        assert list(points) == ["experts", "task_arithmetic", *rows]
        assert {len(own) for own in points.values()} == {64}
        assert points[task] == points["experts"]  # the same features lie in the same place
        others = [np.array(points[row]) for row in points if row not in (task, "experts")]
        assert all(abs(own - np.array(points[task])).max() > 1e-3 for own in others)


def test_one_row_and_one_expert_besides_the_kept_models(monkeypatch: pytest.MonkeyPatch):
    def models() -> list[Any]:
        gc.collect()
        return [one for one in gc.get_objects() if type(one) is CLIPVisionModel]

    others: Any = weakref.WeakSet(models())  # of other tests
    whole: list[int] = []
    drift = Passes.drift

    def counted(self: Passes, task: str, expert: Any, batches: Any) -> Any:
        own = [one for one in models() if one not in others]
        whole.append(sum(next(one.parameters()).device.type != "meta" for one in own))
        return drift(self, task, expert, batches)

    monkeypatch.setattr(Passes, "drift", counted)
    few = {"ridge_lambda": 0.5}
    found = diagnosed(image_pool(), presets={"one": few, "two": few})
    assert [len(found.drift[row]) for row in found.repairs] == [2, 2, 2]
    before = whole[: 2 * len(found.repairs)]
    # The row, the expert, the merged model and the one that is returned, which is the first row.
    assert before == [3, 3, 4, 4, 4, 4], whole
    assert max(whole) <= 4


def test_classes_are_the_items_labels():
    found = diagnosed(image_pool(), items=140, tasks=["mini_balinese"])
    classes = found.classes["featcal"]["mini_balinese"]
    assert set(classes) == set(image.load_arrays("mini_balinese").classnames)
    assert sum(values["items"] for values in classes.values()) == 140
    mean = sum(values["items"] * values["cosine"] for values in classes.values()) / 140
    assert mean == pytest.approx(found.cosine("featcal", "mini_balinese"), abs=1e-5)
    assert diagnosed(image_pool(), items=6).classes["featcal"]["mini_balinese"] == {}


def test_a_saved_model_is_diagnosed_without_calibration(tmp_path: Path):
    expert = CLIPVisionModel.from_pretrained(image.path("mini_korean"))
    expert.save_pretrained(tmp_path / "mine")
    pool = image_pool()
    pool._train_datasets = {}
    found = diagnosed(pool, rows={"mine": str(tmp_path / "mine")})
    assert found.rows == ["base", "task_arithmetic", "mine"]
    assert max(found.drift["mine"]["mini_korean"]["drift"]) == 0
    assert found.task_vectors["mine"]["mini_korean"] == pytest.approx(1)
    assert min(found.drift["mine"]["mini_balinese"]["drift"]) > 0


@pytest.mark.parametrize("kind", ["seq2seq", "causal"])
def test_texts(kind: str, tmp_path: Path):
    found = diagnosed(text_pool(kind, tmp_path), tasks=["one"])
    assert found.rows == ["base", "task_arithmetic", "featcal"]
    assert found.features.startswith("hidden states")
    assert len(found.blocks) == (4 if kind == "seq2seq" else 2)


def test_positions_that_are_read_are_those_that_predict_a_target(tmp_path: Path):
    drift = [
        diagnosed(text_pool("causal", tmp_path), tasks=["one"], positions=positions).drift
        for positions in ("all", "read")
    ]
    every, read = (part["featcal"]["one"]["drift"] for part in drift)
    assert all(one != other for one, other in zip(every, read, strict=True))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"items": 1}, r"method\.items must be an integer >= 2, got 1"),
        ({"split": "tset"}, r"method\.split must be one of train, val, test, got 'tset'"),
        ({"positions": "cls"}, r"method\.positions must be one of all, read"),
        ({"projections": ["umap"]}, r"method\.projections must be \[pca\] or \[\], got \['umap'\]"),
        ({"rows": {}}, r"method\.rows must map names to folders of saved models, got \{\}"),
        ({"rows": {"merged": "x"}}, r"method\.rows: a row is a name .* got 'merged': 'x'"),
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


NO_ITEMS = (r"task 'mini_korean' has no items of the test split .*"
            r"modelpool\.test_datasets\.mini_korean.*method\.tasks")  # fmt: skip


@pytest.mark.parametrize(
    ("pool", "keys", "message"),
    [
        (None, {"tasks": ["mini_corean"]}, r"method\.tasks: .* 'mini_corean'.*mini_korean"),
        ({"mini_balinese": few_items("mini_balinese", 9)}, {}, NO_ITEMS),
        (
            {"mini_korean": few_items("mini_korean", 1)},
            {"tasks": ["mini_korean"]},
            r"task 'mini_korean': 1 of at least 2 items of the test split that a diagnosis needs",
        ),
        (
            {"mini_korean": few_items("mini_korean", 0)},
            {"tasks": ["mini_korean"]},
            r"task 'mini_korean': 0 of at least 2 items",
        ),
        (None, {"rows": {"mine": "/no/such/folder"}}, r"method\.rows\.mine: there is no folder"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused(pool: Any, keys: Any, message: str):
    with pytest.raises(CalibrationError, match=message) as caught:
        DiagnosisAlgorithm(**(FEW | keys)).run(image_pool(pool))
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_is_named(tmp_path: Path):
    algorithm = DiagnosisAlgorithm(**FEW, rows={"mine": str(tmp_path)})
    with pytest.raises(CalibrationError, match=r"method\.rows\.mine.*cannot be loaded"):
        algorithm.run(image_pool())


@pytest.mark.parametrize(
    ("change", "tensor"),
    [({"intermediate_size": 24}, "fc1"), ({"num_hidden_layers": 3}, "layers.3")],
)
def test_a_model_of_another_shape_is_named(change: Any, tensor: str, tmp_path: Path):
    config = CLIPVisionConfig.from_pretrained(image.path())
    torch.manual_seed(0)
    for key, value in change.items():
        setattr(config, key, value)
    CLIPVisionModel(config).save_pretrained(tmp_path)
    algorithm = DiagnosisAlgorithm(**FEW, rows={"mine": str(tmp_path)})
    message = rf"row mine does not match row task_arithmetic: of tensor .*{tensor}.*rows\.mine"
    with pytest.raises(CalibrationError, match=message) as caught:
        algorithm.run(image_pool())
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_command(tmp_path: Path):
    result = fusion_bench(
        ["method=diagnose", "modelpool=clip-vit-mini_alphabets2", "method.samples_per_task=24",
         "method.items=48", "method.projections=[pca]", f"path.log_dir={tmp_path}/log"],
        tmp_path,
    )  # fmt: skip
    found = Diagnosis.load(tmp_path / "log")
    assert found.rows == ["base", "task_arithmetic", "featcal", "featcal:plus"]
    assert set(found.accuracy) == {*found.rows, "experts"}
    assert found.cosine("featcal") > found.cosine("task_arithmetic")
    for row, tasks in found.class_accuracy.items():  # both pools name the same classes
        for task in image.ALPHABETS2:
            right, items = np.sum(list(tasks[task].values()), axis=0)
            assert right / items == pytest.approx(found.accuracy[row][task])
            assert set(found.classes["featcal"][task]) <= set(tasks[task])
    assert set(found.class_accuracy) == set(found.accuracy)
    for row in ("task_arithmetic", "featcal"):  # the report's runs are those that were diagnosed
        report = json.loads((tmp_path / "log" / "report.json").read_text())
        assert found.accuracy[row] == report["rows"][row]
    assert "diagnosis.md" in result.stdout
    with open(tmp_path / "log" / "diagnosis.csv", newline="", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["metric"] == "share"]
    assert len(lines) == 4 * 2 * 4
    assert main(["report", str(tmp_path / "log"), "--out", str(tmp_path / "again")]) == 0
    again, page = ((tmp_path / f / "diagnosis.md").read_text() for f in ("again", "log"))
    assert again == page
