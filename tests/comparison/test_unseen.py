"""Accuracy on test items that a test-stream method was not trained on."""

from typing import Any

import numpy as np
import pytest

from fusion_bench_featcal.lab.compare.cells import unseen_accuracy
from fusion_bench_featcal.lab.compare.data import test_items_read as reads_test_items
from fusion_bench_featcal.lab.compare.store import CellResult


def result(**correct: list[int]) -> CellResult:
    flags = {task: np.array(values, dtype=bool) for task, values in correct.items()}
    return CellResult(accuracy={t: float(v.mean()) for t, v in flags.items()}, correct=flags)


def test_items_that_were_trained_on_do_not_count() -> None:
    own = result(a=[1, 1, 0, 1, 0], b=[1, 0], c=[1, 1, 1])
    merged = result(a=[1, 0, 1, 0, 0], b=[0, 0], c=[0, 0, 1])
    seen: dict[str, Any] = {"a": ([4, 0], 5), "b": ([1, 0], 2), "c": ([0], 3)}
    # a: items 1, 2, 3; b: none is left; c: items 1, 2
    assert unseen_accuracy(seen, own, merged) == {
        "unseen_average": pytest.approx((2 / 3 + 1) / 2),
        "unseen_gain": pytest.approx((1 / 3 + 1 / 2) / 2),
        "unseen_tasks": 2,
    }
    assert unseen_accuracy({"b": ([1, 0], 2)}, own, merged) == {"unseen_tasks": 0}
    assert unseen_accuracy({}, own, merged) == {}


@pytest.mark.parametrize("task", ["a", "z"])
def test_other_items_than_the_model_pool_s_give_no_number(task: str) -> None:
    own = result(a=[1, 1, 0])
    assert unseen_accuracy({task: ([0], 4)}, own, own) == {}
    assert unseen_accuracy({"a": ([0], 3)}, CellResult(accuracy={"a": 0.5}), own) == {}


def test_adamerging_is_known_to_read_the_test_split() -> None:
    assert reads_test_items({"name": "clip_layer_wise_adamerging"})
    assert not reads_test_items({"_target_": "fusion_bench.method.TiesMergingAlgorithm"})
    assert not reads_test_items({"_target_": "somebody.Else"})
