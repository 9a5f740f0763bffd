"""Held-out samples: the others alone make the model, and these measure it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from calibrations import PLUS, assert_identical, cast, replay, run_fast, samples_in
from oracle import record
from tiny_models import Suite, clip_suite, decoder_suite, gpt2_suite, residual_suite, t5_suite
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from tricky_models import biased, stack_suite
from variations import parted

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.samples import hold_out

rules = pytest.mark.parametrize("more", [{}, PLUS], ids=["paper", "plus"])
SUITES: dict[str, Callable[[], Suite]] = {
    "clip": lambda: clip_suite(tasks=2, sizes=(4, 3, 2)),
    "llama": lambda: decoder_suite("llama", seed=1),
    "t5": lambda: t5_suite(seed=1),
    "residual": lambda: residual_suite(sizes=(4, 3)),
    "replay": lambda: replace(s := clip_suite(tasks=2, sizes=(4, 3)), family=replay(s)),
}


def final_rows(suite: Suite, model: nn.Module, name: str, batches: Sequence[Any]) -> Tensor:
    """Features behind the last block at the positions that the head reads."""
    last, rows = suite.blocks[-1], []
    for inputs, features in zip(batches, record(model, batches, [], [last])[1][last], strict=True):
        if name == "clip":
            rows.append(features[:, 0])
        elif name == "llama":
            rows.append(features[:, :-1][inputs["labels"][:, 1:] >= 0])
        elif name == "t5":
            rows.append(features[inputs["labels"] >= 0])
        else:
            rows.append(features.flatten(0, -2))
    return torch.cat(rows).double()


@rules
@pytest.mark.parametrize("name", SUITES)
def test_others_make_the_model_and_agreement_is_that_of_whole_models(name: str, more: Any):
    suite = SUITES[name]()
    used, last = parted(suite, 3)
    rows: dict[str, Any] = {"decoder_rows": "targets"} if name == "llama" else {}
    result = run_fast(suite, held_out=3, samples_per_task=samples_in(suite), **more, **rows)
    assert_identical(result.model, run_fast(used, samples_per_task=9, **more, **rows).model)
    for task, expert in suite.experts.items():
        batches = cast(last.inputs, torch.float64)[task]
        theirs = final_rows(suite, expert, name, batches)
        records = [r for r in result.log.of_kind("task") if r["task"] == task]
        for model, end in ((suite.merged, "_merged"), (result.model, "")):
            ours = final_rows(suite, model, name, batches)
            cosine = float(cosine_similarity(ours, theirs).mean())
            drift = float((ours - theirs).norm() / theirs.norm())
            assert records[-1]["held_out"] == 3
            assert records[-1][f"held_out_cosine{end}"] == pytest.approx(cosine, rel=0, abs=1e-6)
            assert records[-1][f"held_out_drift{end}"] == pytest.approx(drift, rel=1e-4)
        merged = [r["held_out_drift_merged"] for r in records]
        assert len(merged) == len(suite.blocks) and min(merged) > 0


def test_parts_of_batches_have_their_first_sample():
    batches = [Batch(torch.arange(start, start + 16), 16, start) for start in (0, 16, 32)]
    dealt = [(b.start, b.samples, b.is_held_out) for b in hold_out(batches, 21)]
    assert dealt == [(0, 16, False), (16, 5, False), (21, 11, True), (32, 16, True)]


@pytest.mark.parametrize(
    ("samples", "held"), [(1, 0), (15, 0), (16, 2), (64, 8), (255, 31), (256, 32), (999, 32)]
)
def test_auto_holds_out_one_of_eight(samples: int, held: int):
    tasks = run_fast(stack_suite(biased, sizes=(samples,)), held_out="auto").log.of_kind("task")
    assert {record.get("held_out", 0) for record in tasks} == {held}


def test_copies_are_made_of_the_others_only():
    suite = clip_suite(tasks=2, sizes=(8,))
    (first, *_) = run_fast(suite, held_out=2, augment="jitter", **PLUS).log.of_kind("task")
    assert (first["samples"], first["held_out"]) == (6 + 2, 2)
    assert first["rows"] == 6 * 8 * (1 + (8 // 4) ** 2)
    stack = run_fast(gpt2_suite(seed=1), held_out=2, **PLUS)  # which needs no labels
    assert all(r["held_out_cosine"] > 0 for r in stack.log.of_kind("task"))


def test_strict_refuses_a_model_that_is_no_closer_to_an_expert():
    suite = stack_suite(biased, tasks=1, sizes=(20, 17), seed=3)
    strict: dict[str, Any] = {**PLUS, "held_out": 5, "strict": True}
    assert_identical(run_fast(suite, **strict).model, run_fast(suite, held_out=5, **PLUS).model)
    already = replace(suite, experts=dict.fromkeys(suite.experts, suite.merged))
    with pytest.raises(CalibrationError, match=r"no closer to .*: task_0 \(cosine .*strict"):
        run_fast(already, **strict)
