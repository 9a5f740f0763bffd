"""Properties of calibrations: a matrix of models, rules, and variations of a run."""

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
from calibrations import EXACT, PLUS, assert_identical, assert_same, distance, run_fast
from oracle import Knobs
from tiny_convs import batched_suite
from tiny_models import ROUNDING, Suite, clip_suite
from tricky_models import biased, stack_suite

from fusion_bench_featcal import CalibrationResult, Plus

SUITES: dict[str, Callable[[], Suite]] = {
    "clip": clip_suite,
    "t5": partial(tiny.t5_suite, depths=(1, 1)),
    "llama": tiny.decoder_suite,
    "residual": tiny.residual_suite,
    "batch norm": batched_suite,
}
# Every solve passes on float32's rounding.
BOUNDS: dict[str, float] = {"t5": 20 * ROUNDING, "llama": 20 * ROUNDING}
TASKS = [f"task_{index}" for index in range(3)]
RULES: dict[str, dict[str, Any]] = {"paper": {}, "plus": PLUS}
# Otherwise the number of samples changes how much rows out of weights count.
FIXED: dict[str, Any] = RULES | {"plus": PLUS | {"rule": Plus(gammas=dict.fromkeys(TASKS, 2.0))}}
rules = pytest.mark.parametrize("rule", RULES)


@cache
def reference(name: str, rule: str) -> CalibrationResult:
    return run_fast(SUITES[name](), **RULES[rule])


# Suites and rules that are run another way, which changes no more than rounding does.
ALIKE: list[tuple[str, str, Callable[[Suite], Suite]]] = [
    ("residual", "plus", vary.backwards),
    ("batch norm", "paper", vary.backwards),
    ("residual", "plus", vary.alone),
    ("llama", "paper", vary.alone),
    ("t5", "plus", vary.longer),
    ("llama", "paper", vary.longer),
    ("residual", "plus", lambda suite: replace(suite, family="auto")),
]


@pytest.mark.parametrize(("name", "rule", "change"), ALIKE)
def test_order_batches_padding_and_family_do_not_matter(
    name: str, rule: str, change: Callable[[Suite], Suite]
):
    result = run_fast(change(SUITES[name]()), **RULES[rule])
    assert_same(result.model, reference(name, rule).model, BOUNDS.get(name, EXACT))


@pytest.mark.parametrize(("name", "rule"), [("t5", "paper"), ("batch norm", "plus")])
def test_models_may_be_wrapped_and_in_training_mode_which_is_restored(name: str, rule: str):
    suite = vary.all_wrapped(SUITES[name]())
    suite.merged.train().get_submodule(suite.blocks[0]).eval()
    modes = [module.training for module in suite.merged.modules()]
    model = run_fast(suite, **RULES[rule]).model
    assert_identical(model, reference(name, rule).model)
    for either in (model, suite.merged):
        assert [module.training for module in either.modules()] == modes


@pytest.mark.parametrize(("name", "rule"), [("clip", "plus"), ("t5", "paper")])
def test_inputs_and_models_are_untouched_and_nothing_is_shared(name: str, rule: str):
    suite = SUITES[name]()
    next(suite.merged.parameters()).requires_grad_(False)
    before = [tensor.clone() for tensor in vary.tensors_of(suite)]
    model = run_fast(suite, **RULES[rule]).model
    assert all(map(torch.equal, vary.tensors_of(suite), before))
    assert type(model) is type(suite.merged) and distance(model, suite.merged) > 1e-3
    flags = [[p.requires_grad for p in m.parameters()] for m in (model, suite.merged)]
    assert flags[0] == flags[1]
    for calibrated in (model, suite.merged, suite.base, *suite.experts.values()):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in calibrated.modules())
    shared = {p.data_ptr() for p in suite.merged.parameters()}
    assert not shared & {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("name", ["clip", "residual"])
def test_nothing_moves_if_experts_and_base_are_the_merged_model(name: str):
    suite = SUITES[name]()
    experts = dict.fromkeys(suite.experts, suite.merged)
    still: Any = replace(suite, base=suite.merged, experts=experts)
    for knobs in (Knobs(), Knobs(alpha=0.0, lam=3.0, rho=0.5)):
        assert_same(run_fast(still, knobs).model, suite.merged, 1e-6)
    assert_same(run_fast(still, **PLUS).model, suite.merged, 1e-6)


@pytest.mark.parametrize(
    ("rule", "modules", "expected"),
    [
        ("paper", ["!self_attn.*", "!mlp.fc1"], {"layer_norm1", "layer_norm2", "mlp.fc2"}),
        ("plus", ["mlp.*", "q_proj", "!fc2"], {"self_attn.q_proj", "mlp.fc1"}),
    ],
)
def test_chosen_modules_of_the_blocks_move_and_nothing_else(
    rule: str, modules: list[str], expected: set[str]
):
    suite = clip_suite()
    for patterns in (modules, [*modules, f"!{suite.blocks[0]}.*"]):
        model = run_fast(suite, modules=patterns, **RULES[rule]).model
        moved = {name for name, value in suite.merged.named_parameters()
                 if not torch.equal(model.get_parameter(name), value)}  # fmt: skip
        blocks = suite.blocks[len(patterns) - len(modules) :]
        leaves = ("weight", "bias")
        assert moved == {
            f"{b}.{name}.{leaf}" for b in blocks for name in expected for leaf in leaves
        }


@rules
def test_a_callers_context_does_not_matter(rule: str):
    suite = tiny.residual_suite().to(torch.float32)
    expected = run_fast(suite, **RULES[rule]).model
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    for context in (torch.enable_grad, torch.inference_mode, autocast):
        with context():
            model = run_fast(suite, **RULES[rule]).model
        assert_identical(model, expected)


def test_autocast_wraps_every_pass_and_statistics_stay_wide():
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


def test_samples_in_another_order_or_twice_do_not_matter():
    suite, fixed = stack_suite(biased, sizes=(4, 4)), FIXED["plus"]  # the same are held out
    doubled = vary.changed(suite, lambda batches: [*batches, *batches])
    assert_same(run_fast(doubled, **fixed).model, run_fast(suite, **fixed).model)
    turned = vary.changed(suite, lambda batches: [torch.cat(batches).roll(4, 0)])
    assert_same(run_fast(turned, **PLUS).model, run_fast(suite, **PLUS).model)


def test_only_the_samples_asked_for_are_drawn():
    suite, reads = clip_suite(seed=11, sizes=(2, 2, 2, 2)), list[str]()

    def stream(task: str) -> Iterator[Any]:
        for batch in suite.inputs[task]:
            reads.append(task)
            yield batch

    streams: Any = {task: stream(task) for task in suite.inputs}
    result = run_fast(replace(suite, inputs=streams), samples_per_task=3)
    assert {task: reads.count(task) for task in reads} == dict.fromkeys(suite.inputs, 2)
    assert_same(result.model, run_fast(vary.parted(suite, 5)[0]).model)
    assert {r["samples"] for r in result.log.of_kind("task")} == {3}


def test_log_is_complete_and_writes_one_object_a_line(tmp_path: Path):
    suite, log = clip_suite(), reference("clip", "paper").log
    log.write(tmp_path / "log.jsonl")
    lines = (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == log.records
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]
    visits = {(r["block"], r["task"]): r for r in log.of_kind("task")}
    assert set(visits) == {(b, t) for b in suite.blocks for t in suite.experts}
    for record in visits.values():
        assert (record["samples"], record["rows"]) == (7, 7 * 5)
    solves = log.of_kind("module")
    assert len(solves) == 6 * len(suite.blocks)
    for record in solves:
        assert record["module"].startswith(record["block"])
        assert 0 <= record["residual"] < 1e-9
    records = run_fast(tiny.gpt2_suite(padded=9)).log.of_kind("task")  # padding is no row
    assert {r["rows"] for r in records} == {2 + 5 + 3 + 4 + 1 + 5 + 2}
