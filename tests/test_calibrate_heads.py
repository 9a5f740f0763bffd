"""Experts of other tasks have other heads, which are no part of a calibration."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from calibrations import PAPER, assert_identical, replay, run_fast
from model_types import ROWS
from tiny_models import Suite
from torch import nn

from fusion_bench_featcal import CalibrationError, SafetensorsExpert


def suite_of_type(name: str) -> Suite:
    suite = next(row for row in ROWS if row.name == name).suite()
    assert suite is not None
    return suite


def with_another_head(suite: Suite, head: str) -> Suite:
    """The suite, in which the first expert has seven classes."""
    task, expert = next(iter(suite.experts.items()))
    other: Any = copy.deepcopy(expert)
    inner: Any = expert.get_submodule(head)
    other.set_submodule(head, nn.Linear(inner.in_features, 7).double())
    return replace(suite, experts={**suite.experts, task: other})


@pytest.mark.parametrize(
    ("name", "head"),
    [("bert", "classifier"), ("roberta", "classifier.out_proj"), ("vit", "classifier")],
)
@pytest.mark.parametrize("family", ["auto", "replay"])
def test_heads_of_experts_may_have_other_shapes(name: str, head: str, family: str):
    suite = suite_of_type(name)
    asked = replay(suite) if family == "replay" else None
    wanted = run_fast(suite, PAPER, asked).model
    assert_identical(run_fast(with_another_head(suite, head), PAPER, asked).model, wanted)


def test_heads_of_experts_may_be_missing(tmp_path: Any):
    suite = suite_of_type("bert")
    wanted = run_fast(suite).model
    bare: dict[str, Any] = {t: expert.base_model for t, expert in suite.experts.items()}
    for task, model in bare.items():
        model.save_pretrained(tmp_path / task)
    files: Any = {task: SafetensorsExpert(tmp_path / task) for task in bare}
    assert_identical(run_fast(replace(suite, experts=files)).model, wanted)


def test_block_of_another_shape_is_still_refused():
    suite = suite_of_type("bert")
    expert: Any = suite.experts["task_0"]
    expert.bert.encoder.layer[0].output.dense = nn.Linear(12, 9).double()
    with pytest.raises(CalibrationError, match=r"layer\.0\.output\.dense\.weight' has shape \(9"):
        run_fast(suite)
    del expert.bert.embeddings.word_embeddings.weight
    expert.bert.embeddings.word_embeddings.weight = nn.Parameter(torch.zeros(31, 8))
    with pytest.raises(CalibrationError, match=r"word_embeddings\.weight' has shape \(31, 8\)"):
        run_fast(suite)
