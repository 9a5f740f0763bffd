"""FeatCal+ where there is little to learn from, and what it refuses."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from calibrations import PLUS, assert_identical, cast, distance, run_fast
from oracle import record
from tiny_models import Suite, clip_suite, decoder_suite, residual_suite
from torch import Tensor, nn
from tricky_models import (
    biased,
    idle,
    plain,
    shares_sometimes,
    stack_suite,
    two_maps,
)

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.results.remarks import largest_update

MAKERS: dict[str, Callable[[Sequence[int]], Suite]] = {
    "clip": lambda sizes: clip_suite(tasks=2, sizes=sizes, width=8, heads=2, depth=1),
    "residual": lambda sizes: residual_suite(sizes=sizes),
    "one map": lambda sizes: stack_suite(biased, sizes=sizes),
    "one map, no bias": lambda sizes: stack_suite(plain, sizes=sizes),
}


def plus(suite: Suite, **more: Any) -> Any:
    return run_fast(suite, **(PLUS | more))


def refused(message: str) -> Any:
    return pytest.raises(CalibrationError, match=message)


def is_finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in model.parameters())


def lambdas(result: Any) -> list[Any]:
    return [record["lambdas"] for record in result.log.of_kind("module")]


def alike(suite: Suite) -> Suite:
    """All samples of all tasks are the first task's first."""

    def of(value: Any, count: int) -> Any:
        if isinstance(value, dict):
            return {name: of(part, count) for name, part in value.items()}
        return value[:1].repeat(count, *[1] * (value.ndim - 1))

    first = next(iter(suite.inputs.values()))[0]
    return replace(suite, inputs={task: [of(first, 5), of(first, 2)] for task in suite.inputs})


def drift(suite: Suite, model: nn.Module) -> float:
    """Distance of the last block's outputs from the experts', over all tasks."""
    total = 0.0
    for task, expert in suite.experts.items():
        batches = cast(suite.inputs, next(model.parameters()).dtype)[task]
        sides = [record(m, batches, [], suite.blocks[-1:])[1] for m in (model, expert)]
        ours, theirs = (torch.cat(next(iter(side.values()))) for side in sides)
        total += float((ours - theirs).norm() / theirs.norm())
    return total


@pytest.mark.parametrize(
    ("samples", "dtype"), [(1, torch.float32), (2, torch.float64), (3, torch.float32)]
)
@pytest.mark.parametrize("name", ["clip", "one map"])
def test_fewer_samples_than_folds_are_enough(name: str, samples: int, dtype: torch.dtype):
    suite = MAKERS[name]((samples,)).to(dtype)
    result = plus(suite)
    assert is_finite(result.model)
    assert 0 < distance(result.model, suite.merged) < 5
    # of one sample none can be left out: then half of the way to the experts, and no further
    assert ([1.0, None] in lambdas(result)) == (samples == 1)
    assert all(pair == [1.0, None] for pair in lambdas(result)) == (samples == 1)


def test_one_sample_with_one_stage_takes_the_other_default():
    result = plus(MAKERS["residual"]((1,)), stages=1)
    assert {*map(tuple, lambdas(result))} == {(None, 1.0)}


def test_a_task_with_one_sample_beside_others():
    suite = MAKERS["one map"]((4, 3))
    whole = plus(suite)
    suite.inputs["task_1"] = [suite.inputs["task_1"][0][:1]]
    few = plus(suite, samples_per_task=7)
    assert is_finite(few.model)
    assert distance(few.model, whole.model) > 1e-3
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
    model = plus(suite).model
    assert is_finite(model)
    if name != "clip":  # whose last block is calibrated for the class token alone
        assert drift(suite, model) < drift(suite, suite.merged)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
def test_of_inputs_that_do_not_vary_biases_learn_and_weights_beside_them_do_not(
    bias: bool, dtype: torch.dtype
):
    suite = alike(stack_suite(biased, tasks=1)).to(dtype)
    result = plus(suite, calibrate_bias=bias)
    found, merged = (dict(m.named_parameters()) for m in (result.model, suite.merged))
    for block in suite.blocks:
        weight, shift = f"{block}.only.weight", f"{block}.only.bias"
        assert torch.equal(found[weight], merged[weight]) == bias
        assert torch.equal(found[shift], merged[shift]) != bias
    drifts = [record["relative_drift_after"] for record in result.log.of_kind("task")]
    # one input asks for no more than a bias; in float32 sums round more than what is left
    assert max(drifts) < (1e-5 if dtype == torch.float64 else 1e-4)


def scaled_embeddings(suite: Suite, factor: float) -> Suite:
    expert: Any = copy.deepcopy(suite.experts["task_0"])
    with torch.no_grad():
        expert.get_input_embeddings().weight.mul_(factor)
    return replace(suite, experts=suite.experts | {"task_0": expert})


@pytest.mark.parametrize("factor", [1.0, 1e8])
def test_an_update_far_larger_than_the_experts_own_is_named_once(factor: float):
    suite = scaled_embeddings(decoder_suite("llama"), factor)
    result = plus(suite)
    (worst, name) = max(
        (record["relative_update"], record["module"]) for record in result.log.of_kind("module")
    )
    found, merged, *experts = (
        model.get_parameter(f"{name}.weight").detach()
        for model in (result.model, suite.merged, *suite.experts.values())
    )
    largest = max(expert.norm() for expert in experts)
    assert worst == pytest.approx(float((found - merged).norm() / largest), rel=1e-5)
    notes = largest_update("featcal", result.log.records)
    if factor == 1:
        assert notes == []
        return
    (note,) = notes
    assert note.startswith(f"featcal: module {name}: the update is {worst:.3g} times as large")
    assert note.endswith("of task task_0")
    unlogged = [record for record in result.log.records if record["kind"] == "module"]
    (note,) = largest_update("featcal", unlogged)  # without drift no task is known
    assert note.endswith("calibration samples")


def test_inputs_of_zero_move_nothing():
    suite = stack_suite(plain)
    for model in (suite.merged, suite.base, *suite.experts.values()):
        torch.nn.init.zeros_(model.get_parameter("embed.bias"))
    suite.inputs = {task: [torch.zeros(4, 4)] for task in suite.inputs}
    assert_identical(plus(suite).model, suite.merged)


def test_a_module_that_no_sample_reaches():
    with refused(r"block layers\.0: module layers\.0\.spare .*method\.modules=\['!layers\.0\.spar"):
        plus(stack_suite(idle))
    found = plus(stack_suite(idle), modules=["!spare"]).model
    for block in ("layers.0", "layers.1"):
        name = f"{block}.spare.weight"
        merged = stack_suite(idle).merged.get_parameter(name)
        assert torch.equal(found.get_parameter(name), merged)


@two_maps
def by_size(block: Any, hidden: Tensor) -> Tensor:
    """Runs one of its maps for large batches only."""
    hidden = hidden + block.first(hidden).tanh()
    return hidden + block.second(hidden.cos()).tanh() if len(hidden) > 2 else hidden


@two_maps
def writes_twice(block: Any, hidden: Tensor) -> Tensor:
    """Adds the output of one of its maps a second time for small batches."""
    hidden = hidden + block.first(hidden)
    return hidden + block.second(hidden) + (0 if len(hidden) > 2 else block.first(hidden))


def one_task_in_small_batches(block: Callable[[], nn.Module]) -> Suite:
    suite = stack_suite(block, sizes=(4, 4))
    suite.inputs["task_1"] = [part for b in suite.inputs["task_1"] for part in b.split(2)]
    return suite


def test_a_module_that_one_task_does_not_reach():
    with refused(r"layers\.0\.second.*method\.modules=\['!layers\.0\.second'\]"):
        plus(one_task_in_small_batches(by_size))


UNLIKE = r"block layers\.0: module layers\.0\.first is not called alike.*modules=\['!layers\.0\.fir"


def test_modules_that_do_not_always_share_their_input():
    with refused(UNLIKE):
        plus(one_task_in_small_batches(shares_sometimes))


def test_a_module_that_writes_more_often_in_some_batches():
    with refused(UNLIKE):
        plus(one_task_in_small_batches(writes_twice))


def test_a_task_whose_expert_gives_almost_nothing():
    suite = stack_suite(plain, tasks=3)
    expert = suite.experts["task_2"]
    with torch.no_grad():
        expert.get_parameter("layers.0.only.weight").mul_(1e-4)
    message = r"task task_2, block layers\.0, module layers\.0\.only:.*almost zero"
    with refused(rf"{message}.*modelpool\.models\.task_2"):
        plus(suite)
    with torch.no_grad():
        expert.get_parameter("layers.0.only.weight").mul_(100)
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


def with_huge_expert(size: float) -> Suite:
    suite = stack_suite(biased, tasks=3).to(torch.float32)
    with torch.no_grad():
        suite.experts["task_1"].get_parameter("layers.0.only.weight").mul_(size)
    return suite


def test_features_that_overflow_name_the_task_and_the_module():
    place = r"task task_1, block layers\.\d, module layers\.\d\.only:"
    with refused(rf"{place}.*overflow.*fabric\.precision.*modelpool\.models\.task_1"):
        plus(with_huge_expert(1e38))


PAPERS = r"method\.order=block, method\.target=module and method\.ridge=fixed"
CLASHES: list[tuple[dict[str, Any], str]] = [
    ({"stages": 2}, r"^method\.stages=2 needs method\.ridge=kfold$"),
    ({"stages": 2, "order": "module", "calibrate_norm": False}, r"stages=2 needs .*kfold$"),
    *(
        (change, rf"^method\.calibrate_norm must be false unless {PAPERS}$")
        for change in ({"order": "module"}, {"target": "residual"}, {"ridge": "kfold"})
    ),
    (
        PLUS | {"token_weights": "demo_last_block"},
        rf"^method\.token_weights=demo_last_block needs {PAPERS}$",
    ),
    *(
        (
            PLUS | {name: value},
            rf"^method\.{name}={value} has no part in method\.ridge=kfold: leave it at its "
            rf"default, {default}$",
        )
        for name, value, default in (
            ("ridge_lambda", 0.1, 0.05), ("mix_alpha", 0.5, 0.3), ("eps", 0.5, "1e-08"),
        )
    ),
    (PLUS | {"eps": 0.5, "token_weights": "demo_last_block"}, r"; method\.eps="),
    *(({name: "x"}, rf"method\.{name} must be one of ") for name in ("order", "target", "ridge")),
    ({"stages": 3}, r"method\.stages must be one of 1, 2, got 3"),
    ({"stages": True}, r"method\.stages must be one of 1, 2, got True"),
    *(
        ({"augment": value}, r"method\.augment must be null, auto, jitter, or a mapping with `_ta")
        for value in (
            "flip", True, 3, {}, {"copies": 2}, {"_target_": 3}, {"_target_": "x", "copies": 0},
            {"_target_": "x", "copies": 1.5}, ["jitter"],
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("values", "message"), CLASHES, ids=str)
def test_settings_that_clash_say_so(values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        FeatCalSettings(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"order": "module", "mix_alpha": 0.5, "ridge_lambda": 0.1},
        {"target": "residual", "eps": 0.0, "anchor_rho": 1.0},
        {"ridge": "kfold", "stages": 2, "anchor_rho": 1.5},
        {"augment": {"_target_": "some.thing", "copies": 1}},
    ],
    ids=str,
)
def test_parts_of_it_go_with_the_settings_that_they_use(values: dict[str, Any]):
    settings = FeatCalSettings(calibrate_norm=False, **values)
    for name, value in values.items():
        assert settings.as_dict()[name] == value


def test_no_base_is_needed_where_nothing_is_anchored():
    suite = stack_suite(plain)
    for changes in ({"anchor_rho": 1.0}, {"stages": 1}):
        assert_identical(plus(suite, has_base=False, **changes).model, plus(suite, **changes).model)
    for changes in ({}, {"ridge": "fixed", "stages": 1}):
        with pytest.raises(ValueError, match=r"method\.anchor_rho = 2\.0 needs the base model"):
            plus(suite, has_base=False, **changes)
