"""Held-out samples: the others alone make the model, and these measure it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import PLUS, assert_identical, cast, replay, run_fast, samples_in
from oracle import record
from tiny_models import Suite, clip_suite, decoder_suite, gpt2_suite, residual_suite, t5_suite
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.samples import hold_out, number_held_out

EITHER: list[dict[str, Any]] = [{}, PLUS]
SUITES: dict[str, Callable[[], Suite]] = {
    "clip": lambda: clip_suite(tasks=2, sizes=(4, 3, 2)),
    "llama": lambda: decoder_suite("llama", seed=1),
    "t5": lambda: t5_suite(seed=1),
    "residual": lambda: residual_suite(sizes=(4, 3)),
    "replay": lambda: replace(s := clip_suite(tasks=2, sizes=(4, 3)), family=replay(s)),
}


def cut(inputs: Any, samples: slice) -> Any:
    if isinstance(inputs, Mapping):
        return {name: value[samples] for name, value in inputs.items()}
    return inputs[samples]


def size_of(inputs: Any) -> int:
    return len(next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs)


def parted(suite: Suite, held: int) -> tuple[dict[str, list], dict[str, list]]:
    """The batches without the last samples, and batches of these."""
    used: dict[str, list] = {}
    last: dict[str, list] = {}
    for task, batches in suite.inputs.items():
        left = sum(map(size_of, batches)) - held
        used[task], last[task] = [], []
        for batch in batches:
            count = min(left, size_of(batch))
            left -= count
            if count:
                used[task].append(cut(batch, slice(count)))
            if count < size_of(batch):
                last[task].append(cut(batch, slice(count, None)))
    return used, last


@pytest.mark.parametrize("more", EITHER, ids=["paper", "plus"])
@pytest.mark.parametrize("name", SUITES)
def test_the_model_is_that_of_the_other_samples(name: str, more: dict[str, Any]):
    suite = SUITES[name]()
    used, _ = parted(suite, 3)
    wanted = run_fast(replace(suite, inputs=used), samples_per_task=9, **more).model
    found = run_fast(suite, held_out=3, samples_per_task=samples_in(suite), **more)
    assert_identical(found.model, wanted)


def rows_compared(name: str, inputs: Any, features: Tensor) -> Tensor:
    """Features at the positions that matter, as known by hand."""
    if name == "clip":
        return features[:, 0]
    if name == "llama":
        counted = inputs["labels"][:, 1:] >= 0
        return features[:, :-1][counted]
    if name == "t5":
        return features[inputs["labels"] >= 0]
    return features.flatten(0, -2)


def final(suite: Suite, model: nn.Module, name: str, batches: Sequence[Any]) -> Tensor:
    _, blocks = record(model, batches, [], suite.blocks[-1:])
    parts = [
        rows_compared(name, inputs, features)
        for inputs, features in zip(batches, blocks[suite.blocks[-1]], strict=True)
    ]
    return torch.cat(parts).double()


@pytest.mark.parametrize("more", EITHER, ids=["paper", "plus"])
@pytest.mark.parametrize("name", SUITES)
def test_agreement_is_that_of_whole_models(name: str, more: dict[str, Any]):
    suite = SUITES[name]()
    _, last = parted(suite, 3)
    rows: dict[str, Any] = {"decoder_rows": "targets"} if name == "llama" else {}
    result = run_fast(suite, held_out=3, **more, **rows)
    for task, expert in suite.experts.items():
        batches = cast(last, torch.float64)[task]
        theirs = final(suite, expert, name, batches)
        logged = [r for r in result.log.of_kind("task") if r["task"] == task][-1]
        assert logged["held_out"] == 3
        for model, end in ((suite.merged, "_merged"), (result.model, "")):
            ours = final(suite, model, name, batches)
            cosine = cosine_similarity(ours, theirs).mean()
            drift = (ours - theirs).norm() / theirs.norm()
            close = pytest.approx(float(cosine), rel=0, abs=1e-6)
            assert logged[f"held_out_cosine{end}"] == close
            assert logged[f"held_out_drift{end}"] == pytest.approx(float(drift), rel=1e-4)


def test_every_block_tells_the_drift_of_both_models():
    suite = clip_suite(depth=3, tasks=2, sizes=(6, 4))
    for more in EITHER:
        tasks = run_fast(suite, held_out=2, **more).log.of_kind("task")
        assert len(tasks) == 6
        merged = [record["held_out_drift_merged"] for record in tasks]
        assert all(drift > 0 for drift in merged) and merged[0] < merged[-1]
        assert {record["samples"] for record in tasks} == {10}


def test_nothing_is_logged_without_them():
    tasks = run_fast(clip_suite(tasks=2)).log.of_kind("task")
    assert not any("held_out" in key for record in tasks for key in record)


@pytest.mark.slow
def test_features_on_disk_measure_the_same(tmp_path: Path):
    suite = t5_suite(seed=1)
    results = [
        run_fast(suite, held_out=3, activations=place, activations_dir=tmp_path, **PLUS)
        for place in ("device", "disk")
    ]
    assert_identical(results[1].model, results[0].model)
    assert results[1].log.of_kind("task") == results[0].log.of_kind("task")


def batches_of(sizes: Sequence[int]) -> Iterator[Batch]:
    start = 0
    for size in sizes:
        yield Batch(torch.arange(start, start + size), size, start)
        start += size


@pytest.mark.parametrize("sizes", [(16, 16, 8), (40,), (1,) * 40, (39, 1)])
@pytest.mark.parametrize("held", [0, 1, 5, 17, 39])
def test_the_last_samples_are_held_out(sizes: Sequence[int], held: int):
    dealt = list(hold_out(batches_of(sizes), 40 - held))
    used = [batch for batch in dealt if not batch.is_held_out]
    assert all(batch.is_held_out for batch in dealt[len(used) :])
    assert torch.cat([batch.inputs for batch in dealt]).tolist() == list(range(40))
    assert sum(batch.samples for batch in used) == 40 - held
    for batch in dealt:
        assert (len(batch.inputs), int(batch.inputs[0])) == (batch.samples, batch.start)


@pytest.mark.parametrize(
    ("samples", "held"), [(1, 0), (15, 0), (16, 2), (64, 8), (255, 31), (256, 32), (9999, 32)]
)
def test_auto_holds_out_one_of_eight(samples: int, held: int):
    assert number_held_out(samples, "auto") == held


@pytest.mark.parametrize("held", [7, 300])
def test_holding_out_all_samples_is_refused(held: int):
    with pytest.raises(
        CalibrationError, match=rf"task task_0: method.held_out={held} leaves none of its 7 samples"
    ):
        run_fast(clip_suite(tasks=2), held_out=held)


def test_copies_are_made_of_the_others_only():
    suite = clip_suite(tasks=2, sizes=(8,))
    (first, *_) = run_fast(suite, held_out=2, augment="jitter", **PLUS).log.of_kind("task")
    positions = 1 + (8 // 4) ** 2
    assert (first["samples"], first["held_out"]) == (6 + 2, 2)
    assert first["rows"] == 6 * 8 * positions


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"strict": True}, "strict=true needs method.held_out, such as auto"),
        ({"task_weights": "drift", **PLUS}, "task_weights=drift needs method.held_out"),
        ({"held_out": 2, "log_drift": False}, "held_out needs method.log_drift=true"),
    ],
)
def test_settings_that_need_held_out_samples_say_so(more: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=f"method.{message}"):
        FeatCalSettings(**more)


def test_a_stack_without_padding_needs_no_labels():
    suite = gpt2_suite(seed=1)
    result = run_fast(suite, held_out=2, **PLUS)
    assert all(r["held_out_cosine"] > 0 for r in result.log.of_kind("task"))
