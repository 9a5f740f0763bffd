"""Calibration samples: each task's, the same whatever else is calibrated."""

from typing import Any

import numpy as np
import pytest
import torch
from fusion_bench.modelpool import CLIPVisionModelPool
from omegaconf import DictConfig, OmegaConf
from sample_pools import Pool
from tiny_images import channels_first, picture

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.calibration_data import calibration_batches, draw_samples, samples_used


def numbered(count: int) -> list[dict]:
    """Items whose picture shows their number; no labels."""
    return [{"image": np.full((2, 2, 3), number, np.uint8)} for number in range(count)]


def settings(**changes: Any) -> FeatCalSettings:
    return FeatCalSettings(**{"samples_per_task": 10, "batch_size": 4} | changes)


def drawn(pool: Any, tasks: Any = ("a",), **changes: Any) -> dict[str, list[int]]:
    """The numbers of the pictures in each task's batches."""
    batches = calibration_batches(pool, tasks, settings(**changes), channels_first)
    pixels = {task: torch.cat([b["pixel_values"] for b in batches[task]]) for task in tasks}
    return {t: (values[:, 0, 0, 0] * 255).round().int().tolist() for t, values in pixels.items()}


def test_batches_hold_distinct_samples_in_batch_size():
    batches = calibration_batches(Pool(a=numbered(30)), ["a"], settings(), channels_first)
    for _ in range(2):
        shapes = [batch["pixel_values"].shape for batch in batches["a"]]
        assert shapes == [(4, 3, 2, 2), (4, 3, 2, 2), (2, 3, 2, 2)] and len(batches["a"]) == 3
    assert len(set(drawn(Pool(a=numbered(30)))["a"])) == 10


def test_a_tasks_samples_do_not_depend_on_other_tasks_or_batches():
    alone = drawn(Pool(a=numbered(50)))["a"]
    pool = Pool(z=numbered(20), a=numbered(50), b=numbered(50))
    assert drawn(pool, ("b", "z", "a"))["a"] == alone
    assert drawn(pool, ("a", "b"), batch_size=7)["a"] == alone
    assert drawn(pool, samples_per_task=20)["a"][:10] == alone
    assert drawn(pool, ("a", "b"))["b"] != alone
    assert drawn(pool, seed=43)["a"] != alone
    for split in ("val", "test"):
        pool = Pool()
        setattr(pool, f"{split}_dataset_names", ["a"])
        setattr(pool, f"load_{split}_dataset", lambda _: numbered(10))
        assert sorted(drawn(pool, calibration_split=split)["a"]) == list(range(10))


def test_draw_is_the_same_on_every_machine():
    expected = [55, 45, 44, 90, 39]  # the samples of every published number
    assert draw_samples(100, "mini_mnist", settings(samples_per_task=5)) == expected


def test_fewer_samples_than_asked_for_are_all_taken_with_one_warning(caplog):
    pool = Pool(a=numbered(9), b=numbered(10))
    assert sorted(drawn(pool, ("a", "b"))["a"]) == list(range(9))
    drawn(pool)  # a run opens its data more than once
    assert [record.getMessage() for record in caplog.records] == [
        "task a has 9 samples, fewer than method.samples_per_task = 10: all of them are used"
    ]
    used = samples_used(pool, ["a", "b", "c"], 10, "train")
    assert used == {t: {"samples": n, "split": "train"} for t, n in (("a", 9), ("b", 10))}
    assert samples_used(pool, ["a"], 4, "train")["a"]["samples"] == 4


class Unreadable(list):
    def __getitem__(self, index: Any) -> Any:
        raise OSError("disk on fire")


ITEMS: list[tuple[Any, str]] = [
    (Unreadable(numbered(10)), r"item \d+ cannot be read \(disk on fire"),
    ([{"image": picture(n, (4 + (n == 7), 4))} for n in range(10)],
     r"sizes.*\[3, 4, [45]\] and \[3, 4, [45]\].*modelpool\.processor"),
]  # fmt: skip


@pytest.mark.parametrize(("items", "message"), ITEMS)
def test_items_that_cannot_be_used_are_named_when_they_are_read(items, message):
    batches = calibration_batches(Pool(a=items), ["a"], settings(batch_size=1), channels_first)
    with pytest.raises(CalibrationError, match=f"task 'a'.*{message}"):
        list(batches["a"])


LOAD = "fusion_bench_featcal.tasks.load_images"
NO_DATA = (
    r"task 'abd' has no calibration data \(nearest: 'abc'\): set modelpool\.train_datasets\.abd or "
    r"method\.calibration_split \(now train\).*are: abc, d"
)
REFUSED: list[tuple[Any, str, dict[str, Any], str]] = [
    (Pool(abc=[], d=[]), "abd", {}, NO_DATA),
    (Pool(a=[]), "a", {"calibration_split": "val"}, "The pool's val_datasets are: none"),
    (Pool(a=[]), "a", {}, r"'a' has 0 samples in modelpool\.train_datasets\.a"),
    *((CLIPVisionModelPool(DictConfig({}), train_datasets=OmegaConf.create({"a": entry})), "a", {},
       rf"(?s)modelpool\.train_datasets\.a.*{message}")
      for entry, message in (
          ({"_target_": LOAD, "path": "./nowhere"}, "cannot be loaded: data './nowhere' does not"),
          ({"_target_": LOAD, "path": "./nowhere", "splitt": "x"}, "cannot be loaded: .*'splitt'"),
          ({"_target_": LOAD, "path": "who/what"}, r"correct the path, .*train or test\)\.$"),
          ({"_target_": LOAD, "path": "who/what", "split": "train"}, "'who/what'.*HF_HUB_OFFL"),
          ({"_target_": "datasets.load_dataset", "path": "who/what"},
           "'who/what'.*HF_HUB_OFFLINE is"),
          ("who/what", "who/what.*HF_HUB_OFFLINE is"))),
]  # fmt: skip


@pytest.mark.parametrize(("pool", "task", "changes", "message"), REFUSED)
def test_data_that_cannot_be_loaded(pool, task, changes, message):
    with pytest.raises(CalibrationError, match=message):
        calibration_batches(pool, [task], settings(**changes), channels_first)
