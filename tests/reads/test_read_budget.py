"""Calibration under a read budget: within it, by its definition, and nothing changed at full."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import Bare, Overheard, assert_identical, run_fast
from test_read_ledger import SUITES, small_clip
from test_resume import interrupt, records, run
from tiny_models import Suite, clip_suite
from torch import nn

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.setting_checks import budget_in_bytes

NO_FEATURES = SUITES["clip, no features"][1]


def with_parts_of(model: nn.Module, suite: Suite, omitted: dict[str, list[str]]) -> Suite:
    """The suite with experts that have a model's weights in some modules."""
    merged = model.state_dict()
    changed = replace(suite, experts=copy.deepcopy(suite.experts))
    for task, modules in omitted.items():
        with torch.no_grad():
            for name, value in changed.experts[task].state_dict().items():
                if name.rpartition(".")[0] in modules:
                    value.copy_(merged[name])
    return changed


@pytest.mark.parametrize("name", ["clip", "gpt2", "t5", "clip, plus"])
def test_budgeted_run_is_the_run_with_merged_weights_in_the_experts(name: str):
    make, more = SUITES[name]
    suite = make()
    found = run_fast(suite, expert_read_budget="60%", **more)
    omitted = found.reads["plan"]["omitted"]
    assert any(omitted.values())
    wanted = run_fast(with_parts_of(suite.merged, suite, omitted), **more)
    assert_identical(found.model, wanted.model)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("clip", 30),
        ("clip, no features", 20),
        ("clip, plus", 50),
        *((name, 60) for name in ("clip", "replay", "gpt2", "open_clip", "t5")),
    ],
)
def test_no_more_is_read_than_allowed_and_what_was_planned(name: str, share: float):
    make, more = SUITES[name]
    found = run_fast(make(), expert_read_budget=f"{share}%", **more)
    totals, plan = found.reads["totals"], found.reads["plan"]
    assert plan["limit"] == plan["full"] * share // 100
    assert totals["experts_read"] == totals["experts_planned"] <= plan["limit"]
    assert totals["merged_stood_in"] > 0
    for places in found.reads["experts"].values():
        assert all(place["read"] == place["planned"] for place in places.values())


@pytest.mark.parametrize(
    ("name", "budget"), [("clip", "1GB"), ("clip, no features", "100%"), ("t5", "100%")]
)
def test_full_budget_is_no_budget_bit_for_bit(name: str, budget: str):
    make, more = SUITES[name]
    suite = make()
    wanted, found = run_fast(suite, **more), run_fast(suite, expert_read_budget=budget, **more)
    assert_identical(found.model, wanted.model)
    assert found.reads["experts"] == wanted.reads["experts"]
    assert found.reads["totals"]["merged_stood_in"] == 0
    assert not found.reads["plan"]["stale_from"]


def test_least_budget_leaves_out_every_module_and_marks_all_experts_stale():
    suite = small_clip()
    least = run_fast(suite).reads["plan"]["least"]
    found = run_fast(suite, expert_read_budget=least)
    assert found.reads["totals"]["experts_read"] == least
    assert found.reads["plan"]["stale_from"] == dict.fromkeys(suite.experts, suite.blocks[0])
    modules = [name for name, _ in suite.merged.named_modules() if name]
    changed = with_parts_of(suite.merged, suite, dict.fromkeys(suite.experts, modules))
    for task, expert in suite.experts.items():  # what leads to the blocks is the expert's own
        own = {n: v for n, v in expert.state_dict().items() if suite.blocks[0][:-1] not in n}
        changed.experts[task].load_state_dict(own, strict=False)
    assert_identical(found.model, run_fast(changed).model)


def test_budget_below_the_least_is_refused_before_anything_is_read():
    suite = small_clip()
    least = run_fast(suite).reads["plan"]["least"]
    sources = {task: Overheard(expert) for task, expert in suite.experts.items()}
    suite.experts = dict(sources)  # type: ignore[arg-type]
    with pytest.raises(
        CalibrationError,
        match=rf"expert_read_budget allows {least - 1} bytes, but {least} are needed",
    ):
        run_fast(suite, expert_read_budget=least - 1)
    assert not any(source.read for source in sources.values())
    assert run_fast(suite, expert_read_budget=1, **NO_FEATURES).reads["plan"]["least"] == 0


def test_budget_needs_sizes():
    suite = small_clip()
    suite.experts["task_0"] = Bare(suite.experts["task_0"])  # type: ignore[assignment]
    with pytest.raises(CalibrationError, match=r"'Bare' .* 'nbytes'.*method\.expert_read_budget"):
        run_fast(suite, expert_read_budget="50%")


def test_experts_that_are_loaded_whole_keep_no_budget():
    with pytest.raises(ValueError, match=r"expert_read_budget needs.*method\.stream_experts=false"):
        FeatCalSettings(expert_read_budget="50%", stream_experts=False)


@pytest.mark.parametrize(
    ("budget", "wanted"),
    [
        (700, 700), (7e2, 700), ("700B", 700), ("2KB", 2000), ("2 KiB", 2048), ("1.5MB", 1500000),
        ("0.1GiB", 107374182), ("3TB", 3 * 10**12), ("50%", 500), ("33.3%", 333), ("100%", 1001),
    ],
)  # fmt: skip
def test_budget_in_bytes(budget: Any, wanted: int):
    kept: Any = FeatCalSettings(expert_read_budget=budget).expert_read_budget
    assert budget_in_bytes(kept, 1001) == wanted


@pytest.mark.parametrize(("name", "blocks"), [("clip, no features", 1), ("t5", 1)])
def test_budgeted_run_resumes(name: str, blocks: int, tmp_path: Path, monkeypatch):
    make, more = SUITES[name]
    suite, more = make(), {**more, "expert_read_budget": "65%"}
    wanted = run_fast(suite, **more)
    interrupt(suite, tmp_path, blocks, monkeypatch, **more)
    found = run(suite, tmp_path, resume=True, **more)
    assert_identical(found.model, wanted.model)
    assert records(found) == records(wanted)
    assert found.reads["totals"]["experts_read"] <= found.reads["plan"]["limit"]
    assert found.reads["plan"] == wanted.reads["plan"]


def test_another_budget_is_another_run(tmp_path: Path):
    suite = clip_suite(tasks=1)
    run(suite, tmp_path, expert_read_budget="50%")
    with pytest.raises(CalibrationError, match=r'method\.expert_read_budget \("50%" then, null'):
        run(suite, tmp_path, resume=True)


def test_hash_covers_what_the_plan_depends_on():
    suite = clip_suite(tasks=2, depth=1, sizes=(2,))
    plain: dict[str, Any] = {"expert_read_budget": "50%"}
    changes: list[dict[str, Any]] = [
        plain, {}, {"expert_read_budget": "90%"}, plain | {"seed": 1}, plain | {"ridge_lambda": 1},
        plain | {"mix_alpha": 0.2}, plain | {"anchor_rho": 1.0}, plain | {"eps": 1e-7},
        plain | {"modules": ["fc1"]}, plain | {"calibrate_norm": False},
    ]  # fmt: skip
    hashes = [run_fast(suite, **change).reads["plan"]["hash"] for change in changes]
    assert len(set(hashes)) == len(hashes)
    assert run_fast(suite, **plain).reads["plan"]["hash"] == hashes[0]
    other = copy.copy(suite)
    other.experts = dict(reversed(suite.experts.items()))
    assert run_fast(other, **plain).reads["plan"]["hash"] != hashes[0]
