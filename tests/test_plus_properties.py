"""Properties of every calibration by FeatCal+, also where there is little to learn from."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from calibrations import (
    EXACT,
    PLUS,
    assert_identical,
    assert_same,
    cast,
    distance,
    replay,
    run_fast,
)
from plus_slow import listen
from test_calibrate_errors import Masked
from test_calibrate_properties import tensors_of
from tiny_models import (
    ROUNDING,
    Suite,
    clip_suite,
    decoder_suite,
    normal,
    replayed,
    residual_suite,
    t5_suite,
)
from torch import Tensor, nn
from tricky_models import biased, idle, plain, stack_suite, two_maps

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.core.ridge import choose_ridge
from fusion_bench_featcal.results.remarks import largest_update
from fusion_bench_featcal.rules import plus as plus_rule
from fusion_bench_featcal.rules.plus import Plus

LONG = 10 * ROUNDING  # language models round in float32; four solves a block pass it on
TASKS = [f"task_{index}" for index in range(3)]
# Else the number of samples has a part in how much rows out of weights count.
FIXED: dict[str, Any] = {"rule": Plus(gammas=dict.fromkeys(TASKS, 2.0))}


def plus(suite: Suite, **more: Any) -> Any:
    return run_fast(suite, **(PLUS | more)).model


def refused(message: str) -> Any:
    return pytest.raises(CalibrationError, match=message)


def moved(suite: Suite, **more: Any) -> set[str]:
    """Names of the parameters that change, within their blocks."""
    found, ends = plus(suite, **more), set[str]()
    for name, value in suite.merged.named_parameters():
        if not torch.equal(found.get_parameter(name), value):
            (block,) = (b for b in suite.blocks if name.startswith(f"{b}."))
            ends.add(name.removeprefix(f"{block}."))
    return ends


def small_clip(*, depth: int = 2, tasks: int = 2, sizes: Sequence[int] = (4, 1)) -> Suite:
    shape: dict[str, int] = {"width": 8, "heads": 2, "hidden": 10, "seed": 5}
    return clip_suite(depth=depth, tasks=tasks, sizes=sizes, **shape)


def small_llama() -> Suite:
    return decoder_suite("llama", depth=1, seed=1)


MAKERS: dict[str, Callable[[Sequence[int]], Suite]] = {
    "clip": lambda sizes: small_clip(sizes=sizes),
    "residual": lambda sizes: residual_suite(sizes=sizes),
    "one map": lambda sizes: stack_suite(biased, sizes=sizes),
    "one map, no bias": lambda sizes: stack_suite(plain, sizes=sizes),
}


@pytest.mark.parametrize("make", [small_clip, small_llama])
def test_inputs_and_all_models_are_untouched(make: Callable[[], Suite]):
    suite = make()
    before = [tensor.clone() for tensor in tensors_of(suite)]
    model = plus(suite)
    assert all(map(torch.equal, tensors_of(suite), before))
    assert distance(model, suite.merged) > 1e-3
    for each in (model, suite.merged, suite.base, *suite.experts.values()):
        for module in each.modules():
            assert not (module._forward_hooks or module._forward_pre_hooks)
    shared = {p.data_ptr() for p in suite.merged.parameters()}
    assert not shared & {p.data_ptr() for p in model.parameters()}


def test_order_of_tasks_does_not_matter():
    suite = small_clip(tasks=3)
    backwards = replace(suite, experts=dict(reversed(suite.experts.items())))
    backwards.inputs = dict(reversed(suite.inputs.items()))
    assert_same(plus(backwards), plus(suite), EXACT)


def test_batch_size_of_texts_does_not_matter():
    suite = decoder_suite("mistral", extra=1, depth=1)
    parts: dict[str, list] = {
        task: [{k: v[i : i + 1] for k, v in b.items()} for b in bs for i in range(len(b["labels"]))]
        for task, bs in suite.inputs.items()
    }
    assert_same(plus(replace(suite, inputs=parts)), plus(suite), LONG)


def test_all_tasks_twice_are_all_tasks_once():
    suite = small_clip()
    twice = replace(suite)
    twice.experts = suite.experts | {f"{t} again": e for t, e in suite.experts.items()}
    twice.inputs = suite.inputs | {f"{t} again": b for t, b in suite.inputs.items()}
    assert_same(plus(twice), plus(suite), EXACT)
    with pytest.raises(AssertionError, match="relative distance"):  # but a single one weighs
        del twice.experts["task_1 again"], twice.inputs["task_1 again"]
        assert_same(plus(twice), plus(suite), 1e-3)


def test_all_samples_once_more_in_their_folds_change_nothing():
    suite = stack_suite(biased, sizes=(4, 4))
    doubled = {task: [*batches, *batches] for task, batches in suite.inputs.items()}
    assert_same(plus(replace(suite, inputs=doubled), **FIXED), plus(suite, **FIXED), EXACT)
    turned = {task: [torch.cat(bs).roll(4, 0)] for task, bs in suite.inputs.items()}
    assert_same(plus(replace(suite, inputs=turned)), plus(suite), EXACT)


def test_outputs_do_not_weigh_by_their_size():
    suite = stack_suite(biased, tasks=2, sizes=(5, 4), seed=2)
    loud, name = copy.deepcopy(suite), "layers.1.only"
    with torch.no_grad():
        for leaf in ("weight", "bias"):  # ten times as far, and ten times as much
            for model in (loud.merged, loud.base, *loud.experts.values()):
                model.get_parameter(f"{name}.{leaf}").mul_(10)
    found, wanted = (plus(s).get_parameter(f"{name}.weight") for s in (loud, suite))
    torch.testing.assert_close(found, 10 * wanted, rtol=1e-8, atol=1e-10)


def weighing(weights: list[float], order: list[int]) -> Suite:
    """A block that works row by row, on samples of three positions with weights."""
    inputs: dict[str, list] = {}
    for index in range(2):
        x = normal(index, 4, 3, 4)[order]
        mask = torch.tensor(weights)[:, None].expand(-1, 3)
        inputs[f"task_{index}"] = [{"x": x, "attention_mask": mask}]
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
    suite = replayed(Masked(block), inputs, ["layers.0"], seed=1)
    suite.family["mask"] = "attention_mask"
    return suite


def test_sample_of_weight_two_is_a_sample_given_twice_in_its_fold():
    wanted = plus(weighing([1.0] * 5, [0, 1, 2, 3, 0]), **FIXED)
    assert_same(plus(weighing([2.0, 1, 1, 1], [0, 1, 2, 3]), **FIXED), wanted, EXACT)
    assert distance(plus(weighing([1.0] * 4, [0, 1, 2, 3]), **FIXED), wanted) > 1e-3
    halves = plus(weighing([1.0, 0.5, 0.5, 0.5], [0, 1, 2, 3]), **FIXED)
    assert_same(halves, wanted, EXACT)


def test_padding_changes_nothing_and_may_hold_anything():
    suite = decoder_suite(depth=1, extra=1)
    wanted = plus(decoder_suite(depth=1))
    for batches in suite.inputs.values():
        for batch in batches:
            batch["input_ids"][batch["attention_mask"] == 0] = 17
    assert_same(plus(suite), wanted, LONG)


def test_labels_that_are_no_inputs_have_no_part():
    suite = small_llama()
    shuffled, numbers = copy.deepcopy(suite), random.Random(1)
    for batches in shuffled.inputs.values():
        for batch in batches:
            labels = batch["labels"].flatten().tolist()
            numbers.shuffle(labels)
            batch["labels"] = torch.tensor(labels).view_as(batch["labels"])
    assert_identical(plus(shuffled), plus(suite))
    with pytest.raises(AssertionError, match="differs"):
        assert_identical(plus(suite, decoder_rows="targets"), plus(suite))


PARTS = {f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")} | {"mlp.fc1", "mlp.fc2"}


def test_weights_and_biases_of_linear_modules_change_and_nothing_else():
    suite = small_clip()
    both = {f"{part}.{leaf}" for part in PARTS for leaf in ("weight", "bias")}
    assert moved(suite) == both
    assert moved(suite, calibrate_bias=False) == {f"{part}.weight" for part in PARTS}
    some = moved(suite, modules=["mlp.*", "q_proj", "!fc2"])
    assert some == {name for name in both if "q_proj" in name or "fc1" in name}


def test_one_block_alone():
    suite = small_clip()
    for one in range(2):
        found = plus(suite, modules=[f"layers.{one}.*"])
        sides = [[m.get_submodule(block) for m in (found, suite.merged)] for block in suite.blocks]
        assert_identical(*sides[1 - one])
        assert distance(*sides[one]) > 1e-3


@pytest.mark.parametrize("make", [small_clip, t5_suite])
def test_log_of_the_drift_changes_no_bit(make: Callable[[], Suite]):
    suite = make().to(torch.float32)
    assert_identical(plus(suite, log_drift=False), plus(suite, log_drift=True))


def test_replay_family_equals_the_clip_family_but_for_the_last_block():
    suite = small_clip()
    kept = {"modules": [f"!{suite.blocks[-1]}.*"]}  # of which replay knows no rows that are unread
    assert_same(plus(suite, family=replay(suite), **kept), plus(suite, **kept), EXACT)
    assert distance(plus(suite, family=replay(suite)), plus(suite)) > 1e-3


@pytest.mark.parametrize("make", [small_clip, partial(small_clip, sizes=(4, 2)), small_llama])
def test_float32_agrees_with_float64(make: Callable[[], Suite], monkeypatch: pytest.MonkeyPatch):
    suite, ridges = make(), list[float]()

    def noted(*args: Any, **more: Any) -> float:
        ridges.append(choose_ridge(*args, **more))
        return ridges[-1]

    monkeypatch.setattr(plus_rule, "choose_ridge", noted)
    wide, narrow = plus(suite), suite.to(torch.float32)
    remaining = iter(list(ridges))
    # On nearly perfect fits two ridges tie within 1e-7, and rounding chooses: the same ones here.
    monkeypatch.setattr(plus_rule, "choose_ridge", lambda *_, **__: next(remaining))
    assert_same(plus(narrow), wide, 1e-4)
    monkeypatch.undo()
    assert_same(plus(narrow), wide, 1e-3)


@pytest.mark.parametrize(
    ("make", "dtype"), [(small_clip, torch.float16), (t5_suite, torch.bfloat16)]
)
def test_narrow_models_stay_narrow_and_finite(make: Callable[[], Suite], dtype: torch.dtype):
    suite = make().to(dtype)
    found = plus(suite)
    assert {p.dtype for p in found.parameters()} == {dtype}
    assert is_finite(found)
    assert distance(found, suite.merged) > 1e-3


def test_autocast_wraps_every_pass_and_no_solve():
    suite, inside = small_clip(depth=1).to(torch.float32), []
    for model in (suite.merged, *suite.experts.values()):
        for block in suite.blocks:
            model.get_submodule(block).register_forward_pre_hook(
                lambda *_: inside.append(torch.is_autocast_enabled("cpu"))
            )
    found = plus(suite, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    assert all(inside) and len(inside) >= 6
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    assert is_finite(found)
    exact = plus(suite)
    assert 1e-6 < distance(found, exact) < 1
    with torch.autocast("cpu", torch.bfloat16):
        assert_identical(plus(suite), exact)


def is_finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in model.parameters())


def alike(suite: Suite) -> Suite:
    """All samples of all tasks are the first task's first."""

    def of(value: Any, count: int) -> Any:
        if isinstance(value, dict):
            return {name: of(part, count) for name, part in value.items()}
        return value[:1].repeat(count, *[1] * (value.ndim - 1))

    first = next(iter(suite.inputs.values()))[0]
    return replace(suite, inputs={task: [of(first, 5), of(first, 2)] for task in suite.inputs})


@pytest.mark.parametrize(
    ("samples", "dtype"), [(1, torch.float32), (2, torch.float64), (3, torch.float32)]
)
@pytest.mark.parametrize("name", ["clip", "one map"])
def test_fewer_samples_than_folds_are_enough(name: str, samples: int, dtype: torch.dtype):
    suite = MAKERS[name]((samples,)).to(dtype)
    result = run_fast(suite, **PLUS)
    assert is_finite(result.model)
    assert 0 < distance(result.model, suite.merged) < 5
    # of one sample none can be left out
    ridges = [record["ridge"] for record in result.log.of_kind("module")]
    assert all(ridge == 1 for ridge in ridges) == (samples == 1)


def test_a_task_with_one_sample_beside_others():
    suite = MAKERS["one map"]((4, 3))
    whole = plus(suite)
    suite.inputs["task_1"] = [suite.inputs["task_1"][0][:1]]
    few = run_fast(suite, samples_per_task=7, **PLUS)
    assert is_finite(few.model)
    assert distance(few.model, whole) > 1e-3
    counts = {r["task"]: r["samples"] for r in few.log.of_kind("task")}
    assert counts == {"task_0": 7, "task_1": 1}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("clip", torch.float32),
        ("one map, no bias", torch.float32),
        ("residual", torch.float64),
    ],
)
def test_samples_that_are_all_the_same_are_no_error(name: str, dtype: torch.dtype):
    suite = alike(MAKERS[name]((5,))).to(dtype)
    model = plus(suite)
    assert is_finite(model)
    assert distance(model, suite.merged) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
def test_of_inputs_that_do_not_vary_biases_learn_and_weights_beside_them_do_not(
    bias: bool, dtype: torch.dtype
):
    suite = alike(stack_suite(biased, tasks=1)).to(dtype)
    model = plus(suite, calibrate_bias=bias, rule=Plus(gamma=0.0, calibrate_bias=bias))
    found, merged = (dict(m.named_parameters()) for m in (model, suite.merged))
    for block in suite.blocks:
        weight, shift = f"{block}.only.weight", f"{block}.only.bias"
        assert torch.equal(found[weight], merged[weight]) == bias
        assert torch.equal(found[shift], merged[shift]) != bias
        batches = cast(suite.inputs, dtype)["task_0"]
        ours, theirs = (
            listen(side, batches, block, [f"{block}.only"]).outputs([f"{block}.only"])
            for side in (model, suite.experts["task_0"])
        )
        # one input asks for no more than a bias; in float32 sums round more than what is left
        bound = 1e-5 if dtype == torch.float64 else 1e-4
        assert (ours - theirs).norm() < bound * theirs.norm()


@pytest.mark.parametrize("factor", [1.0, 1e8])
def test_an_update_far_larger_than_the_merged_weights_is_named_once(factor: float):
    suite = decoder_suite("llama")
    with torch.no_grad():
        suite.experts["task_0"].get_parameter("model.layers.0.mlp.up_proj.weight").mul_(factor)
    log = run_fast(suite, **PLUS).log
    (worst, name) = max((r["relative_update"], r["module"]) for r in log.of_kind("module"))
    notes = largest_update("featcal", log.records)
    if factor == 1:
        assert notes == []
        return
    (note,) = notes
    assert note.row == "featcal"
    assert note.text.startswith(f"module {name}: the update is {worst:.3g} times as large")
    assert note.text.endswith("of task task_0")
    unlogged = [record for record in log.records if record["kind"] == "module"]
    (note,) = largest_update("featcal", unlogged)  # without drift no task is known
    assert note.text.endswith("calibration samples")


def test_inputs_of_zero_move_nothing():
    suite = stack_suite(plain)
    for model in (suite.merged, suite.base, *suite.experts.values()):
        torch.nn.init.zeros_(model.get_parameter("embed.bias"))
    suite.inputs = {task: [torch.zeros(4, 4)] for task in suite.inputs}
    assert_identical(plus(suite), suite.merged)


def test_a_module_that_no_sample_reaches():
    with refused(r"block layers\.0: module layers\.0\.spare .*method\.modules=\['!layers\.0\.spar"):
        plus(stack_suite(idle))
    found = plus(stack_suite(idle), modules=["!spare"])
    for block in ("layers.0", "layers.1"):
        name = f"{block}.spare.weight"
        merged = stack_suite(idle).merged.get_parameter(name)
        assert torch.equal(found.get_parameter(name), merged)


@two_maps
def by_size(block: Any, hidden: Tensor) -> Tensor:
    """Runs one of its maps for large batches only."""
    hidden = hidden + block.first(hidden).tanh()
    return hidden + block.second(hidden.cos()).tanh() if len(hidden) > 2 else hidden


def test_a_module_that_one_task_does_not_reach():
    suite = stack_suite(by_size, sizes=(4, 4))
    suite.inputs["task_1"] = [part for b in suite.inputs["task_1"] for part in b.split(2)]
    with refused(r"layers\.0\.second.*method\.modules=\['!layers\.0\.second'\]"):
        plus(suite)


def test_samples_that_are_not_finite_name_their_task():
    for make, message in (
        (clip_suite, r"task task_1: calibration batch 1, input 'pixel_values', has NaN"),
        (residual_suite, r"task task_1: calibration batch 1, input 0, has NaN"),
    ):
        suite = make()
        batch = suite.inputs["task_1"][1]
        images = batch["pixel_values"] if isinstance(batch, dict) else batch
        images[0].view(-1)[0] = torch.nan
        with refused(rf"{message}.*modelpool\.train_datasets\.task_1"):
            plus(suite)


def test_features_that_overflow_name_the_task_and_the_module():
    suite = stack_suite(biased, tasks=3).to(torch.float32)
    with torch.no_grad():
        suite.experts["task_1"].get_parameter("layers.0.only.weight").mul_(1e38)
    place = r"task task_1, block layers\.\d, module layers\.\d\.only:"
    with refused(rf"{place}.*overflow.*fabric\.precision.*modelpool\.models\.task_1"):
        plus(suite)


def test_without_a_base_or_with_experts_that_are_the_base_samples_are_alone():
    suite, alone = stack_suite(biased), {"rule": Plus(gamma=0.0)}
    assert_identical(plus(suite, has_base=False), plus(suite, **alone))
    suite.experts = dict.fromkeys(suite.experts, suite.base)
    assert_identical(plus(suite), plus(suite, **alone))
    assert distance(plus(suite), suite.merged) > 1e-3
