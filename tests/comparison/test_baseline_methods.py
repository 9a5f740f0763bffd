"""The baselines as cells on two tasks of the bundled suite: what they make, use and add."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fusion_bench.modelpool import CLIPVisionModelPool
from transformers import CLIPVisionModel

from fusion_bench_featcal.lab.compare import (
    CellInputs,
    Chain,
    FeatCal,
    FeatureCorrection,
)
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.suites import image

TASKS = ["mini_greek", "mini_latin"]
SAMPLES = 8


def inputs(**changes: Any) -> CellInputs:
    data = {
        task: {split: image.load_split(task, split) for split in ("train", "test")}
        for task in TASKS
    }
    options = {
        "models": {"_pretrained_": image.path(), **{task: image.path(task) for task in TASKS}},
        "train_datasets": {task: data[task]["train"] for task in TASKS},
        "test_datasets": {task: data[task]["test"] for task in TASKS},
        "processor": {"_target_": "fusion_bench_featcal.suites.image.load_processor"},
    }
    pool: Any = CLIPVisionModelPool(**(options | changes))
    pool.load_train_dataset = lambda task: data[task]["train"]
    pool.load_test_dataset = lambda task: data[task]["test"]
    fabric = SimpleNamespace(device=torch.device("cpu"), autocast=nullcontext)
    taskpool: Any = None
    return CellInputs(modelpool=pool, taskpool=taskpool, fabric=fabric)


def merged() -> CLIPVisionModel:
    model = CLIPVisionModel.from_pretrained(image.path())
    expert = dict(CLIPVisionModel.from_pretrained(image.path("mini_greek")).named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.5 * (expert[name] - parameter)
    return model


def correction(method: str, **settings: Any) -> Any:
    return FeatureCorrection(method=method, samples_per_task=SAMPLES, **settings)


WIDTH = CLIPVisionModel.from_pretrained(image.path()).config.projection_dim


@pytest.mark.parametrize(
    ("cell", "split", "modules", "parameters"),
    [
        (correction("surgery", steps=2), "test", 2, 2 * 2 * 16 * WIDTH),
        (correction("ridge_surgery"), "train", 2, 2 * (WIDTH + 1) * WIDTH),
        (correction("surgery_v2", steps=1, stream="calibration"), "train", 2 * 5, None),
    ],
)
def test_corrections_say_what_they_use_and_add(
    cell: Any, split: str, modules: int, parameters: int | None
) -> None:
    given = inputs()
    cell.check(given)
    model = cell.post_merge(merged(), given)
    assert model.is_surgery_model
    assert cell.samples(model, TASKS) == {t: {"samples": SAMPLES, "split": split} for t in TASKS}
    added = cell.added(model)
    assert len(added) == modules
    assert parameters in (None, sum(added.values()))


def test_cells_are_kept_whole_and_not_by_blocks() -> None:
    with pytest.raises(ValueError, match=r"checkpoint_dir.*method\.results_dir"):
        FeatCal(checkpoint_dir="blocks")


def test_correction_after_featcal_is_one_cell() -> None:
    featcal = FeatCal(samples_per_task=SAMPLES)
    ridge = correction("ridge_surgery")
    chain, given = Chain({"featcal": featcal, "ridge_surgery": ridge}), inputs()
    chain.check(given)
    model = chain.post_merge(merged(), given)
    assert chain.samples(model, TASKS)["mini_greek"] == {"samples": SAMPLES, "split": "train"}
    assert len(chain.added(model)) == 2


def test_reports_have_the_samples_that_were_there(caplog) -> None:
    cell, given = FeatCal(samples_per_task=SAMPLES), inputs()
    pool: Any = given.modelpool
    few = image.load_split("mini_greek", "train")
    few.grey = few.grey[:3]
    few.labels = few.labels[:3]
    real = pool.load_train_dataset
    pool.load_train_dataset = lambda task: few if task == "mini_greek" else real(task)
    for checked in (cell, correction("ridge_surgery")):
        checked.check(given)
        model = checked.post_merge(merged(), given)
        used = checked.samples(model, [*TASKS, "mini_korean"])
        assert {task: entry["samples"] for task, entry in used.items()} == {
            "mini_greek": 3,
            "mini_latin": SAMPLES,
        }
    assert caplog.text.count("task mini_greek has 3 samples, fewer than") == 1


def test_correction_before_featcal_is_named() -> None:
    with pytest.raises(CalibrationError, match=r"ridge_surgery must be the last"):
        correction("ridge_surgery").added(torch.nn.Identity())
