"""Properties of calibrations: variations that change only rounding, and what a run may change."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
import tricky_models as tricky
import variations as vary
from calibrations import EXACT, PAPER, PLUS, assert_identical, assert_same, distance, run_fast
from mixture_types import mixture_suite
from model_types import suite_named
from oracle import Knobs
from posing import Posing
from tiny_convs import tower_suite
from tiny_languages import NEEDS_RELEASE_5
from tiny_models import ROUNDING, Suite, clip_suite
from torch import Tensor, nn
from tricky_models import biased, stack_suite

from fusion_bench_featcal import CalibrationResult, Plus, SafetensorsExpert
from fusion_bench_featcal.core import products

SUITES: dict[str, Callable[[], Suite]] = {
    "clip": partial(clip_suite, tasks=2),
    "t5": partial(tiny.t5_suite, depths=(1, 1)),
    "llama": tiny.decoder_suite,
    "residual": tiny.residual_suite,
    "resnet": partial(tower_suite, "resnet"),
}
BOUNDS = {"t5": 20 * ROUNDING, "llama": 20 * ROUNDING}  # every solve passes on float32's rounding
RULES: dict[str, dict[str, Any]] = {"paper": {}, "plus": PLUS}
DIFFER = "modules left unchanged although experts differ in them"


@cache
def reference(name: str, rule: str) -> CalibrationResult:
    return run_fast(SUITES[name](), **RULES[rule])


@pytest.mark.parametrize(("name", "rule", "change"), [
    ("residual", "plus", vary.backwards),
    ("resnet", "paper", vary.backwards),
    ("llama", "paper", vary.alone),
    ("t5", "plus", vary.longer),
    ("residual", "plus", lambda suite: replace(suite, family="auto")),
])  # fmt: skip
def test_order_of_tasks_batches_padding_and_family_change_only_rounding(name, rule, change) -> None:
    result = run_fast(change(SUITES[name]()), **RULES[rule])
    assert_same(result.model, reference(name, rule).model, BOUNDS.get(name, EXACT))


def test_order_and_repetition_of_samples_change_only_rounding():
    suite = stack_suite(biased, sizes=(4, 4))
    # For any number of samples.
    gammas, lacks = (dict.fromkeys(suite.inputs, value) for value in (2.0, 1.0))
    # With one ridge no sample is held out. Which ones are is drawn by number.
    fixed: dict[str, Any] = PLUS | {"rule": Plus(gammas=gammas, lacks=lacks, ridges=(1e-2,))}
    expected = run_fast(suite, **fixed).model
    doubled = vary.changed(suite, lambda batches: [*batches, *batches])
    rolled = vary.changed(suite, lambda batches: [torch.cat(batches).roll(3, 0)])
    for other in (doubled, rolled):
        assert_same(run_fast(other, **fixed).model, expected)


@pytest.mark.parametrize(("name", "rule"), [("t5", "paper"), ("clip", "plus")])
def test_arguments_are_unchanged_and_may_be_wrapped_and_in_training_mode(name: str, rule: str):
    suite = SUITES[name]()
    vary.wrap(suite)
    next(suite.merged.parameters()).requires_grad_(False)
    suite.merged.train().get_submodule(suite.blocks[0]).eval()
    before = [tensor.clone() for tensor in vary.tensors_of(suite)]
    modes = [module.training for module in suite.merged.modules()]
    flags = [p.requires_grad for p in suite.merged.parameters()]
    model = run_fast(suite, **RULES[rule]).model
    assert_identical(model, reference(name, rule).model)
    assert type(model) is type(suite.merged) and distance(model, suite.merged) > 1e-3
    assert all(map(torch.equal, vary.tensors_of(suite), before))
    for either in (model, suite.merged):
        assert [module.training for module in either.modules()] == modes
        assert [p.requires_grad for p in either.parameters()] == flags
    for each in (model, *vary.models_of(suite)):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in each.modules())
    shared = {p.data_ptr() for p in suite.merged.parameters()}
    assert not shared & {p.data_ptr() for p in model.parameters()}


def test_nothing_changes_if_experts_and_base_are_the_merged_model():
    suite = tiny.residual_suite()
    experts = dict.fromkeys(suite.experts, suite.merged)
    equal: Any = replace(suite, base=suite.merged, experts=experts)
    for knobs, more in ((PAPER, {}), (Knobs(alpha=0.0, lam=3.0, rho=0.5), {}), (PAPER, PLUS)):
        assert_same(run_fast(equal, knobs, **more).model, suite.merged, 1e-6)


@pytest.mark.parametrize(("rule", "modules", "expected"), [
    ("paper", ["!self_attn.*", "!mlp.fc1"], {"layer_norm1", "layer_norm2", "mlp.fc2"}),
    ("plus", ["mlp.*", "q_proj", "!fc2"], {"self_attn.q_proj", "mlp.fc1"}),
])  # fmt: skip
def test_only_the_chosen_modules_change(rule: str, modules: list[str], expected: set[str]):
    suite = clip_suite(tasks=2)
    first, last = suite.blocks
    model = run_fast(suite, modules=[*modules, f"!{first}.*"], **RULES[rule]).model
    changed = {name for name, value in suite.merged.named_parameters()
               if not torch.equal(model.get_parameter(name), value)}  # fmt: skip
    assert changed == {f"{last}.{name}.{leaf}" for name in expected for leaf in ("weight", "bias")}


def test_the_context_of_the_caller_does_not_matter():
    suite = tiny.residual_suite().to(torch.float32)
    expected = run_fast(suite).model
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    for context in (torch.enable_grad, torch.inference_mode, autocast):
        with context():
            model = run_fast(suite).model
        assert_identical(model, expected)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["clip", "llama"])
@pytest.mark.parametrize("work", [1, products.LEAST_WORK])
def test_the_operations_of_a_gpu_give_the_same_model(name, rule, work, monkeypatch) -> None:
    expected = reference(name, rule).model
    monkeypatch.setattr(products, "LEAST_WORK", work)
    monkeypatch.setattr(products, "SMALL", 2)  # with little work, Gram matrices are in strips
    with Posing():
        result = run_fast(SUITES[name](), device=torch.device("cuda"), **RULES[rule])
    assert_same(result.model, expected, BOUNDS.get(name, EXACT))


MIXTURE = partial(mixture_suite, "qwen3_moe", ([6, 7],), ([4],))


@pytest.mark.parametrize(
    "make", [partial(clip_suite, tasks=2), pytest.param(MIXTURE, marks=NEEDS_RELEASE_5)]
)
def test_autocast_wraps_forward_passes_but_no_statistics(make: Callable[[], Suite]):
    suite = make().to(torch.float32)
    model = run_fast(suite, autocast=partial(torch.autocast, "cpu", torch.bfloat16)).model
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert EXACT < distance(model, run_fast(suite).model) < 0.1


def test_only_the_requested_samples_are_drawn():
    suite, reads = clip_suite(seed=11, tasks=2, sizes=(2, 2, 2)), list[str]()

    def stream(task: str) -> Iterator[Any]:
        for batch in suite.inputs[task]:
            reads.append(task)
            yield batch

    streams: Any = {task: stream(task) for task in suite.inputs}
    result = run_fast(replace(suite, inputs=streams), samples_per_task=3)
    assert {task: reads.count(task) for task in reads} == dict.fromkeys(suite.inputs, 2)
    cut = vary.changed(suite, lambda bs: [bs[0], vary.cut(bs[1], slice(1))])
    assert_same(result.model, run_fast(cut).model)


class Doubled(nn.Linear):
    """Another function than its base class's."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_subclasses_of_linear_that_compute_anything_else_stay_as_merged():
    block = tricky.block_of(
        lambda b, x: x + b.only(b.other(x)), only=tricky.linear, other=lambda: Doubled(4, 4)
    )
    suite = tricky.stack_suite(block)
    model = run_fast(suite).model
    for name, value in suite.merged.named_parameters():
        assert torch.equal(model.get_parameter(name), value) != (".only." in name), name


@NEEDS_RELEASE_5
def test_excluded_routed_experts_stay_as_merged_and_are_named(caplog: pytest.LogCaptureFixture):
    suite = suite_named("qwen2_moe")
    result = run_fast(suite, **PLUS, modules=["!experts.*"])
    model, layer = result.model, "model.layers.*.mlp"
    (record,) = result.log.select("as_merged")
    assert record["modules"] == {f"{layer}.gate": 2, f"{layer}.experts": 4}
    assert record["ends"] == {"model.embed_tokens": 1, "lm_head": 1}
    named = f"{layer}.gate (2 matrices), {layer}.experts (4 matrices), model.embed_tokens, lm_head"
    assert caplog.messages[0] == f"{DIFFER}: {named}"
    for name, value in model.named_parameters():
        equal = torch.equal(value, suite.merged.get_parameter(name))
        if ".experts." in name or name.endswith((".gate.weight", "embed_tokens.weight")):
            assert equal, name
        assert not (equal and name.endswith("o_proj.weight"))


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
