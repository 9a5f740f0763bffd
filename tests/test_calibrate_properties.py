"""Properties of calibrations: variations that change only rounding, and what a run may change."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
import variations as vary
from calibrations import EXACT, PAPER, PLUS, assert_identical, assert_same, distance, run_fast
from oracle import Knobs
from tiny_convs import batched_suite
from tiny_models import ROUNDING, Suite, clip_suite
from tricky_models import biased, stack_suite

from fusion_bench_featcal import CalibrationResult, Plus

SUITES: dict[str, Callable[[], Suite]] = {
    "clip": partial(clip_suite, tasks=2),
    "t5": partial(tiny.t5_suite, depths=(1, 1)),
    "llama": tiny.decoder_suite,
    "residual": tiny.residual_suite,
    "batch norm": batched_suite,
}
BOUNDS = {"t5": 20 * ROUNDING, "llama": 20 * ROUNDING}  # every solve passes on float32's rounding
RULES: dict[str, dict[str, Any]] = {"paper": {}, "plus": PLUS}


@cache
def reference(name: str, rule: str) -> CalibrationResult:
    return run_fast(SUITES[name](), **RULES[rule])


@pytest.mark.parametrize(
    ("name", "rule", "change"),
    [
        ("residual", "plus", vary.backwards),
        ("batch norm", "paper", vary.backwards),
        ("residual", "plus", vary.alone),
        ("llama", "paper", vary.alone),
        ("t5", "plus", vary.longer),
        ("residual", "plus", lambda suite: replace(suite, family="auto")),
    ],
)
def test_order_of_tasks_batches_padding_and_family_change_only_rounding(
    name: str, rule: str, change: Callable[[Suite], Suite]
):
    result = run_fast(change(SUITES[name]()), **RULES[rule])
    assert_same(result.model, reference(name, rule).model, BOUNDS.get(name, EXACT))


def test_order_and_repetition_of_samples_change_only_rounding():
    suite = stack_suite(biased, sizes=(4, 4))
    fixed: dict[str, Any] = PLUS | {
        "rule": Plus(gammas=dict.fromkeys(suite.inputs, 2.0))
    }  # for any number of them
    doubled = vary.changed(suite, lambda batches: [*batches, *batches])  # holds out the same ones
    assert_same(run_fast(doubled, **fixed).model, run_fast(suite, **fixed).model)
    rolled = vary.changed(suite, lambda batches: [torch.cat(batches).roll(4, 0)])
    assert_same(run_fast(rolled, **PLUS).model, run_fast(suite, **PLUS).model)


@pytest.mark.parametrize(("name", "rule"), [("t5", "paper"), ("clip", "plus")])
def test_arguments_are_unchanged_and_may_be_wrapped_and_in_training_mode(name: str, rule: str):
    suite = vary.all_wrapped(SUITES[name]())
    next(suite.merged.parameters()).requires_grad_(False)
    suite.merged.train().get_submodule(suite.blocks[0]).eval()
    before = [tensor.clone() for tensor in vary.tensors_of(suite)]
    modes = [module.training for module in suite.merged.modules()]
    model = run_fast(suite, **RULES[rule]).model
    assert_identical(model, reference(name, rule).model)
    assert type(model) is type(suite.merged) and distance(model, suite.merged) > 1e-3
    assert all(map(torch.equal, vary.tensors_of(suite), before))
    for either in (model, suite.merged):
        assert [module.training for module in either.modules()] == modes
    for each in (model, suite.merged, suite.base, *suite.experts.values()):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in each.modules())
    flags = [[p.requires_grad for p in m.parameters()] for m in (model, suite.merged)]
    assert flags[0] == flags[1]
    shared = {p.data_ptr() for p in suite.merged.parameters()}
    assert not shared & {p.data_ptr() for p in model.parameters()}


def test_nothing_changes_if_experts_and_base_are_the_merged_model():
    suite = tiny.residual_suite()
    experts = dict.fromkeys(suite.experts, suite.merged)
    equal: Any = replace(suite, base=suite.merged, experts=experts)
    for knobs, more in ((PAPER, {}), (Knobs(alpha=0.0, lam=3.0, rho=0.5), {}), (PAPER, PLUS)):
        assert_same(run_fast(equal, knobs, **more).model, suite.merged, 1e-6)


@pytest.mark.parametrize(
    ("rule", "modules", "expected"),
    [
        ("paper", ["!self_attn.*", "!mlp.fc1"], {"layer_norm1", "layer_norm2", "mlp.fc2"}),
        ("plus", ["mlp.*", "q_proj", "!fc2"], {"self_attn.q_proj", "mlp.fc1"}),
    ],
)
def test_only_the_chosen_modules_change(rule: str, modules: list[str], expected: set[str]):
    suite = clip_suite(tasks=2)
    for patterns in (modules, [*modules, f"!{suite.blocks[0]}.*"]):
        model = run_fast(suite, modules=patterns, **RULES[rule]).model
        changed = {name for name, value in suite.merged.named_parameters()
                   if not torch.equal(model.get_parameter(name), value)}  # fmt: skip
        blocks = suite.blocks[len(patterns) - len(modules) :]
        names = {f"{block}.{name}" for block in blocks for name in expected}
        assert changed == {f"{name}.{leaf}" for name in names for leaf in ("weight", "bias")}


def test_the_context_of_the_caller_does_not_matter():
    suite = tiny.residual_suite().to(torch.float32)
    expected = run_fast(suite).model
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    for context in (torch.enable_grad, torch.inference_mode, autocast):
        with context():
            model = run_fast(suite).model
        assert_identical(model, expected)


def test_autocast_wraps_every_forward_pass_but_no_statistics():
    suite, inside, entered = clip_suite(tasks=2).to(torch.float32), list[bool](), list[bool]()
    for model in (suite.merged, *suite.experts.values()):
        for block in suite.blocks:
            model.get_submodule(block).register_forward_pre_hook(
                lambda *_: inside.append(torch.is_autocast_enabled("cpu"))
            )

    @contextmanager
    def autocast() -> Iterator[None]:
        entered.append(True)
        with torch.autocast("cpu", torch.bfloat16):
            yield

    model = run_fast(suite, autocast=autocast).model
    assert entered and all(inside) and len(inside) >= 3 * 4 * len(suite.blocks)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert EXACT < distance(model, run_fast(suite).model) < 0.1
    assert not torch.is_autocast_enabled("cpu")


def test_only_the_requested_samples_are_drawn():
    suite, reads = clip_suite(seed=11, tasks=2, sizes=(2, 2, 2, 2)), list[str]()

    def stream(task: str) -> Iterator[Any]:
        for batch in suite.inputs[task]:
            reads.append(task)
            yield batch

    streams: Any = {task: stream(task) for task in suite.inputs}
    result = run_fast(replace(suite, inputs=streams), samples_per_task=3)
    assert {task: reads.count(task) for task in reads} == dict.fromkeys(suite.inputs, 2)
    assert_same(result.model, run_fast(vary.parted(suite, 5)[0]).model)
    assert {r["samples"] for r in result.log.of_kind("task")} == {3}


def test_the_log_has_every_task_and_module_of_a_block(tmp_path: Path):
    suite, log = tiny.gpt2_suite(padded=9), run_fast(tiny.gpt2_suite(padded=9)).log
    log.write(tmp_path / "log.jsonl")
    lines = (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == log.records
    tasks, solves = log.of_kind("task"), log.of_kind("module")
    visits = [(block, task) for block in suite.blocks for task in suite.experts]
    assert [(r["block"], r["task"]) for r in tasks] == visits
    rows = 2 + 5 + 3 + 4 + 1 + 5 + 2  # without padding
    assert {(r["samples"], r["rows"]) for r in tasks} == {(7, rows)}
    assert len(solves) == 4 * len(suite.blocks)
    for record in solves:
        assert record["module"].startswith(record["block"])
        assert 0 <= record["residual"] < 1e-9
