"""Where a calibration's numbers come from and go to: files, dtypes, contexts, the log."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import (
    EXACT,
    assert_identical,
    assert_same,
    distance,
    run_fast,
    run_slow,
    samples_in,
)
from safetensors.torch import save_file
from tiny_models import Suite, clip_suite, gpt2_suite
from transformers import CLIPVisionModel

from fusion_bench_featcal import SafetensorsExpert


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float16, 1.5e-3)])
def test_dtype_and_class_are_kept(dtype: torch.dtype, bound: float):
    suite = clip_suite(seed=8).to(dtype)
    found = run_fast(suite).model
    assert type(found) is type(suite.merged)
    assert {p.dtype for p in found.parameters()} == {dtype}
    wanted = run_slow(suite).model
    assert_same(found, wanted, bound)
    assert distance(wanted, suite.merged) > 3 * bound


def test_experts_of_another_dtype_are_read_in_the_merged_dtype():
    suite = clip_suite(seed=8).to(torch.float32)
    narrow = suite.to(torch.bfloat16)
    mixed = replace(suite, experts=narrow.experts)
    widened = replace(suite, experts=narrow.to(torch.float32).experts)
    assert_identical(run_fast(mixed).model, run_fast(widened).model)


def save_experts(suite: Suite, folder: Path, layout: str) -> dict[str, SafetensorsExpert]:
    sources = {}
    for task, expert in suite.experts.items():
        place = folder / layout / task
        place.mkdir(parents=True)
        if layout == "file":
            save_file(expert.state_dict(), place / "weights.safetensors")
            place = place / "weights.safetensors"
        else:
            assert isinstance(expert, CLIPVisionModel)
            expert.save_pretrained(place, max_shard_size="4KB" if layout == "shards" else "1GB")
        sources[task] = SafetensorsExpert(place)
    return sources


@pytest.mark.parametrize("layout", ["file", "folder", "shards"])
def test_streamed_experts_equal_experts_in_memory_bit_for_bit(tmp_path: Path, layout: str):
    suite = clip_suite(seed=9).to(torch.float32)
    sources = save_experts(suite, tmp_path, layout)
    if layout == "shards":
        assert len(list((tmp_path / layout / "task_0").glob("*.safetensors"))) > 1
    save_file(suite.base.state_dict(), tmp_path / "base.safetensors")
    base: Any = SafetensorsExpert(tmp_path / "base.safetensors")
    streamed = run_fast(replace(suite, base=base, experts=sources))  # type: ignore[arg-type]
    assert_identical(streamed.model, run_fast(suite).model)
    for block in suite.blocks:
        weights = suite.merged.get_submodule(block).parameters()
        size = sum(p.numel() * p.element_size() for p in weights)
        records = [r for r in streamed.log.records if r["kind"] == "task" and r["block"] == block]
        # each block of each expert is read exactly once
        assert [record["expert_bytes"] for record in records] == [size] * len(sources)


def test_autocast_wraps_forward_passes_and_statistics_stay_wide():
    suite = clip_suite(seed=15).to(torch.float32)
    entered: list[bool] = []

    @contextmanager
    def autocast() -> Iterator[None]:
        entered.append(True)
        with torch.autocast("cpu", torch.bfloat16):
            yield

    result = run_fast(suite, autocast=autocast)
    assert entered
    assert {p.dtype for p in result.model.parameters()} == {torch.float32}
    exact = run_fast(suite).model
    assert EXACT < distance(result.model, exact) < 3e-2
    assert not torch.is_autocast_enabled("cpu")


def test_every_pass_through_a_block_is_inside_autocast():
    suite = clip_suite(seed=15, tasks=2).to(torch.float32)
    inside: list[bool] = []
    for model in (suite.merged, *suite.experts.values()):
        for block in suite.blocks:
            model.get_submodule(block).register_forward_pre_hook(
                lambda *_: inside.append(torch.is_autocast_enabled("cpu"))
            )
    run_fast(suite, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    batches = sum(len(parts) for parts in suite.inputs.values())
    assert len(inside) >= 3 * batches * len(suite.blocks)  # both sides, and the updated block
    assert all(inside)


def test_a_callers_autocast_changes_nothing():
    suite = clip_suite(seed=15).to(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = run_fast(suite).model
        assert torch.is_autocast_enabled("cpu")
    assert_identical(found, run_fast(suite).model)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_callers_gradient_mode_does_not_matter(mode: Any):
    suite = clip_suite(seed=16)
    wanted = run_fast(suite).model
    with mode():
        found = run_fast(suite).model
    assert_identical(found, wanted)


def test_log_is_complete_and_writes_one_object_a_line(tmp_path: Path):
    suite = clip_suite(seed=17)
    log = run_fast(suite).log
    log.write(tmp_path / "log.jsonl")
    lines = (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()
    written = [json.loads(line) for line in lines]
    assert written == log.records
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]
    log.records[-1]["seconds"] = float("inf")
    log.write(tmp_path / "log.jsonl")
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["seconds"] is None
    visits = {(r["block"], r["task"]): r for r in log.records if r["kind"] == "task"}
    assert set(visits) == {(b, t) for b in suite.blocks for t in suite.experts}
    for record in visits.values():
        assert record["samples"] == samples_in(suite)
        read = 1 if record["block"] == suite.blocks[-1] else 5  # of the last one the class token
        assert record["rows"] == read * samples_in(suite)
    solves = [r for r in log.records if r["kind"] == "module"]
    assert len(solves) == 6 * len(suite.blocks)
    for record in solves:
        assert record["module"].startswith(record["block"])
        assert 0 <= record["residual"] < 1e-9
        assert 1 <= record["condition"] <= (len(suite.experts) + 0.05) / 0.05


def test_rows_in_the_log_leave_padding_out():
    suite = gpt2_suite(padded=9)
    records = run_fast(suite).log.records
    assert {r["rows"] for r in records if r["kind"] == "task"} == {2 + 5 + 3 + 4 + 1 + 5 + 2}
