"""Drift, its split and final features beside whole forward passes with plain hooks."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from oracle import run
from tiny_convs import tower_suite
from tiny_models import (
    ROUNDING,
    Suite,
    clip_suite,
    decoder_suite,
    gpt2_suite,
    residual_suite,
    t5_suite,
)
from tiny_open_clip import tower_suite as open_clip_suite
from torch import Tensor, nn

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.lab.diagnosis.drift import COLUMNS as NAMES
from fusion_bench_featcal.lab.diagnosis.measure import Measures, measure

EXACT = 1e-12
COLUMNS = {name: place for place, name in enumerate(NAMES)}


def measured(suite: Suite, task: str = "task_0", **options: Any) -> Measures:
    family = resolve_family(suite.family, suite.merged)
    settings = FeatCalSettings(calibrate_norm=False, decoder_rows=options.pop("rows", "all"))
    sides = copy.deepcopy(suite.merged), suite.base, copy.deepcopy(suite.experts[task])
    return measure(
        *sides, task, suite.inputs[task], settings,
        family, **options,
    )  # fmt: skip


def drift_of(found: Measures) -> Tensor:
    return torch.stack(list(found.drift.values()))


def outputs(model: nn.Module, batch: Any, block: str) -> Tensor:
    """A block's output in a whole forward pass."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        seen.append((output if isinstance(output, Tensor) else output[0]).detach().clone())

    handle = model.get_submodule(block).register_forward_hook(keep)
    with torch.no_grad():
        run(model, batch)
    handle.remove()
    return seen[0]


def spliced(expert: nn.Module, model: nn.Module, block: str) -> nn.Module:
    """The expert with one block of the model: what that block makes of the expert's features."""
    both = copy.deepcopy(expert)
    owner, _, name = block.rpartition(".")
    both.get_submodule(owner)._modules[name] = copy.deepcopy(model.get_submodule(block))
    return both


def expected(suite: Suite, task: str, block: str, counted: Any) -> Tensor:
    """`[items, 9]` by Definition 1 and Eq. 3, item by item and position by position."""
    rows = []
    for batch in suite.inputs[task]:
        expert = suite.experts[task]
        sides = (suite.merged, expert, spliced(expert, suite.merged, block))
        mine, theirs, crossed = (outputs(side, batch, block).double() for side in sides)
        for item in range(len(mine)):
            features = [part[item].reshape(-1, part.shape[-1]) for part in (mine, theirs, crossed)]
            if mine.ndim == 4:
                features = [part[item].flatten(1).T for part in (mine, theirs, crossed)]
            keep = counted(batch, block)[item] if counted else torch.ones(len(features[0]))
            h, star, cross = (part[keep.bool()] for part in features)
            drift, mismatch, propagation = h - star, cross - star, h - cross
            cosine = (h * star).sum(1) / (h.norm(dim=1) * star.norm(dim=1))
            columns = [
                drift.norm(dim=1), drift.norm(dim=1) ** 2, star.norm(dim=1) ** 2, cosine,
                mismatch.norm(dim=1), mismatch.norm(dim=1) ** 2, propagation.norm(dim=1),
                propagation.norm(dim=1) ** 2, (mismatch * propagation).sum(1),
            ]  # fmt: skip
            rows.append(torch.stack([column.mean() for column in columns]))
    return torch.stack(rows)


def t5_positions(batch: Any, block: str) -> Tensor:
    return batch["attention_mask"] if block.startswith("encoder") else batch["labels"] != -100


CASES = {
    "clip": (clip_suite, None, EXACT),
    "residual_replayed": (residual_suite, None, EXACT),
    "llama": (decoder_suite, lambda batch, _: batch["attention_mask"], ROUNDING),
    "gpt2": (gpt2_suite, lambda batch, _: batch["attention_mask"], ROUNDING),
    "open_clip": (open_clip_suite, None, EXACT),
    "t5": (t5_suite, t5_positions, ROUNDING),
    "resnet": (partial(tower_suite, "resnet"), None, EXACT),
}


@pytest.mark.parametrize("case", CASES)
def test_drift_and_its_split_are_those_of_whole_passes(case):
    make, counted, bound = CASES[case]
    suite = make()
    found = measured(suite)
    assert list(found.drift) == suite.blocks
    for block, drift in found.drift.items():
        wanted = expected(suite, "task_0", block, counted)
        scale = wanted.abs().max(0).values.clamp(min=1e-3)
        assert ((drift - wanted).abs() / scale).max() < bound, block


@pytest.mark.parametrize("case", CASES)
def test_the_two_terms_add_up_to_the_drift(case):
    drift = drift_of(measured(CASES[case][0]()))
    parts = {name: drift[..., place] for name, place in COLUMNS.items()}
    assert (parts["drift"] > 0).all()
    squares = parts["mismatch_sq"] + parts["propagation_sq"] + 2 * parts["product"]
    assert (squares / parts["drift_sq"] - 1).abs().max() < 1e-10


def test_an_expert_beside_itself_has_no_drift():
    suite = clip_suite()
    suite.merged = suite.experts["task_0"]
    found = measured(suite)
    assert drift_of(found)[..., COLUMNS["drift"]].abs().max() == 0
    assert (found.cosines - 1).abs().max() < EXACT
    mine, expert, product = found.vectors or (0.0, 0.0, 0.0)
    assert mine == expert and product == pytest.approx(mine**2)


def test_where_only_the_last_block_differs_all_drift_is_mismatch():
    suite = clip_suite()
    expert = suite.experts["task_0"]
    suite.merged = spliced(expert, suite.base, suite.blocks[-1])
    drift = drift_of(measured(suite))
    assert drift[0, :, COLUMNS["drift"]].max() == 0
    assert drift[1, :, COLUMNS["mismatch"]].min() > 0
    assert drift[1, :, COLUMNS["propagation"]].max() == 0


def test_where_only_the_first_block_differs_later_drift_is_propagation():
    suite = clip_suite()
    expert = suite.experts["task_0"]
    suite.merged = spliced(expert, suite.base, suite.blocks[0])
    drift = drift_of(measured(suite))
    assert drift[0, :, COLUMNS["propagation"]].max() == 0
    assert drift[1, :, COLUMNS["mismatch"]].max() == 0
    assert drift[1, :, COLUMNS["propagation"]].min() > 0


def test_batches_do_not_matter():
    suite = clip_suite()
    images = torch.cat([batch["pixel_values"] for batch in suite.inputs["task_1"]])
    one = measured(suite, "task_1")
    suite.inputs["task_1"] = [{"pixel_values": image[None]} for image in images]
    other = measured(suite, "task_1")
    assert (drift_of(one) - drift_of(other)).abs().max() < 1e-10
    assert (one.cosines - other.cosines).abs().max() < EXACT


def test_final_features_are_pooled_and_projected():
    suite = clip_suite()
    torch.manual_seed(0)
    projection = nn.Linear(12, 7, bias=False).double()
    found = measured(suite, projection=projection)
    sides = []
    with torch.no_grad():
        for model in (suite.merged, suite.experts["task_0"]):
            batches = suite.inputs["task_0"]
            sides.append(torch.cat([projection(model(**b).pooler_output) for b in batches]))
    mine, theirs = (side / side.norm(dim=1, keepdim=True) for side in sides)
    assert (found.cosines - (mine * theirs).sum(1)).abs().max() < EXACT
    assert (found.features - mine).abs().max() < 1e-6
    assert (found.expert_features - theirs).abs().max() < 1e-6


def test_final_states_of_a_text_are_those_that_predict_a_target():
    suite = decoder_suite()
    found = measured(suite)
    wanted = []
    for batch in suite.inputs["task_0"]:
        mine, theirs = (
            outputs(side, batch, "model.norm") for side in (suite.merged, suite.experts["task_0"])
        )
        for item, labels in enumerate(batch["labels"]):
            places = (labels != -100).nonzero().flatten() - 1
            pair = mine[item, places], theirs[item, places]
            wanted.append(torch.cosine_similarity(*pair, dim=1).mean())
    assert (found.cosines - torch.stack(wanted)).abs().max() < ROUNDING


def test_task_vectors_are_compared_over_all_parameters():
    suite = clip_suite()
    flat = [
        torch.cat([p.detach().flatten() for p in model.parameters()])
        for model in (suite.base, suite.merged, suite.experts["task_1"])
    ]
    mine, expert = flat[1] - flat[0], flat[2] - flat[0]
    wanted = [mine.norm().item(), expert.norm().item(), (mine @ expert).item()]
    assert measured(suite, "task_1").vectors == pytest.approx(wanted, rel=1e-10)


def test_the_model_keeps_its_modes():
    suite = clip_suite()
    suite.merged.train().requires_grad_(True)
    family = resolve_family("auto", suite.merged)
    settings = FeatCalSettings()
    inputs = suite.inputs["task_0"]
    measure(suite.merged, None, suite.experts["task_0"], "task_0", inputs, settings, family)
    assert suite.merged.training
    assert all(parameter.requires_grad for parameter in suite.merged.parameters())
