"""Kinds of modules: convolutions, BatchNorms, mixtures of experts, and heads."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import PAPER, PLUS, assert_identical, assert_same, replay, run_fast, samples_in
from model_types import MIXTURES, Row, suite_named
from moe_oracle import find_mixture, matrix
from tiny_convs import Net, batched_suite, images, net_suite, tower_suite
from tiny_models import Suite, suite_of
from torch import Tensor, nn

from fusion_bench_featcal import Paper, Plus, SafetensorsExpert
from fusion_bench_featcal.lab.rivals import RegMean

rules = pytest.mark.parametrize("more", [{}, PLUS], ids=["paper", "plus"])


def assert_same_statistics(found: nn.Module, wanted: nn.Module) -> None:
    theirs = dict(wanted.named_buffers())
    for name, buffer in found.named_buffers():
        torch.testing.assert_close(buffer, theirs[name], rtol=1e-9, atol=1e-12)


class Pixels(nn.Module):
    """A linear map of every pixel, with its weight stored as a 1x1 convolution's or a linear's."""

    def __init__(self, form: type[nn.Module]) -> None:
        super().__init__()
        self.form = form
        self.map = nn.Conv2d(4, 4, 1) if form is nn.Conv2d else nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.form is nn.Conv2d:
            return x + torch.tanh(self.map(x))
        return x + torch.tanh(self.map(x.movedim(1, -1)).movedim(-1, 1))


def pixel_suites() -> list[Suite]:
    """Two suites of the same functions."""
    torch.manual_seed(3)
    blocks = ["layers.0", "layers.1"]
    net = Net([Pixels(nn.Conv2d) for _ in blocks], nn.Conv2d(3, 4, 1))
    family = {"name": "replay", "blocks": blocks}
    first = suite_of(net, images(seed=3), blocks, 3, family)

    def other(model: nn.Module) -> nn.Module:
        twin = Net([Pixels(nn.Linear) for _ in blocks], nn.Conv2d(3, 4, 1)).double()
        shapes = {name: value.shape for name, value in twin.state_dict().items()}
        state = {name: v.reshape(shapes[name]) for name, v in model.state_dict().items()}
        twin.load_state_dict(state)
        return twin.eval()

    experts = {task: other(expert) for task, expert in first.experts.items()}
    second = Suite(other(first.merged), other(first.base), experts, first.inputs, blocks, family)
    return [first, second]


@pytest.mark.parametrize("rule", [Paper(), Plus(gamma=0.0)], ids=["paper", "plus"])
def test_a_1x1_convolution_is_a_linear_module(rule: Any):
    convolutions, linears = pixel_suites()
    run = lambda suite: run_fast(suite, rule=rule).model  # noqa: E731
    found, wanted = run(convolutions).state_dict(), run(linears).state_dict()
    merged = convolutions.merged.get_parameter("layers.1.map.weight")
    assert not torch.equal(found["layers.1.map.weight"], merged)
    for name, value in found.items():
        same = value.reshape(wanted[name].shape)
        torch.testing.assert_close(same, wanted[name], rtol=1e-9, atol=1e-12)


class Grouped(nn.Module):
    """One convolution with groups, or as many convolutions of their channels."""

    def __init__(self, groups: int, *, apart: bool) -> None:
        super().__init__()
        width = 4 // groups
        self.apart = apart
        self.whole: Any = nn.Conv2d(4, 4, 3, padding=1, groups=groups)
        if apart:
            self.whole = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(groups))

    def forward(self, x: Tensor) -> Tensor:
        if not self.apart:
            return torch.tanh(self.whole(x))
        parts = x.chunk(len(self.whole), 1)
        return torch.tanh(
            torch.cat([c(part) for c, part in zip(self.whole, parts, strict=True)], 1)
        )


def apart(model: nn.Module, groups: int) -> nn.Module:
    """The same function with every group a convolution of its own."""
    twin = Net([Grouped(groups, apart=True) for _ in range(2)], nn.Conv2d(3, 4, 1)).double()
    state = model.state_dict()
    for name in list(state):
        if ".whole." in name:
            leaf = name.rpartition(".")[2]
            for number, part in enumerate(state.pop(name).chunk(groups)):
                state[f"{name.removesuffix('.' + leaf)}.{number}.{leaf}"] = part
    twin.load_state_dict(state)
    return twin.eval()


@pytest.mark.parametrize("groups", [2, 4])
def test_a_grouped_convolution_is_one_for_each_of_its_groups(groups: int):
    torch.manual_seed(4)
    blocks = ["layers.0", "layers.1"]
    net = Net([Grouped(groups, apart=False) for _ in blocks], nn.Conv2d(3, 4, 1))
    family = {"name": "replay", "blocks": blocks}
    whole = suite_of(net, images(seed=4), blocks, 4, family)
    experts = {task: apart(expert, groups) for task, expert in whole.experts.items()}
    parts = Suite(
        apart(whole.merged, groups),
        apart(whole.base, groups),
        experts,
        whole.inputs,
        blocks,
        family,
    )
    found, wanted = run_fast(whole).model, run_fast(parts).model
    assert_same(apart(found, groups), wanted)


def test_a_channel_that_a_task_never_uses_does_not_outweigh_other_tasks():
    suite = net_suite(seed=6)
    for inputs in suite.inputs["task_0"]:
        inputs[:, 0] = 0
    net = Net([nn.Conv2d(3, 3, 3, groups=3)], nn.Identity())
    suite = suite_of(net, suite.inputs, ["layers.0"], 6, {"name": "replay", "blocks": ["layers.0"]})
    found = run_fast(suite).model.get_parameter("layers.0.bias")
    theirs = [e.get_parameter("layers.0.bias").detach() for e in suite.experts.values()]
    assert (found - torch.stack(theirs).mean(0)).abs().max() < 1


@rules
@pytest.mark.parametrize("make", [batched_suite, lambda: tower_suite("resnet")])
def test_statistics_are_those_of_the_calibrated_models_own_features(
    make: Callable[[], Suite], more: dict[str, Any]
):
    suite = make()
    model, received = run_fast(suite, **more).model, dict[str, list[Tensor]]()
    norms: dict[str, Any] = {
        n: m for n, m in model.named_modules() if "BatchNorm" in type(m).__name__
    }
    for name, norm in norms.items():
        inputs = received.setdefault(name, [])
        norm.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0]))
    for batches in suite.inputs.values():
        for batch in batches:
            model(**batch) if isinstance(batch, dict) else model(batch)
    for name, norm in norms.items():
        x = torch.cat(received[name]).movedim(1, 0).flatten(1)  # tasks have equally many rows
        torch.testing.assert_close(norm.running_mean, x.mean(1))
        torch.testing.assert_close(norm.running_var, x.var(1, unbiased=False))
        merged: Any = suite.merged.get_submodule(name)
        assert torch.equal(norm.weight, merged.weight) and torch.equal(norm.bias, merged.bias)
        assert not torch.equal(norm.running_mean, merged.running_mean)


def test_a_task_with_more_samples_does_not_weigh_more_in_statistics():
    suite = batched_suite()
    model = run_fast(suite, samples_per_task=99).model
    suite.inputs["task_1"] = 3 * suite.inputs["task_1"]
    assert_same_statistics(run_fast(suite, samples_per_task=99).model, model)


@rules
def test_merged_statistics_can_be_kept(more: dict[str, Any]):
    suite = batched_suite()
    found = run_fast(suite, batch_norm="merged", **more)
    assert_same_statistics(found.model, suite.merged)
    assert [r["left"] for r in found.log.of_kind("block")] == [["layers.0.norm"], ["layers.1.norm"]]


def test_a_calibrated_resnet_is_saved_with_its_statistics(tmp_path):
    suite = tower_suite("resnet")
    model: Any = run_fast(suite).model
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    theirs = again.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, theirs[name]), name
    assert not torch.equal(
        theirs["resnet.embedder.embedder.normalization.running_var"],
        suite.merged.state_dict()["resnet.embedder.embedder.normalization.running_var"],
    )


def test_regmean_of_equal_experts_with_groups_is_that_expert():
    suite = net_suite()
    method = RegMean(samples_per_task=8, family=suite.family)
    expert = next(iter(suite.experts.values()))
    experts = dict.fromkeys(suite.experts, expert)
    assert_same(method.merge_models(suite.base, experts, suite.inputs), expert)


@rules
@pytest.mark.parametrize("row", MIXTURES, ids=lambda row: row.name)
def test_experts_of_mixtures_stay_as_merged_with_one_note(
    row: Row, more: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    suite: Any = row.suite()
    found = run_fast(suite, **more).model
    for name, value in found.named_parameters():
        if ".experts." in name or name.endswith((".gate.weight", "embed_tokens.weight")):
            assert torch.equal(value, suite.merged.get_parameter(name)), name
    name = "model.layers.1.self_attn.o_proj.weight"
    assert not torch.equal(found.get_parameter(name), suite.merged.get_parameter(name))
    assert caplog.text.count("the experts of 2 mixtures stay as merged") == 1


@pytest.mark.parametrize("row", MIXTURES, ids=lambda row: row.name)
def test_experts_are_read_from_files_by_the_names_they_have_there(row: Row, tmp_path: Path):
    suite: Any = row.suite()
    files = {}
    for name, model in {"base": suite.base, **suite.experts}.items():
        model.save_pretrained(tmp_path / name)
        files[name] = SafetensorsExpert(tmp_path / name)
        assert any(".experts.3." in stored for stored in files[name].names())
    from_files = replace(suite, base=files.pop("base"), experts=files)
    assert_identical(run_fast(from_files).model, run_fast(suite).model)


def test_regmean_leaves_experts_of_mixtures_at_their_mean():
    suite: Any = MIXTURES[0].suite()
    method = RegMean(samples_per_task=samples_in(suite), family=suite.family)
    found = method.merge_models(suite.base, suite.experts, suite.inputs)
    mixture = find_mixture(suite.base, "model.layers.0")
    first, second = (matrix(expert, mixture, 1, "up") for expert in suite.experts.values())
    torch.testing.assert_close(matrix(found, mixture, 1, "up"), (first + second) / 2)


@pytest.mark.parametrize(
    ("name", "head"),
    [("bert", "classifier"), ("roberta", "classifier.out_proj"), ("vit", "classifier")],
)
@pytest.mark.parametrize("family", ["auto", "replay"])
def test_heads_of_experts_may_have_other_shapes_or_be_missing(
    name: str, head: str, family: str, tmp_path: Path
):
    suite = suite_named(name)
    asked = replay(suite) if family == "replay" else None
    wanted = run_fast(suite, PAPER, asked).model
    other: Any = copy.deepcopy(suite.experts["task_0"])
    other.set_submodule(head, nn.Linear(other.get_submodule(head).in_features, 7).double())
    unlike = replace(suite, experts=suite.experts | {"task_0": other})
    assert_identical(run_fast(unlike, PAPER, asked).model, wanted)
    if name == "bert":
        for task, expert in suite.experts.items():
            expert.base_model.save_pretrained(tmp_path / task)  # type: ignore[operator, union-attr]
        files: Any = {task: SafetensorsExpert(tmp_path / task) for task in suite.experts}
        assert_identical(run_fast(replace(suite, experts=files), PAPER, asked).model, wanted)
