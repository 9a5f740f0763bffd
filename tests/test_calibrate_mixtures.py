"""Mixtures of experts: each expert's modules are solved from the tokens that are routed to it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import (
    PAPER,
    PLUS,
    assert_identical,
    assert_same,
    replay,
    run_fast,
    run_slow,
    run_slow_mixture,
    settings_of,
)
from model_types import MIXTURES, Row
from moe_oracle import FEWEST, PARTS, find_mixture, matrix
from oracle import Knobs
from process_group import in_processes
from tiny_models import Suite, normal, sentences, without_labels
from torch import Tensor, nn
from tricky_models import Stack, everywhere, least_likely, stack_suite

from fusion_bench_featcal import (
    CalibrationError,
    FeatCalSettings,
    SafetensorsExpert,
)
from fusion_bench_featcal.engine.mixtures import FEWEST_ROWS
from fusion_bench_featcal.methods.blockwise import REGMEAN, merge_blockwise
from fusion_bench_featcal.plan import plan_of
from fusion_bench_featcal.plan_shapes import Request, Shapes

BLOCKS = ["model.layers.0", "model.layers.1"]
kinds = pytest.mark.parametrize("row", MIXTURES, ids=lambda row: row.name)


def suite_of(row: Row, **inputs: list) -> Suite:
    suite = row.suite()
    assert suite is not None
    suite.inputs = suite.inputs | inputs
    return suite


def mixtral(**inputs: list) -> Suite:
    return suite_of(MIXTURES[0], **inputs)


def few_tokens(seed: int) -> dict[str, Tensor]:
    return without_labels(sentences([6, 9], 9, seed=seed))


def moved_experts(found: nn.Module, merged: nn.Module) -> set[tuple[str, int, str]]:
    """Block, expert and part of every matrix of an expert that has changed."""
    moved = set()
    for block in BLOCKS:
        mixture = find_mixture(merged, block)
        for number in range(4):
            for part in PARTS:
                pair = (matrix(model, mixture, number, part) for model in (found, merged))
                if not torch.equal(*pair):
                    moved.add((block, number, part))
    return moved


def unused_experts(suite: Suite) -> None:
    """Let the first block of the merged model send each token to one of its first two experts."""
    models: list[Any] = [suite.merged, suite.base, *suite.experts.values()]
    for model in models:
        model.config.num_experts_per_tok = 1
        for module in model.modules():
            if hasattr(module, "top_k"):
                module.top_k = 1
    gate = suite.merged.get_parameter(f"{find_mixture(suite.merged, BLOCKS[0])}.gate.weight").data
    gate[1] = -gate[0]
    gate[2:] = 0


def test_the_fewest_tokens_are_those_of_the_oracle():
    assert FEWEST == FEWEST_ROWS


@kinds
@pytest.mark.parametrize("knobs", [PAPER, Knobs(alpha=0.9, lam=0.3, rho=1.0, eps=1e-8)], ids=str)
def test_calibration_equals_the_oracle(row: Row, knobs: Knobs):
    suite = suite_of(row)
    found, wanted = run_fast(suite, knobs), run_slow_mixture(suite, knobs)
    assert wanted.elsewhere > 20  # tokens that the tasks' experts send elsewhere
    assert_same(found.model, wanted.model)
    assert len(moved_experts(found.model, suite.merged)) > 12
    rows = {r["module"]: r["rows"] for r in found.log.records if "rows" in r and "module" in r}
    for (mixture, number, task), count in wanted.tokens.items():
        of_expert = [
            r for name, r in rows.items() if name.startswith(f"{mixture}.experts.{number}.")
        ]
        assert [r[task] for r in of_expert] == [count] * 3
    for name, value in found.model.named_parameters():  # routers decide as they did
        assert not name.endswith(".gate.weight") or torch.equal(
            value, suite.merged.get_parameter(name)
        )


@kinds
def test_other_families_give_the_same(row: Row):
    suite = suite_of(row)
    found = run_fast(suite).model
    assert_identical(run_fast(suite, family=replay(suite)).model, found)
    assert_identical(run_fast(suite, family="llama", log_drift=False).model, found)


def test_expert_without_tokens_keeps_its_bits(caplog: pytest.LogCaptureFixture):
    suite = mixtral()
    unused_experts(suite)
    found, wanted = run_fast(suite), run_slow_mixture(suite)
    assert_same(found.model, wanted.model)
    mixture = find_mixture(suite.merged, BLOCKS[0])
    for number in (2, 3):
        assert {n for (m, e, _), n in wanted.tokens.items() if (m, e) == (mixture, number)} == {0}
    moved = moved_experts(found.model, suite.merged)
    assert {e for block, e, _ in moved if block == BLOCKS[0]} == {0, 1}
    left = found.log.of_kind("routed")
    of_first = [r["module"] for r in left if r["block"] == BLOCKS[0]]
    assert len(of_first) == 6 and all(".experts.2." in n or ".experts.3." in n for n in of_first)
    assert (
        f"{len(left)} of 24 linear modules of experts stay as merged: fewer than 32" in caplog.text
    )


def test_task_with_few_tokens_has_no_say_in_an_expert():
    suite = mixtral(task_1=[few_tokens(7)])
    found, wanted = run_fast(suite, samples_per_task=20), run_slow_mixture(suite)
    assert 0 < max(n for (*_, task), n in wanted.tokens.items() if task == "task_1") < FEWEST
    assert_same(found.model, wanted.model)
    weights = [r["task_weights"] for r in found.log.of_kind("module") if "rows" in r]
    assert weights and all(w["task_1"] == 0 < w["task_0"] for w in weights)
    alone = mixtral()
    del alone.experts["task_1"], alone.inputs["task_1"]
    by_one = moved_experts(run_fast(alone).model, suite.merged)
    assert moved_experts(found.model, suite.merged) == by_one


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_few_samples_leave_all_experts_and_calibrate_the_rest(eps: float):
    suite = mixtral(task_0=[few_tokens(6)], task_1=[few_tokens(7)])
    found = run_fast(suite, Knobs(eps=eps)).model
    assert_same(found, run_slow_mixture(suite, Knobs(eps=eps)).model)
    assert not moved_experts(found, suite.merged)
    for name, value in found.named_parameters():
        same = torch.equal(value, suite.merged.get_parameter(name))
        assert same != name.endswith("_proj.weight") or "experts" in name


def test_plus_leaves_experts_as_merged(caplog: pytest.LogCaptureFixture):
    suite = mixtral()
    found = run_fast(suite, **PLUS).model
    assert not moved_experts(found, suite.merged)
    assert not torch.equal(
        *(m.get_parameter("model.layers.1.self_attn.o_proj.weight") for m in (found, suite.merged))
    )
    assert "all 24 linear modules of experts stay as merged: only method.order=block" in caplog.text


def test_excluded_experts_are_not_looked_at():
    suite = mixtral()
    found = run_fast(suite, modules=["!experts.*"])
    assert not moved_experts(found.model, suite.merged) and not found.log.of_kind("routed")
    part = run_fast(suite, modules=["!*.0.*.experts.1.*"])
    moved = moved_experts(part.model, suite.merged)
    assert (BLOCKS[0], 1, "up") not in moved and (BLOCKS[0], 0, "up") in moved
    assert moved == moved_experts(run_fast(suite).model, suite.merged) - {
        (BLOCKS[0], 1, p) for p in PARTS
    }


@kinds
def test_experts_are_read_from_files_by_the_names_they_have_there(row: Row, tmp_path: Path):
    suite = suite_of(row)
    wanted = run_fast(suite).model
    files = {}
    models: dict[str, Any] = {"base": suite.base, **suite.experts}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        files[name] = SafetensorsExpert(tmp_path / name)
        assert any(".experts.3." in stored for stored in files[name].names())
    from_files: Any = replace(suite, base=files.pop("base"), experts=files)
    assert_identical(run_fast(from_files).model, wanted)


@pytest.mark.parametrize("size", [2, 3])  # three: a task's batches are divided
def test_several_processes_give_the_same(size: int):
    suite = mixtral(task_1=[few_tokens(7)])
    more: dict[str, Any] = {"samples_per_task": 20}
    wanted = run_fast(suite, **more)
    found = in_processes(size, lambda processes: run_fast(suite, processes=processes, **more))
    for result in found:
        assert_same(result.model, wanted.model, 1e-12)
        assert moved_experts(result.model, suite.merged) == moved_experts(
            wanted.model, suite.merged
        )
        assert len(result.log.of_kind("routed")) == len(wanted.log.of_kind("routed"))
        assert_identical(result.model, found[0].model)


def test_finished_blocks_are_taken_up_again(tmp_path: Path):
    suite = mixtral()
    wanted = run_fast(suite, checkpoint_dir=str(tmp_path))
    again = run_fast(suite, checkpoint_dir=str(tmp_path), resume=True)
    assert again.log.of_kind("resumed")
    assert_identical(again.model, wanted.model)


def test_least_squares_leaves_experts_at_their_mean():
    suite = mixtral()
    settings = settings_of(PAPER, suite)
    found = merge_blockwise(suite.base, suite.experts, suite.inputs, settings, REGMEAN)
    mixture = find_mixture(suite.base, BLOCKS[0])
    first, second = (matrix(expert, mixture, 1, "up") for expert in suite.experts.values())
    torch.testing.assert_close(matrix(found, mixture, 1, "up"), (first + second) / 2)


def test_mixture_that_sends_all_rows_to_all_experts_is_calibrated_as_any_modules_are():
    suite = replace(stack_suite(everywhere, sizes=(20, 15)), left=("gate",))
    assert_same(run_fast(suite, modules=None).model, run_slow(suite).model)


def test_other_routing_than_the_largest_is_refused():
    suite = stack_suite(least_likely, sizes=(20, 15))
    with pytest.raises(
        CalibrationError,
        match=r"block layers\.0: the router layers\.0\.mixture\.gate chooses other positions than "
        r"layers\.0\.mixture\.experts\.\d receives.*method\.modules=\['!mixture\.experts\.\*'\]",
    ):
        run_fast(suite)
    assert run_fast(suite, modules=["!mixture.experts.*"]).log.of_kind("module")


class Masked(Stack):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


def test_padding_that_does_not_fit_the_router_is_refused():
    suite = stack_suite(everywhere, sizes=(20, 15))
    suite.inputs = {
        task: [{"x": batch, "attention_mask": torch.ones(len(batch), 2)} for batch in batches]
        for task, batches in suite.inputs.items()
    }
    for model in (suite.merged, suite.base, *suite.experts.values()):
        model.__class__ = Masked
    with pytest.raises(CalibrationError, match="receives 20 rows, but padding is known for 40"):
        run_fast(suite)


def test_padding_may_hold_anything():
    suite = stack_suite(everywhere)
    for model in (suite.merged, suite.base, *suite.experts.values()):
        model.__class__ = Masked

    def calibrated(filler: float) -> nn.Module:
        mask = torch.ones(12, 5)
        mask[:, 3:] = 0
        suite.inputs = {
            task: [
                {
                    "x": normal(n, 12, 5, 4).where(mask[..., None] > 0, filler),
                    "attention_mask": mask,
                }
            ]
            for n, task in enumerate(suite.experts)
        }
        return run_fast(suite, samples_per_task=12).model

    found = calibrated(float("nan"))
    assert_identical(found, calibrated(0.0))
    name = "layers.0.mixture.experts.1.weight"
    assert not torch.equal(found.get_parameter(name), suite.merged.get_parameter(name))


def test_plan_counts_the_sums_of_all_experts_of_a_mixture():
    model = suite_of(MIXTURES[0]).merged.to("meta")
    request = Request(model, FeatCalSettings(), 2)
    experts = [g for g in Shapes.of(request).groups("model.layers.0") if ".experts." in g.name]
    assert plan_of(request).parts["sums"] > 4 * sum(group.inputs**2 for group in experts) > 0
