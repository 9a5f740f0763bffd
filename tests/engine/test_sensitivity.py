"""Rows weigh as the final features depend on them: gradients by differences, and their rows."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calibrations import PLUS, assert_identical, assert_same, distance, run_fast
from tiny_models import ROUNDING, Suite, clip_suite, decoder_suite, t5_suite
from torch import Tensor, nn
from tricky_models import biased, stack_suite

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.engine.rows import CountedRows
from fusion_bench_featcal.engine.samples import batch_generator
from fusion_bench_featcal.engine.sensitivity import final_rows, sensitivities
from fusion_bench_featcal.families import resolve_family

STEP = 1e-5
JITTER = "fusion_bench_featcal.streams.augmentation.Jitter"


def small_clip(depth: int = 1) -> Suite:
    return clip_suite(tasks=2, width=8, heads=2, hidden=10, sizes=(2, 1), seed=5, depth=depth)


def small_llama(**more: Any) -> Suite:
    return decoder_suite("llama", depth=1, seed=1, **more)


def small_t5() -> Suite:
    return t5_suite(depths=(1, 1))


def plus(suite: Suite, **more: Any) -> nn.Module:
    values: dict[str, Any] = {"row_weights": "sensitivity"}
    return run_fast(suite, **(PLUS | values | more)).model


def by_differences(model: nn.Module, batch: Any, name: str, signs: Tensor) -> Tensor:
    """Squared gradient norms at each row of a module's output, one number after the other."""

    def probe(change: Tensor) -> float:
        def add(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            return output + change

        handle = model.get_submodule(name).register_forward_hook(add)
        with torch.no_grad():
            found = model(**batch).pooler_output
        handle.remove()
        return float((signs * found).sum())

    width = model.get_parameter(f"{name}.weight").shape[0]
    squares = torch.zeros(len(signs), 5, dtype=torch.float64)
    for place in range(squares.numel() * width):
        change = torch.zeros(len(signs), 5, width, dtype=torch.float64)
        change.view(-1)[place] = STEP
        slope = (probe(change) - probe(-change)) / (2 * STEP)
        squares.view(-1)[place // width] += slope**2
    return squares


def test_weights_are_squared_gradients_of_a_probe_of_the_final_features():
    suite = small_clip(depth=2)
    model, batch, (first, last) = suite.merged, suite.inputs["task_0"][0], suite.blocks
    names = [f"{first}.mlp.fc2", f"{last}.self_attn.v_proj", f"{last}.mlp.fc1"]

    def generators() -> list[torch.Generator]:
        return [batch_generator("sensitivity", 1, "task_0", number) for number in range(2)]

    found = sensitivities(model, batch, names, [first], None, generators())
    signs = torch.cat([torch.randint(2, (1, 8), generator=part) for part in generators()]) * 2 - 1
    for name in names:
        wanted = by_differences(model, batch, name, signs)
        torch.testing.assert_close(found[name].double(), wanted, rtol=1e-4, atol=1e-9)
    assert bool((found[names[1]] > 0).all())  # values reach the class token
    assert not found[names[2]][:, 1:].any() and bool((found[names[2]][:, 0] > 0).all())
    assert not any(p.grad is not None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_probes_depend_on_seed_task_and_place():
    draws = [
        torch.rand(9, generator=batch_generator("sensitivity", *of)).tolist()
        for of in ((0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 4), (0, "a", 0))
    ]
    assert draws[0] == draws[-1]
    assert len({*map(tuple, draws)}) == 4


def rows(suite: Suite, batch: dict[str, Tensor], decoder_rows: str) -> Any:
    family = resolve_family("auto", suite.merged)
    problem: Any = SimpleNamespace(
        model=suite.merged,
        family=family,
        settings=FeatCalSettings(decoder_rows=decoder_rows),
        stages=[[b] for b in ("encoder", "decoder")][-1 - hasattr(suite.merged, "encoder") :],
    )
    found = final_rows(problem, batch)
    return None if found is None else found.mask().bool()


@pytest.mark.parametrize("side", ["left", "right"])
def test_final_positions_that_matter(side: str):
    suite = small_llama(side=side, extra=1)
    batch = suite.inputs["task_0"][0]
    mask, labels = batch["attention_mask"].bool(), batch["labels"]
    assert torch.equal(rows(suite, batch, "all"), mask)
    targets = rows(suite, batch, "targets")
    before = nn.functional.pad(labels[:, 1:], (0, 1), value=-100) >= 0
    assert torch.equal(targets, before & mask)
    assert torch.equal(rows(suite, batch, "auto"), targets)
    bare = {name: batch[name] for name in ("input_ids", "attention_mask")}
    last = rows(suite, bare, "auto")
    assert last.sum(1).tolist() == [1] * len(mask)
    for sample in range(len(mask)):
        assert last[sample].nonzero().item() == mask[sample].nonzero().max()
    t5 = t5_suite(depths=(1, 1))
    batch = t5.inputs["task_0"][0]
    assert torch.equal(rows(t5, batch, "auto"), batch["labels"] >= 0)


MAKERS = [small_clip, small_llama]


@pytest.mark.parametrize("make", MAKERS)
def test_rows_weigh_and_nothing_else_has_a_part(make: Callable[[], Suite]):
    suite = make()
    before = [tensor.clone() for m in suite.experts.values() for tensor in m.state_dict().values()]
    wanted = plus(suite)
    after = [tensor for m in suite.experts.values() for tensor in m.state_dict().values()]
    assert all(map(torch.equal, before, after))
    assert distance(wanted, plus(suite, row_weights="uniform")) > 1e-3
    assert distance(wanted, plus(suite, seed=1)) > 1e-6
    backwards = replace(suite, experts=dict(reversed(suite.experts.items())))
    assert_same(plus(backwards), wanted, 10 * ROUNDING)
    with torch.inference_mode():
        assert_identical(plus(suite, activations="disk"), wanted)


def test_rows_that_are_samples_weigh_too_or_are_refused():
    suite = stack_suite(biased)
    assert distance(plus(suite), plus(suite, row_weights="uniform")) > 1e-6


def test_auto_is_for_language_models():
    clip, llama = small_clip(), small_llama()
    assert_identical(plus(clip, row_weights="auto"), plus(clip, row_weights="uniform"))
    assert_identical(plus(llama, row_weights="auto"), plus(llama))


def in_single_samples(suite: Suite) -> Suite:
    batches = {
        task: [
            {name: tensor[n : n + 1] for name, tensor in batch.items()}
            for batch in batches
            for n in range(len(batch["input_ids"]))
        ]
        for task, batches in suite.inputs.items()
    }
    return replace(suite, inputs=batches)


def unlabelled_llama() -> Suite:
    suite = small_llama()
    for batches in suite.inputs.values():
        for batch in batches:
            del batch["labels"]
    return suite


@pytest.mark.parametrize("make", [small_llama, unlabelled_llama, small_t5])
def test_weights_do_not_depend_on_the_size_of_batches(make: Callable[[], Suite]):
    suite = make()
    assert_same(plus(in_single_samples(suite)), plus(suite), 10 * ROUNDING)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_copies_have_the_signs_of_their_originals_in_batches_of_any_size(size: int):
    suite, settings = clip_suite(sizes=(8,)), {"augment": {"_target_": JITTER, "copies": 2}}
    whole = plus(suite, **settings)
    for task, (batch,) in suite.inputs.items():
        images = batch["pixel_values"]
        suite.inputs[task] = [{"pixel_values": part} for part in images.split(size)]
    assert_same(plus(suite, **settings), whole, 10 * ROUNDING)


def test_positions_of_a_language_model_are_known_without_ids():
    suite = unlabelled_llama()
    ids = {task: [batch["input_ids"] for batch in all_] for task, all_ in suite.inputs.items()}
    suite.inputs = {task: [{"input_ids": part} for part in parts] for task, parts in ids.items()}
    wanted = run_fast(suite, decoder_rows="auto").model
    found = run_fast(replace(suite, inputs=ids), decoder_rows="auto").model
    assert_same(found, wanted, 10 * ROUNDING)


def test_padding_changes_no_weight():
    assert_same(plus(small_llama(extra=2)), plus(small_llama()), 10 * ROUNDING)


@pytest.mark.parametrize("make", [small_clip, pytest.param(small_t5, marks=pytest.mark.slow)])
def test_experts_that_run_whole_are_read_as_planned(make: Callable[[], Suite]):
    suite = make()
    for budget in (None, "70%"):
        found = run_fast(suite, row_weights="sensitivity", expert_read_budget=budget, **PLUS).reads
        for places in found["experts"].values():
            assert all(place["read"] == place["planned"] for place in places.values())
        assert (found["totals"]["merged_stood_in"] > 0) == (budget is not None)


@pytest.mark.parametrize("weights", ["sensitivity", "auto"])
def test_the_papers_update_weighs_no_rows(weights: str):
    with pytest.raises(ValueError, match=rf"^method\.row_weights={weights} needs method"):
        FeatCalSettings(row_weights=weights)
    with pytest.raises(ValueError, match=r"method\.row_weights must be one of uniform, sens"):
        FeatCalSettings(row_weights="x", order="module", calibrate_norm=False)


def test_mask_of_counted_rows_is_the_mask_that_they_are_of():
    for mask in (torch.tensor([[1.0, 0], [0.5, 2]]), torch.ones(2, 3), torch.tensor([[0, 1]])):
        counted = CountedRows.of_mask(mask)
        torch.testing.assert_close(counted.mask().double(), mask.double())
