"""Drift, its two terms and final features beside whole forward passes with plain hooks."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from calibrations import calls_of
from oracle import run
from tiny_convs import tower_suite
from tiny_models import (
    ROUNDING,
    Suite,
    clip_suite,
    decoder_suite,
    normal,
    residual_suite,
    t5_suite,
)  # fmt: skip
from torch import Tensor, nn
from torch.nn.functional import normalize

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.data.embeddings import Pooling
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.lab.diagnosis.lines import drift_metrics, principal_plane
from fusion_bench_featcal.lab.diagnosis.measure import COLUMNS, Measures, measure, split_drift
from fusion_bench_featcal.modules.models import tail_of

EXACT = 1e-12


def measured(suite: Suite, task: str = "task_0", **options: Any) -> Measures:
    family = resolve_family(suite.family, suite.merged)
    settings = FeatCalSettings(calibrate_norm=False, decoder_rows="all")
    merged, expert = copy.deepcopy(suite.merged), copy.deepcopy(suite.experts[task])
    return measure(
        merged, suite.base, expert, task, suite.inputs[task], settings, family, **options
    )


def outputs(model: nn.Module, batch: Any, block: str) -> Tensor:
    """A block's output in a whole forward pass."""
    ((_, output),) = calls_of(model, block, lambda: run(model, batch))
    return output if isinstance(output, Tensor) else output[0]


def spliced(expert: nn.Module, model: nn.Module, block: str) -> nn.Module:
    """The expert with one block of the model: it maps the expert's features through that block."""
    both = copy.deepcopy(expert)
    owner, _, name = block.rpartition(".")
    both.get_submodule(owner)._modules[name] = copy.deepcopy(model.get_submodule(block))
    return both


def expected(suite: Suite, task: str, block: str, counted: Any) -> Tensor:
    """`[items, 7]` by Definition 1 and Eq. 3, item by item and position by position."""
    rows = []
    for batch in suite.inputs[task]:
        expert = suite.experts[task]
        sides = (suite.merged, expert, spliced(expert, suite.merged, block))
        features = [outputs(side, batch, block).double() for side in sides]
        for item in range(len(features[0])):
            sides = [f[item].flatten(1).T if f.ndim == 4 else f[item].reshape(-1, f.shape[-1])
                     for f in features]  # fmt: skip
            keep = counted(batch, block)[item] if counted else torch.ones(len(sides[0]))
            h, star, cross = (side[keep.bool()] for side in sides)
            drift, mismatch, propagation = h - star, cross - star, h - cross
            columns = [
                drift.norm(dim=1), drift.norm(dim=1) ** 2, star.norm(dim=1) ** 2,
                mismatch.norm(dim=1), propagation.norm(dim=1), propagation.norm(dim=1) ** 2,
                (mismatch * propagation).sum(1),
            ]  # fmt: skip
            rows.append(torch.stack([column.mean() for column in columns]))
    return torch.stack(rows)


def t5_positions(batch: Any, block: str) -> Tensor:
    return batch["attention_mask"] if block.startswith("encoder") else batch["labels"] != -100


CASES: dict[str, Any] = {
    "clip": (clip_suite, None, EXACT),
    "residual_listed": (residual_suite, None, EXACT),
    "llama": (decoder_suite, lambda batch, _: batch["attention_mask"], ROUNDING),
    "t5": (t5_suite, t5_positions, ROUNDING),
    "resnet": (partial(tower_suite, "resnet"), None, EXACT),
}


@pytest.mark.parametrize("case", CASES)
def test_drift_and_its_terms_are_those_of_whole_passes(case: str) -> None:
    make, counted, bound = CASES[case]
    suite = make()
    measures = measured(suite)
    assert list(measures.drift) == suite.blocks
    for block, drift in measures.drift.items():
        by_hand = expected(suite, "task_0", block, counted)
        scale = by_hand.abs().max(0).values.clamp(min=1e-3)
        assert ((drift - by_hand).abs() / scale).max() < bound, block


def test_final_features_are_pooled_and_projected() -> None:
    suite = clip_suite()
    torch.manual_seed(0)
    projection = nn.Linear(12, 7, bias=False).double()
    measures = measured(suite, projection=projection)
    sides = []
    with torch.no_grad():
        for model in (suite.merged, suite.experts["task_0"]):
            batches = suite.inputs["task_0"]
            sides.append(torch.cat([projection(model(**b).pooler_output) for b in batches]))
    merged, expert = (side / side.norm(dim=1, keepdim=True) for side in sides)
    assert (measures.cosines - (merged * expert).sum(1)).abs().max() < EXACT
    assert (measures.features - merged).abs().max() < 1e-6
    assert (measures.expert_features - expert).abs().max() < 1e-6


def test_final_features_of_an_encoder_are_its_embeddings() -> None:
    suite = clip_suite()
    measures = measured(suite, pooling=Pooling("mean"))
    with torch.no_grad():
        states = [suite.merged(**batch).last_hidden_state for batch in suite.inputs["task_0"]]
    expected = normalize(torch.cat(states).mean(1), dim=1).float()
    torch.testing.assert_close(measures.features, expected)


def test_final_states_of_a_text_are_those_that_predict_a_target() -> None:
    suite, cosines = decoder_suite(), []
    for batch in suite.inputs["task_0"]:
        sides = [outputs(m, batch, "model.norm") for m in (suite.merged, suite.experts["task_0"])]
        for item, labels in enumerate(batch["labels"]):
            positions = (labels != -100).nonzero().flatten() - 1
            pair = [side[item, positions] for side in sides]
            cosines.append(torch.cosine_similarity(*pair, dim=1).mean())
    assert (measured(suite).cosines - torch.stack(cosines)).abs().max() < ROUNDING


def test_task_vectors_are_compared_over_all_parameters_but_the_heads() -> None:
    suite = clip_suite()
    tail = tail_of(suite.merged, suite.blocks[-1])
    assert len(tail) == 2  # the last norm
    base, merged, expert = (
        torch.cat([p.detach().flatten() for n, p in model.named_parameters() if n not in tail])
        for model in (suite.base, suite.merged, suite.experts["task_1"])
    )
    vector, other = merged - base, expert - base
    by_hand = torch.cosine_similarity(vector, other, dim=0).item()
    assert measured(suite, "task_1").vector_cosine == pytest.approx(by_hand, rel=1e-10)


# ---- metrics


def test_metrics_of_a_block() -> None:
    h, star, crossed = (normal(seed, 9, 5) for seed in range(3))
    table = split_drift(h, star, crossed)
    e, m, p = h - star, crossed - star, h - crossed
    by_hand = {
        "drift": e.norm(dim=1).mean(),
        "relative": (e.square().sum() / star.square().sum()).sqrt(),
        "mismatch": m.norm(dim=1).mean(),
        "propagation": p.norm(dim=1).mean(),
        "share": 1 - (m * e).sum() / e.square().sum(),  # without that of the mismatch
    }
    metrics = drift_metrics(dict(zip(COLUMNS, table.mean(0).tolist(), strict=True)))
    assert metrics == pytest.approx({name: value.item() for name, value in by_hand.items()})
    half = [side.bfloat16() for side in (h, star, crossed)]  # summed in float32
    assert torch.equal(split_drift(*half), split_drift(*(side.float() for side in half)))
    assert set(drift_metrics(dict.fromkeys(COLUMNS, 0.0)).values()) == {0.0}


def test_the_principal_plane_holds_the_greatest_variance() -> None:
    features = normal(1, 20, 5) * torch.tensor([3.0, 2.0, 1.0, 0.5, 0.1]) + 3
    center, directions = principal_plane(features)
    points = (features.double() - center) @ directions
    variances = torch.linalg.eigvalsh(torch.cov(features.T.double())).flip(0)[:2]
    torch.testing.assert_close(points.var(0), variances)
    assert torch.equal(principal_plane(features.flip(0))[1].sign(), directions.sign())
