"""Kinds of modules: convolutions, BatchNorms, mixtures of experts, and heads."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import PLUS, assert_identical, calls_of, run_fast
from model_types import suite_named
from tiny_convs import batched_suite
from torch import nn

from fusion_bench_featcal import CalibrationError, SafetensorsExpert


def test_statistics_are_those_of_the_calibrated_models_features():
    suite = batched_suite()
    model: Any = run_fast(suite, **PLUS).model
    for name in ("layers.0.norm", "layers.1.norm"):
        norm: Any = model.get_submodule(name)
        merged: Any = suite.merged.get_submodule(name)
        received = [
            args[0]
            for batches in suite.inputs.values()
            for batch in batches
            for args, _ in calls_of(model, name, lambda batch=batch: model(batch))
        ]
        x = torch.cat(received).movedim(1, 0).flatten(1)  # tasks have equally many rows
        torch.testing.assert_close(norm.running_mean, x.mean(1))
        torch.testing.assert_close(norm.running_var, x.var(1, unbiased=False))
        assert torch.equal(norm.weight, merged.weight) and torch.equal(norm.bias, merged.bias)
        assert not torch.equal(norm.running_mean, merged.running_mean)


def assert_same_statistics(model: nn.Module, expected: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, expected.get_buffer(name), rtol=1e-9, atol=1e-12)


def test_statistics_can_stay_as_merged_and_do_not_depend_on_numbers_of_samples():
    suite = batched_suite()
    merged = run_fast(suite, modules=["!norm"])
    assert_same_statistics(merged.model, suite.merged)
    expected = run_fast(suite, samples_per_task=99).model
    suite.inputs["task_1"] = 3 * suite.inputs["task_1"]
    assert_same_statistics(run_fast(suite, samples_per_task=99).model, expected)


def test_experts_of_mixtures_stay_as_merged_and_are_read_from_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    suite: Any = suite_named("qwen2_moe")
    model = run_fast(suite, **PLUS).model
    assert caplog.text.count("modules that stay as merged: routed experts") == 1
    for parameter, value in model.named_parameters():
        if ".experts." in parameter or parameter.endswith((".gate.weight", "embed_tokens.weight")):
            assert torch.equal(value, suite.merged.get_parameter(parameter)), parameter
    projection = "model.layers.1.self_attn.o_proj.weight"
    merged = suite.merged.get_parameter(projection)
    assert not torch.equal(model.get_parameter(projection), merged)
    files = {}
    for task, expert in {"base": suite.base, **suite.experts}.items():
        expert.save_pretrained(tmp_path / task)
        files[task] = SafetensorsExpert(tmp_path / task)
        assert any(".experts.3." in stored for stored in files[task].names())
    from_files = replace(suite, base=files.pop("base"), experts=files)
    if "model.layers.1.mlp.experts.down_proj" in suite.merged.state_dict():  # transformers 5
        with pytest.raises(CalibrationError, match=r"no tensor .*\.experts\."):
            run_fast(from_files, **PLUS)
        return
    assert_identical(run_fast(from_files, **PLUS).model, model)


def test_heads_of_experts_may_have_other_shapes_or_be_missing(tmp_path: Path):
    suite = suite_named("bert")
    expected = run_fast(suite).model
    other: Any = copy.deepcopy(suite.experts["task_0"])
    other.set_submodule("classifier", nn.Linear(8, 7).double())
    unlike = replace(suite, experts=suite.experts | {"task_0": other})
    assert_identical(run_fast(unlike).model, expected)
    for task, expert in suite.experts.items():
        expert.base_model.save_pretrained(tmp_path / task)  # type: ignore[operator, union-attr]
    files: Any = {task: SafetensorsExpert(tmp_path / task) for task in suite.experts}
    assert_identical(run_fast(replace(suite, experts=files)).model, expected)
