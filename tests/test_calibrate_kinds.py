"""Kinds of modules: BatchNorms, subclasses of Linear, mixtures of experts, and heads."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tricky_models as tricky
from calibrations import PLUS, assert_identical, calls_of, run_fast
from model_types import suite_named
from tiny_convs import batched_suite
from torch import Tensor, nn

from fusion_bench_featcal import CalibrationError, SafetensorsExpert


def test_statistics_of_batch_norms_are_those_of_the_calibrated_features():
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
    expected = run_fast(suite, samples_per_task=99).model
    suite.inputs["task_1"] = 3 * suite.inputs["task_1"]  # tasks count equally
    models = run_fast(suite, samples_per_task=99).model, run_fast(suite, modules=["!norm"]).model
    for model, other in zip(models, (expected, suite.merged), strict=True):
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffer, other.get_buffer(name), rtol=1e-9, atol=1e-12)


class Renamed(nn.Linear):
    """The same function, written differently."""

    def forward(self, input: Tensor) -> Tensor:
        product = input @ self.weight.T
        return product if self.bias is None else product + self.bias


class Doubled(nn.Linear):
    """Another function."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Scaled(Renamed):
    """The same function only while its scale is one."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__(width, outputs)
        self.scale = 1.0

    def forward(self, input: Tensor) -> Tensor:
        return self.scale * super().forward(input)


@pytest.mark.parametrize(
    ("kind", "is_linear"), [(nn.Linear, True), (Renamed, True), (Doubled, False), (Scaled, False)]
)
def test_subclasses_of_linear_are_calibrated_if_they_compute_the_same(kind: Any, is_linear: bool):
    block = tricky.block_of(
        lambda b, x: x + b.only(b.other(x)), only=lambda: nn.Linear(4, 4), other=lambda: kind(4, 4)
    )
    suite = tricky.stack_suite(block)
    model = run_fast(suite).model
    for name, value in suite.merged.named_parameters():
        is_calibrated = ".only." in name or (".other." in name and is_linear)
        assert torch.equal(model.get_parameter(name), value) != is_calibrated, name


def test_modules_that_cannot_be_calibrated_stay_as_merged_and_are_named(
    caplog: pytest.LogCaptureFixture,
):
    suite = tricky.stack_suite(tricky.fused_attention)
    model = run_fast(suite, modules=["!attention.*"]).model
    assert "modules that stay as merged: MultiheadAttention" in caplog.text
    for name, value in suite.merged.named_parameters():
        assert torch.equal(model.get_parameter(name), value) != (".only." in name)


def test_routed_experts_stay_as_merged_and_are_read_from_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    suite: Any = suite_named("qwen2_moe")
    model = run_fast(suite, **PLUS).model
    assert caplog.text.count("modules that stay as merged: routed experts") == 1
    for name, value in model.named_parameters():
        equal = torch.equal(value, suite.merged.get_parameter(name))
        if ".experts." in name or name.endswith((".gate.weight", "embed_tokens.weight")):
            assert equal, name
        assert not (equal and name.endswith("o_proj.weight"))
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
