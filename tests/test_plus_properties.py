"""FeatCal+ where there is little to learn from, and its trust in samples."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from calibrations import PLUS, assert_identical, cast, distance, run_fast
from plus_slow import calibrated_plus, listen
from tiny_convs import net_suite
from tiny_models import Suite, clip_suite, decoder_suite, residual_suite
from torch import nn
from tricky_models import biased, plain, stack_suite

from fusion_bench_featcal import Plus
from fusion_bench_featcal.results.remarks import largest_update

MAKERS: dict[str, Callable[[Sequence[int]], Suite]] = {
    "clip": lambda sizes: clip_suite(width=8, heads=2, hidden=10, seed=5, tasks=2, sizes=sizes),
    "residual": lambda sizes: residual_suite(sizes=sizes),
    "one map": lambda sizes: stack_suite(biased, sizes=sizes),
    "one map, no bias": lambda sizes: stack_suite(plain, sizes=sizes),
}


def plus(suite: Suite, **more: Any) -> Any:
    return run_fast(suite, **(PLUS | more)).model


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


def test_without_a_base_or_with_experts_that_are_the_base_samples_are_alone():
    suite, alone = stack_suite(biased), {"rule": Plus(gamma=0.0)}
    assert_identical(plus(suite, has_base=False), plus(suite, **alone))
    suite.experts = dict.fromkeys(suite.experts, suite.base)
    assert_identical(plus(suite), plus(suite, **alone))
    assert distance(plus(suite), suite.merged) > 1e-3


def trained_suite() -> Suite:
    """A suite whose experts' first modules differ from the base by what their samples give."""
    suite = clip_suite()
    block = suite.blocks[0]
    names = [f"{block}.self_attn.{part}_proj" for part in "qkv"]
    for task, expert in suite.experts.items():
        x = listen(suite.merged, suite.inputs[task], block, names[:1]).inputs(names[0])
        values, vectors = torch.linalg.eigh(x.T @ x / len(x))
        for name in names:
            start = suite.base.get_submodule(name).weight
            root = vectors * values.clamp_min(0).sqrt() @ vectors.T
            expert.get_submodule(name).weight.data = start + root.to(start)
    return suite


def warnings_of(suite: Suite, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        result = run_fast(suite, rule=Plus())
    messages = [r.getMessage() for r in caplog.records if "trust" in r.getMessage()]
    named = [record["task"] for record in result.log.of_kind("trust") if record["named"]]
    assert [message.split()[1].rstrip(":") for message in messages] == named
    return messages


def test_samples_of_other_tasks_are_named(caplog: pytest.LogCaptureFixture) -> None:
    suite = trained_suite()
    assert warnings_of(suite, caplog) == []
    tasks = list(suite.inputs)
    suite.inputs = dict(zip(tasks, [suite.inputs[t] for t in [*tasks[1:], tasks[0]]], strict=True))
    messages = warnings_of(suite, caplog)
    for name, value in calibrated_plus(suite).items():  # such samples count less
        torch.testing.assert_close(plus(suite).get_parameter(name), value)
    assert len(messages) == len(tasks)
    for task, message in zip(tasks, messages, strict=True):
        assert message.startswith(f"task {task}: its calibration samples")
        assert f"method.calibration_data.{task}" in message


def test_convolutions_have_neither_trust_nor_rows_out_of_weights() -> None:
    suite = net_suite()
    result = run_fast(suite, rule=Plus())
    assert result.log.of_kind("trust") == []
    assert_identical(result.model, run_fast(suite, rule=Plus(gamma=0.0)).model)


def test_trust_is_measured_only_where_rows_out_of_weights_join() -> None:
    suite = clip_suite(tasks=2)
    assert run_fast(suite, rule=Plus()).log.of_kind("trust")
    others: list[dict[str, Any]] = [
        {}, {"rule": Plus(gamma=0.0)}, {"rule": Plus(gammas=dict.fromkeys(suite.experts, 1.0))},
        {"rule": Plus(), "has_base": False},
    ]  # fmt: skip
    assert not any(run_fast(suite, **more).log.of_kind("trust") for more in others)
