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
from calibrations import EXACT, PAPER, PLUS, assert_identical, assert_same, distance, run_fast
from oracle import Knobs
from tiny_convs import batched_suite, net_suite
from tiny_models import ROUNDING, Suite, clip_suite
from tiny_open_clip import tower_suite
from torch import nn
from tricky_models import Masked, biased, stack_suite

from fusion_bench_featcal import CalibrationError, CalibrationResult, Plus

SUITES: dict[str, Callable[[], Suite]] = {
    "clip": clip_suite,
    "open_clip": tower_suite,
    "t5": partial(tiny.t5_suite, depths=(1, 1)),
    "llama": tiny.decoder_suite,
    "gpt2": tiny.gpt2_suite,
    "residual": tiny.residual_suite,
    "convolutions": net_suite,
    "batch norm": batched_suite,
}
# Every solve passes on float32's rounding.
BOUNDS: dict[str, float] = {"t5": 20 * ROUNDING, "llama": 20 * ROUNDING}
TASKS = [f"task_{index}" for index in range(3)]
RULES: dict[str, dict[str, Any]] = {"paper": {}, "plus": PLUS}
# Otherwise the number of samples changes how much rows out of weights count.
FIXED: dict[str, Any] = RULES | {"plus": PLUS | {"rule": Plus(gammas=dict.fromkeys(TASKS, 2.0))}}
rules = pytest.mark.parametrize("rule", RULES)
suites = pytest.mark.parametrize("name", SUITES)


@cache
def reference(name: str, rule: str) -> CalibrationResult:
    return run_fast(SUITES[name](), **RULES[rule])


def other_family(name: str, suite: Suite, rule: str) -> tuple[Suite, dict[str, Any]]:
    more: dict[str, Any] = {"family": vary.other_family(name, suite)}
    if (name, rule) == ("clip", "plus"):  # `replay` does not know which rows the head reads
        more["modules"] = [f"!{suite.blocks[-1]}.*"]
    return suite, more


# Variation of a suite's run, the suites that have it (all), and whether models are bit-identical.
Varied = tuple[Suite, dict[str, Any]]
VARIATIONS: dict[str, tuple[Callable[[str, Suite, Path, str], Varied], str, bool]] = {
    "tasks backwards": (lambda _, s, f, r: (vary.backwards(s), {}), "", False),
    "samples alone": (lambda _, s, f, r: (vary.alone(s), {}), "", False),
    "padding": (lambda _, s, f, r: (vary.longer(s), {}), "t5 llama gpt2", False),
    "wrapped models": (lambda _, s, f, r: (vary.all_wrapped(s), {}), "clip residual", True),
    "training mode": (lambda _, s, f, r: (s, s.merged.train() and {}), "clip t5 batch norm", True),
    "features on disk": (
        lambda _, s, f, r: (s, {"activations": "disk", "activations_dir": f}), "", True),
    "no log of drift": (
        lambda _, s, f, r: (s, {"log_drift": False}), "clip llama residual batch norm", True),
    "inputs one by one": (
        lambda _, s, f, r: (s, {"sums_at_once": "input"}), "clip llama t5 convolutions", True),
    "held-out samples": (
        lambda _, s, f, r: vary.with_held_out(s, 2), "clip t5 llama residual", True),
    "another family": (
        lambda n, s, f, r: other_family(n, s, r), "clip t5 llama gpt2 residual", False),
}  # fmt: skip
CELLS = [(v, n) for v, (_, names, _) in VARIATIONS.items() for n in SUITES if n in (names or n)]


@rules
@pytest.mark.parametrize(("variation", "name"), CELLS)
def test_variations_change_nothing(variation: str, name: str, rule: str, tmp_path: Path):
    vary_suite, _, identical = VARIATIONS[variation]
    more: dict[str, Any]
    suite, more = vary_suite(name, SUITES[name](), tmp_path, rule)
    expected = reference(name, rule)
    if "modules" in more:
        expected = run_fast(SUITES[name](), modules=more["modules"], **PLUS)
    result = run_fast(suite, **RULES[rule] | more)
    assert_same(result.model, expected.model, BOUNDS.get(name, EXACT))
    if identical:
        assert_identical(result.model, expected.model)
    if variation == "features on disk":
        assert not list(tmp_path.iterdir())
    if variation in ("features on disk", "inputs one by one"):
        logs = [[{k: v for k, v in record.items() if k != "seconds"}
                 for kind in ("module", "task") for record in log.of_kind(kind)]
                for log in (result.log, expected.log)]  # fmt: skip
        assert logs[0] == logs[1]


@rules
@suites
def test_inputs_and_models_are_untouched_and_nothing_is_shared(name: str, rule: str):
    suite = SUITES[name]()
    next(suite.merged.parameters()).requires_grad_(False)
    before = [tensor.clone() for tensor in vary.tensors_of(suite)]
    model = run_fast(suite, **RULES[rule]).model
    assert all(map(torch.equal, vary.tensors_of(suite), before))
    assert type(model) is type(suite.merged) and distance(model, suite.merged) > 1e-3
    flags = [[p.requires_grad for p in m.parameters()] for m in (model, suite.merged)]
    assert flags[0] == flags[1]
    for each in (model, suite.merged, suite.base, *suite.experts.values()):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in each.modules())
    shared = {p.data_ptr() for p in suite.merged.parameters()}
    assert not shared & {p.data_ptr() for p in model.parameters()}


STILL = [Knobs(), Knobs(alpha=1.0, lam=1e-3, rho=-1.0), Knobs(alpha=0.0, lam=3.0, rho=0.5)]


@suites
def test_nothing_moves_if_experts_and_base_are_the_merged_model(name: str):
    suite = SUITES[name]()
    experts = dict.fromkeys(suite.experts, suite.merged)
    still: Any = replace(suite, base=suite.merged, experts=experts)
    for knobs in STILL if name == "clip" else STILL[:1]:
        model = run_fast(still, knobs, batch_norm="merged").model
        assert_same(model, suite.merged, 1e-7)
        if name == "clip":  # the default eps moves weights by its share of eps + lambda
            shifted = run_fast(still, replace(knobs, eps=1e-4)).model
            assert distance(shifted, suite.merged) <= 1e-4 / (1e-4 + knobs.lam) + EXACT
    assert_same(run_fast(still, batch_norm="merged", **PLUS).model, suite.merged, 1e-7)


CLIP_LINEAR = {*(f"self_attn.{n}_proj" for n in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2"}
NORMS = {"layer_norm1", "layer_norm2"}
LLAMA = {f"self_attn.{n}_proj" for n in "qkvo"} | {f"mlp.{n}_proj" for n in ("gate", "up", "down")}
T5 = {f"layer.{i}.DenseReluDense.{n}" for i in (1, 2) for n in ("wi_0", "wi_1", "wo")}
T5 |= {f"layer.{part}.{n}" for part in ("0.SelfAttention", "1.EncDecAttention") for n in "qkvo"}
FEW = {"modules": ["mlp.*", "q_proj", "!fc2"]}
# Settings, and modules whose weights move; with other ones for biases.
MOVED: list[tuple[str, str, dict[str, Any], set[str], set[str] | None]] = [
    ("clip", "paper", {}, CLIP_LINEAR | NORMS, None),
    ("clip", "paper", {"calibrate_bias": False}, CLIP_LINEAR | NORMS, NORMS),
    ("clip", "paper", {"calibrate_norm": False}, CLIP_LINEAR, None),
    ("clip", "paper", {"modules": ["!mlp.fc1"]}, (CLIP_LINEAR | NORMS) - {"mlp.fc1"}, None),
    ("clip", "plus", {}, CLIP_LINEAR, None),
    ("clip", "plus", {"calibrate_bias": False}, CLIP_LINEAR, set()),
    ("clip", "plus", FEW, {"self_attn.q_proj", "mlp.fc1"}, None),
    *((name, rule, {}, modules, set())
      for name, modules in (("llama", LLAMA), ("t5", T5)) for rule in RULES),
]  # fmt: skip


def moved(suite: Suite, **settings: Any) -> set[str]:
    model, merged = run_fast(suite, **settings).model, suite.merged.named_parameters()
    return {name for name, value in merged if not torch.equal(model.get_parameter(name), value)}


@pytest.mark.parametrize(("name", "rule", "settings", "weights", "biases"), MOVED)
def test_chosen_parameters_of_the_blocks_move_and_nothing_else(
    name: str, rule: str, settings: dict[str, Any], weights: set[str], biases: set[str] | None
):
    suite = SUITES[name]()
    ends: dict[str, set[str]] = {"weight": set(), "bias": set()}
    for full in moved(suite, **RULES[rule] | settings):
        (block,) = (b for b in suite.blocks if full.startswith(f"{b}."))
        module, _, leaf = full.removeprefix(f"{block}.").rpartition(".")
        ends[leaf].add(module)
    assert ends == {"weight": weights, "bias": weights if biases is None else biases}
    if not settings:
        first, *others = suite.blocks
        names = moved(suite, modules=[f"!{first}.*"], **RULES[rule])
        assert {b for b in suite.blocks if any(n.startswith(f"{b}.") for n in names)} == {*others}


@pytest.mark.parametrize("untied", [True, False])
def test_tied_parameters_stay_tied(untied: bool):
    for suite in (tiny.decoder_suite(tied=not untied), tiny.t5_suite(depths=(1, 1), untied=untied)):
        model: Any = run_fast(suite).model
        head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        assert (head.data_ptr() == table.data_ptr()) is not untied


@rules
@pytest.mark.parametrize("name", ["clip", "t5", "gpt2", "convolutions"])
def test_dtypes_are_kept_and_models_are_finite(name: str, rule: str):
    for dtype in (torch.float32, torch.bfloat16, torch.float16)[: 3 if name == "clip" else 2]:
        suite = SUITES[name]().to(dtype)
        model = run_fast(suite, **RULES[rule]).model
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
        assert distance(model, suite.merged) > 1e-3
        if dtype is torch.float32:
            assert_same(model, reference(name, rule).model, 1e-3)


@rules
def test_a_callers_context_does_not_matter(rule: str):
    suite = clip_suite(seed=16, tasks=2).to(torch.float32)
    expected = run_fast(suite, **RULES[rule]).model
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    for context in (torch.no_grad, torch.enable_grad, torch.inference_mode, autocast):
        with context():
            model = run_fast(suite, **RULES[rule]).model
        assert_identical(model, expected)


@rules
def test_autocast_wraps_every_pass_and_statistics_stay_wide(rule: str):
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

    model = run_fast(suite, autocast=autocast, **RULES[rule]).model
    assert entered and all(inside) and len(inside) >= 3 * 4 * len(suite.blocks)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert EXACT < distance(model, run_fast(suite, **RULES[rule]).model) < 0.1
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("training", [True, False])
def test_training_mode_is_given_back(training: bool):
    suite = clip_suite()
    suite.merged.train(training).get_submodule(suite.blocks[0]).eval()
    modes = [module.training for module in suite.merged.modules()]
    assert [module.training for module in run_fast(suite).model.modules()] == modes
    suite.inputs["task_0"] = [{"pixel_values": torch.full((7, 3, 8, 8), torch.nan)}]
    with pytest.raises(CalibrationError, match="NaN"):
        run_fast(suite)
    assert [module.training for module in suite.merged.modules()] == modes
    assert all(parameter.requires_grad for parameter in suite.merged.parameters())


def test_samples_in_another_order_or_twice_do_not_matter():
    suite, fixed = stack_suite(biased, sizes=(4, 4)), FIXED["plus"]  # in the same folds
    doubled = vary.changed(suite, lambda batches: [*batches, *batches])
    assert_same(run_fast(doubled, **fixed).model, run_fast(suite, **fixed).model)
    turned = vary.changed(suite, lambda batches: [torch.cat(batches).roll(4, 0)])
    assert_same(run_fast(turned, **PLUS).model, run_fast(suite, **PLUS).model)


def weighing(weights: list[float], order: list[int]) -> Suite:
    """A block that works row by row, on samples of three positions with weights."""
    inputs: dict[str, list] = {}
    for index in range(2):
        mask = torch.tensor(weights)[:, None].expand(-1, 3)
        inputs[f"task_{index}"] = [
            {"x": tiny.normal(index, 4, 3, 4)[order], "attention_mask": mask}
        ]
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
    suite = tiny.replayed(Masked(block), inputs, ["layers.0"], seed=1)
    suite.family["mask"] = "attention_mask"
    return suite


@rules
def test_a_sample_of_weight_two_is_a_sample_given_twice(rule: str):
    def run(*given: Any) -> nn.Module:
        return run_fast(weighing(*given), **FIXED[rule]).model

    expected = run([1.0] * 5, [0, 1, 2, 3, 0])  # in the same fold
    for weights in ([2.0, 1, 1, 1], [1.0, 0.5, 0.5, 0.5]):
        assert_same(run(weights, [0, 1, 2, 3]), expected)
    assert distance(run([1.0] * 4, [0, 1, 2, 3]), expected) > 1e-3


def test_only_the_samples_asked_for_are_drawn():
    suite, drawn = clip_suite(seed=11, sizes=(2, 2, 2, 2)), list[str]()

    def stream(task: str) -> Iterator[Any]:
        for batch in suite.inputs[task]:
            drawn.append(task)
            yield batch

    streams: Any = {task: stream(task) for task in suite.inputs}
    result = run_fast(replace(suite, inputs=streams), samples_per_task=3)
    assert {task: drawn.count(task) for task in drawn} == dict.fromkeys(suite.inputs, 2)
    assert_same(result.model, run_fast(vary.parted(suite, 5)[0]).model)
    assert {r["samples"] for r in result.log.of_kind("task")} == {3}


def test_without_experts_features_no_pass_runs_behind_the_last_input():
    suite, counts, ended = clip_suite(sizes=(1,) * 7), list[int](), list[int]()
    last = suite.merged.get_submodule(f"{suite.blocks[-1]}.mlp.fc2")
    last.register_forward_hook(lambda *_: ended.append(1))
    for log_drift in (True, False):
        run_fast(suite, replace(PAPER, alpha=0.0), log_drift=log_drift)
        counts.append(len(ended) - sum(counts))
    # a task's first batch shows which input is the last
    assert counts[0] - counts[1] >= 6 * len(suite.experts)


def test_log_is_complete_and_writes_one_object_a_line(tmp_path: Path):
    suite, log = SUITES["clip"](), reference("clip", "paper").log
    log.write(tmp_path / "log.jsonl")
    lines = (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == log.records
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]
    visits = {(r["block"], r["task"]): r for r in log.of_kind("task")}
    assert set(visits) == {(b, t) for b in suite.blocks for t in suite.experts}
    for record in visits.values():
        read = 1 if record["block"] == suite.blocks[-1] else 5  # of the last one the class token
        assert (record["samples"], record["rows"]) == (7, 7 * read)
    solves = log.of_kind("module")
    assert len(solves) == 6 * len(suite.blocks)
    for record in solves:
        assert record["module"].startswith(record["block"])
        assert 0 <= record["residual"] < 1e-9
        assert 1 <= record["condition"] <= (len(suite.experts) + 0.05) / 0.05
    records = run_fast(tiny.gpt2_suite(padded=9)).log.of_kind("task")  # padding is no row
    assert {r["rows"] for r in records} == {2 + 5 + 3 + 4 + 1 + 5 + 2}
