"""Properties of every calibration by FeatCal+: `calibrate` from the outside."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import (
    EXACT,
    PLUS,
    Overheard,
    assert_identical,
    assert_same,
    distance,
    replay,
    run_fast,
)
from test_calibrate_errors import Masked
from test_calibrate_properties import tensors_of
from test_calibrate_surroundings import save_experts
from tiny_models import (
    ROUNDING,
    Suite,
    clip_suite,
    decoder_suite,
    normal,
    replayed,
    t5_suite,
)
from tiny_open_clip import tower_suite
from torch import nn
from tricky_models import biased, stack_suite

SLOW = pytest.mark.slow
LONG = 10 * ROUNDING  # language models round in float32; four solves a block pass it on


def plus(suite: Suite, **more: Any) -> nn.Module:
    return run_fast(suite, **(PLUS | more)).model


def moved(suite: Suite, **more: Any) -> set[str]:
    """Names of the parameters that change, within their blocks."""
    found, ends = plus(suite, **more), set[str]()
    for name, value in suite.merged.named_parameters():
        if not torch.equal(found.get_parameter(name), value):
            (block,) = (b for b in suite.blocks if name.startswith(f"{b}."))
            ends.add(name.removeprefix(f"{block}."))
    return ends


def small_clip(*, depth: int = 1, tasks: int = 2, sizes: Sequence[int] = (4, 1)) -> Suite:
    shape: dict[str, int] = {"width": 8, "heads": 2, "hidden": 10, "seed": 5}
    return clip_suite(depth=depth, tasks=tasks, sizes=sizes, **shape)


def small_t5() -> Suite:
    return t5_suite(depths=(1, 1), seed=1)


def small_llama() -> Suite:
    return decoder_suite("llama", depth=1, seed=1)


SEVERAL = [small_clip, *(pytest.param(make, marks=SLOW) for make in (tower_suite, small_t5))]


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
            assert "forward" not in vars(module)  # as parts have that are replayed
    shared = {p.data_ptr() for p in suite.merged.parameters()}
    assert not shared & {p.data_ptr() for p in model.parameters()}


def test_a_failed_run_leaves_no_trace_in_a_model():
    suite, calls = small_clip(), list[int]()
    merged = copy.deepcopy(suite.merged)

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 5:  # in a turn in which the attention is replayed
            raise KeyboardInterrupt

    merged.get_submodule(f"{suite.blocks[0]}.mlp").register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        plus(replace(suite, merged=merged), in_place=True)
    assert not any("forward" in vars(module) for module in merged.modules())


@pytest.mark.parametrize("make", [lambda: small_clip(depth=2), small_llama])
def test_a_batch_more_is_one_run_more_of_every_linear_module_on_either_side(
    make: Callable[[], Suite],
):
    counts: list[dict[str, int]] = []
    for more in (0, 3):
        suite, count = make(), dict[str, int]()
        suite.inputs = {t: [*batches, *batches[:1] * more] for t, batches in suite.inputs.items()}
        merged = copy.deepcopy(suite.merged)

        def add(name: str, count: dict[str, int] = count) -> Callable[..., None]:
            return lambda *_: count.update({name: count.get(name, 0) + 1})

        for name, module in merged.named_modules():
            if isinstance(module, nn.Linear) and name.startswith(suite.blocks[0]):
                module.register_forward_hook(add(name))
        plus(replace(suite, merged=merged), in_place=True, row_weights="uniform")
        counts.append(count)
    runs = 2 * 3 * len(make().experts)  # experts run in copies of the model, with its hooks
    assert {counts[1][name] - counts[0][name] for name in counts[0]} == {runs}


@pytest.mark.parametrize(
    "make", [small_clip, pytest.param(tower_suite, marks=SLOW), pytest.param(small_t5, marks=SLOW)]
)
def test_in_place_gives_the_same_model(make: Callable[[], Suite]):
    suite = make()
    wanted = plus(suite)
    merged = copy.deepcopy(suite.merged)
    found = plus(replace(suite, merged=merged), in_place=True)
    assert_identical(found, wanted)
    assert found is merged or make is tower_suite  # which is put together anew


def test_order_of_tasks_does_not_matter():
    suite = small_clip(tasks=3)
    backwards = replace(suite, experts=dict(reversed(suite.experts.items())))
    backwards.inputs = dict(reversed(suite.inputs.items()))
    assert_same(plus(backwards), plus(suite), EXACT)


def test_batch_size_does_not_matter():
    assert_same(plus(small_clip(sizes=(1,) * 7)), plus(small_clip(sizes=(4, 3))), EXACT)


@SLOW
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
    # Unless missing steps are bounded, as the bound is the number of tasks.
    assert_same(plus(twice, anchor_rho=1.0), plus(suite, anchor_rho=1.0), EXACT)
    with pytest.raises(AssertionError, match="relative distance"):  # but a single one weighs
        del twice.experts["task_1 again"], twice.inputs["task_1 again"]
        assert_same(plus(twice), plus(suite), 1e-3)


def test_all_samples_once_more_in_their_folds_change_nothing():
    suite = stack_suite(biased, sizes=(4, 4))
    doubled = {task: [*batches, *batches] for task, batches in suite.inputs.items()}
    assert_same(plus(replace(suite, inputs=doubled)), plus(suite), EXACT)
    turned = {task: [torch.cat(bs).roll(4, 0)] for task, bs in suite.inputs.items()}
    assert_same(plus(replace(suite, inputs=turned)), plus(suite), EXACT)


def test_an_experts_outputs_do_not_weigh_by_their_size():
    suite = stack_suite(biased, tasks=2, sizes=(5, 4), seed=2)
    loud = copy.deepcopy(suite)
    name = "layers.1.only"
    with torch.no_grad():
        for leaf in ("weight", "bias"):  # ten times as far, and ten times as much
            for model in (loud.merged, loud.base, *loud.experts.values()):
                model.get_parameter(f"{name}.{leaf}").mul_(10)
    found, wanted = (
        plus(s, target="module").get_parameter(f"{name}.weight") for s in (loud, suite)
    )
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
    wanted = plus(weighing([1.0] * 5, [0, 1, 2, 3, 0]))
    assert_same(plus(weighing([2.0, 1, 1, 1], [0, 1, 2, 3])), wanted, EXACT)
    assert distance(plus(weighing([1.0] * 4, [0, 1, 2, 3])), wanted) > 1e-3
    halves = plus(weighing([1.0, 0.5, 0.5, 0.5], [0, 1, 2, 3]))
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


@pytest.mark.parametrize("order", ["module", pytest.param("block", marks=SLOW)])
def test_weights_and_biases_of_linear_modules_change_and_nothing_else(order: str):
    suite = small_clip(depth=2)  # in a first block the class token, of which q_proj learns, is one
    both = {f"{part}.{leaf}" for part in PARTS for leaf in ("weight", "bias")}
    assert moved(suite, order=order) == both
    assert moved(suite, order=order, calibrate_bias=False) == {f"{p}.weight" for p in PARTS}
    some = moved(suite, order=order, modules=["mlp.*", "q_proj", "!fc2"])
    assert some == {name for name in both if "q_proj" in name or "fc1" in name}


def test_one_block_alone():
    suite = small_clip(depth=2)
    for one in range(2):
        found = plus(suite, modules=[f"layers.{one}.*"])
        sides = [[m.get_submodule(block) for m in (found, suite.merged)] for block in suite.blocks]
        assert_identical(*sides[1 - one])
        assert distance(*sides[one]) > 1e-3


@pytest.mark.parametrize(
    "make", [small_clip, pytest.param(tower_suite, marks=SLOW), pytest.param(small_t5, marks=SLOW)]
)
def test_log_of_the_drift_changes_no_bit(make: Callable[[], Suite]):
    suite = make().to(torch.float32)
    assert_identical(plus(suite, log_drift=False), plus(suite, log_drift=True))


def test_replay_family_equals_the_clip_family_but_for_the_last_block():
    suite = small_clip(depth=2)
    kept = {"modules": [f"!{suite.blocks[-1]}.*"]}  # of which replay knows no rows that are unread
    assert_same(plus(suite, family=replay(suite), **kept), plus(suite, **kept), EXACT)
    assert distance(plus(suite, family=replay(suite)), plus(suite)) > 1e-3


@pytest.mark.parametrize("make", [small_clip, small_llama])
def test_float32_agrees_with_float64(make: Callable[[], Suite]):
    suite = make()
    assert_same(plus(suite.to(torch.float32)), plus(suite), 1e-4)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(small_clip, torch.float16), pytest.param(small_t5, torch.bfloat16, marks=SLOW)],
)
def test_narrow_models_stay_narrow_and_finite(make: Callable[[], Suite], dtype: torch.dtype):
    suite = make().to(dtype)
    found = plus(suite)
    assert {p.dtype for p in found.parameters()} == {dtype}
    assert all(bool(torch.isfinite(p).all()) for p in found.parameters())
    assert distance(found, suite.merged) > 1e-3


def test_autocast_wraps_every_pass_and_no_solve():
    suite, inside = small_clip().to(torch.float32), []
    for model in (suite.merged, *suite.experts.values()):
        for block in suite.blocks:
            model.get_submodule(block).register_forward_pre_hook(
                lambda *_: inside.append(torch.is_autocast_enabled("cpu"))
            )
    found = plus(suite, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    assert all(inside) and len(inside) >= 6
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    assert all(bool(torch.isfinite(p).all()) for p in found.parameters())
    exact = plus(suite)
    assert 1e-6 < distance(found, exact) < 1
    with torch.autocast("cpu", torch.bfloat16):
        assert_identical(plus(suite), exact)


def test_callers_inference_mode_does_not_matter():
    suite = small_clip()
    wanted = plus(suite)
    with torch.inference_mode():
        assert_identical(plus(suite), wanted)


def test_experts_in_files_give_the_same_bits(tmp_path: Path):
    suite = small_clip().to(torch.float32)
    sources: Any = save_experts(suite, tmp_path, "shards")
    assert_identical(plus(replace(suite, experts=sources)), plus(suite))


def test_every_read_is_planned_and_kept_within_a_budget():
    suite = small_clip()
    sources: Any = {task: Overheard(expert) for task, expert in suite.experts.items()}
    wanted = run_fast(suite, **PLUS)
    for budget in (None, "100%", "50%"):
        for source in sources.values():
            source.read.clear()
        found = run_fast(replace(suite, experts=sources), expert_read_budget=budget, **PLUS)
        totals, plan = found.reads["totals"], found.reads["plan"]
        read = sum(source.nbytes(name) for source in sources.values() for name in source.read)
        assert totals["experts_read"] == totals["experts_planned"] == read
        for places in found.reads["experts"].values():
            assert all(place["read"] == place["planned"] for place in places.values())
        if budget == "50%":
            assert read <= plan["limit"] == plan["full"] // 2 and totals["merged_stood_in"] > 0
            assert distance(found.model, wanted.model) > 1e-3
        else:
            assert_identical(found.model, wanted.model)
