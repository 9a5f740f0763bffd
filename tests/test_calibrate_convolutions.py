"""Convolutions are linear maps of patches; BatchNorm has the statistics of what it receives."""

from typing import Any

import pytest
import torch
from calibrations import EXACT, PAPER, PLUS, assert_same, distance, run_fast, run_slow
from oracle import Knobs
from tiny_convs import MAKES, Net, images, net_suite, tower_suite, with_statistics
from tiny_models import Suite, batched, normal, suite_of
from torch import Tensor, nn

from fusion_bench_featcal import CalibrationError, FeatCalSettings, calibrate
from fusion_bench_featcal.lab.rivals import RegMean
from fusion_bench_featcal.rules.paper import Paper
from fusion_bench_featcal.rules.plus import Plus

KNOBS = [PAPER, Knobs(alpha=0.0, lam=0.5, rho=0.5, norm=False), Knobs(alpha=1.0, lam=1e-3, rho=1.0)]


def assert_same_statistics(found: nn.Module, wanted: nn.Module) -> None:
    theirs = dict(wanted.named_buffers())
    for name, buffer in found.named_buffers():
        torch.testing.assert_close(buffer, theirs[name], rtol=1e-9, atol=1e-12)


def step_by_step(suite: Suite) -> dict[str, Any]:
    """`replay` with a stage for every block, which need not be registered in order."""
    blocks = [[block] for block in suite.blocks]
    return {"name": "replay", "blocks": blocks, "mask": [None] * len(blocks)}


def plus(suite: Suite, family: Any = None, **more: Any) -> nn.Module:
    settings = FeatCalSettings(**{**PLUS, "samples_per_task": 8, **more})
    models = suite.merged, suite.base, suite.experts, suite.inputs
    return calibrate(*models, settings, family=family or suite.family, progress=False).model


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: f"alpha {knobs.alpha}")
def test_convolutions_of_every_form_equal_the_oracle(knobs: Knobs):
    suite = net_suite()
    wanted = run_slow(suite, knobs)
    assert distance(wanted.model, suite.merged) > 1e-2
    assert_same(run_fast(suite, knobs).model, wanted.model)


@pytest.mark.parametrize("make", MAKES)
def test_whole_towers_equal_the_oracle(make: str):
    suite = tower_suite(make)
    found, wanted = run_fast(suite).model, run_slow(suite).model
    assert distance(wanted, suite.merged) > 1e-2
    assert_same(found, wanted, 1e-6 if "resnet" in make else EXACT)
    assert_same_statistics(found, run_fast(suite, family=step_by_step(suite)).model)
    for name, buffer in wanted.named_buffers():
        torch.testing.assert_close(found.get_buffer(name), buffer, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("make", ["resnet", "convnext", "segformer"])
def test_whole_towers_equal_replay(make: str):
    suite = tower_suite(make, side=8, sizes=(4, 3))
    assert_same(run_fast(suite, family=step_by_step(suite)).model, run_fast(suite).model)
    options = {"samples_per_task": 7}
    assert_same(plus(suite, step_by_step(suite), **options), plus(suite, **options), 1e-8)


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


def test_batches_and_chunks_of_samples_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch):
    suite = net_suite(seed=5, sizes=(8,))
    found, wanted = run_fast(suite).model, plus(suite)
    monkeypatch.setattr("fusion_bench_featcal.core.patches.MOST_ROWS", 50)
    assert_same(run_fast(suite).model, found)
    assert_same(plus(suite), wanted, 1e-8)


def test_a_channel_that_a_task_never_uses_does_not_outweigh_other_tasks():
    suite = net_suite(seed=6)
    for inputs in suite.inputs["task_0"]:
        inputs[:, 0] = 0
    net = Net([nn.Conv2d(3, 3, 3, groups=3)], nn.Identity())
    suite = suite_of(net, suite.inputs, ["layers.0"], 6, {"name": "replay", "blocks": ["layers.0"]})
    found = run_fast(suite).model.get_parameter("layers.0.bias")
    theirs = [e.get_parameter("layers.0.bias").detach() for e in suite.experts.values()]
    assert (found - torch.stack(theirs).mean(0)).abs().max() < 1


class Batched(nn.Module):
    """Convolution and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


def batched_suite() -> Suite:
    torch.manual_seed(7)
    blocks = ["layers.0", "layers.1"]
    family = {"name": "replay", "blocks": blocks}
    net = Net([Batched() for _ in blocks], nn.Identity())
    return with_statistics(suite_of(net, images(seed=7), blocks, 7, family))


@pytest.mark.parametrize("method", ["paper", "plus"])
def test_statistics_are_those_of_the_calibrated_models_own_features(method: str):
    suite = batched_suite()
    model = run_fast(suite).model if method == "paper" else plus(suite)
    for block in suite.blocks:
        norm: Any = model.get_submodule(f"{block}.norm")
        seen: list[Tensor] = []

        def see(_: nn.Module, args: Any, seen: list[Tensor] = seen) -> None:
            seen.append(args[0])

        hook = norm.register_forward_pre_hook(see)
        for batches in suite.inputs.values():
            for batch in batches:
                model(batch)
        hook.remove()
        x = torch.cat(seen).movedim(1, 0).flatten(1)  # tasks have equally many rows
        torch.testing.assert_close(norm.running_mean, x.mean(1))
        torch.testing.assert_close(norm.running_var, x.var(1, unbiased=False))


def test_a_task_with_more_samples_does_not_weigh_more_in_statistics():
    suite = batched_suite()
    model = run_fast(suite, samples_per_task=99).model
    suite.inputs["task_1"] = 3 * suite.inputs["task_1"]
    assert_same_statistics(run_fast(suite, samples_per_task=99).model, model)


def test_merged_statistics_can_be_kept():
    suite = batched_suite()
    found = run_fast(suite, batch_norm="merged")
    assert_same_statistics(found.model, suite.merged)
    assert [r["left"] for r in found.log.of_kind("block")] == [["layers.0.norm"], ["layers.1.norm"]]


def test_one_expert_that_is_merged_and_base_changes_nothing_but_statistics():
    suite = batched_suite()
    inputs = {"task_0": suite.inputs["task_0"]}
    own = Suite(suite.base, suite.base, {"task_0": suite.base}, inputs, suite.blocks, suite.family)
    kept = run_fast(own, batch_norm="merged").model
    assert_same(kept, suite.base, 1e-7)


def test_one_dimension_and_batch_norm_of_vectors():
    class Vectors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(3, 3, 3, stride=2, padding=1)
            self.only = nn.Linear(3, 3)
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.only(self.conv(x).mean(2)))

    net = nn.Sequential(Vectors())
    inputs: dict[str, list] = {
        f"task_{i}": batched((i + 1) * normal(i, 9, 3, 7), (5, 4)) for i in range(2)
    }
    suite = with_statistics(suite_of(net, inputs, ["0"], 8, {"name": "replay", "blocks": ["0"]}))
    found, wanted = run_fast(suite).model, run_slow(suite).model
    assert_same(found, wanted, 1e-8)
    for name, buffer in wanted.named_buffers():
        torch.testing.assert_close(found.get_buffer(name), buffer)
    assert distance(plus(suite), suite.merged) > 1e-3


@pytest.mark.parametrize(
    "settings",
    [{"token_weights": "demo_last_block", "calibrate_norm": False}, {"mask": "mask"}],
    ids=str,
)
@pytest.mark.parametrize("method", ["paper", "plus"])
def test_what_does_not_fit_a_convolution_is_refused_by_name(settings: dict[str, Any], method: str):
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Conv1d(3, 3, 3, padding=1)])

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layers[0](x)

    inputs = {"task_0": [{"x": normal(1, 4, 3, 7), "mask": torch.ones(4, 3)}]}
    suite = suite_of(Filter(), inputs, ["layers.0"], 9)
    inputs["task_0"][0]["mask"][:, 2] = 0
    more = dict(settings)
    family = {"name": "replay", "blocks": ["layers.0"], "mask": more.pop("mask", None)}
    if method == "plus" and more:
        return
    with pytest.raises(CalibrationError, match=r"layers\.0 is a convolution.*method\.modules"):
        plus(suite, family) if method == "plus" else run_fast(suite, family=family, **more)


def test_regmean_of_equal_experts_with_groups_is_that_expert():
    suite = net_suite()
    method = RegMean(samples_per_task=8, family=suite.family)
    expert = next(iter(suite.experts.values()))
    experts = dict.fromkeys(suite.experts, expert)
    assert_same(method.merge_models(suite.base, experts, suite.inputs), expert)


def test_a_batch_norm_that_runs_twice_is_refused_by_name():
    class Twice(Batched):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.norm(self.conv(x)))

    family = {"name": "replay", "blocks": ["layers.0"]}
    net = Net([Twice()], nn.Identity())
    suite = with_statistics(suite_of(net, images(seed=9), ["layers.0"], 9, family))
    with pytest.raises(
        CalibrationError, match=r"layers\.0\.norm runs 2 times.*method\.modules=\['!layers\.0\.norm"
    ):
        run_fast(suite)


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
