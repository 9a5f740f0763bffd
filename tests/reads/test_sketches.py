"""Sketches of tensors, and read budgets that are spent by them."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import assert_identical, run_fast
from safetensors.torch import load_file
from test_fused_merge import merger
from test_read_budget import with_parts_of
from test_read_ledger import small_clip
from tiny_models import Suite, gpt2_suite

from fusion_bench_featcal import CalibrationError, FeatCalSettings, InMemoryExpert
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.experts.read_plan import Read, Unit, make_plan
from fusion_bench_featcal.experts.sketches import (
    WIDTH,
    Distances,
    Sketches,
    distance,
    sketch,
    write_sketch_file,
)
from fusion_bench_featcal.suites.paths import suite_path


def sketched(suite: Suite, folder: Path) -> dict[str, Any]:
    """Settings of a run by sketches of the suite's experts."""
    for task, expert in suite.experts.items():
        write_sketch_file(folder, task, InMemoryExpert(expert))
    return {"expert_sketches": str(folder), "expert_read_budget": "70%"}


def test_sketch_is_linear():
    x, y = torch.randn(3, 300, 400, generator=torch.manual_seed(0))[:2]
    found = sketch(2 * x - 3 * y)
    torch.testing.assert_close(found, 2 * sketch(x) - 3 * sketch(y), rtol=1e-4, atol=1e-2)
    assert found.shape == (WIDTH,)


@pytest.mark.parametrize("shape", [(7,), (300, 400), (600, 1000)])
def test_distances_of_sketches_are_those_of_tensors(shape: tuple[int, ...]):
    generator, ratios = torch.manual_seed(1), []
    for _ in range(20):
        x, y = torch.randn(2, *shape, generator=generator)
        ratios.append(distance(sketch(x), sketch(y)) / float((x - y).square().sum()))
    # twenty estimates with a relative deviation of 9 % each
    assert abs(sum(ratios) / 20 - 1) < 4 * 0.09 / 20**0.5
    assert all(abs(ratio - 1) < 0.5 for ratio in ratios)


@pytest.mark.parametrize("kind", ["one column", "rows alike", "rank one"])
def test_distances_are_right_where_the_difference_has_a_pattern(kind: str):
    generator, ratios = torch.manual_seed(2), []
    for _ in range(10):
        difference = torch.zeros(1024, 1024)  # four equal parts where rows are alike
        if kind == "one column":
            difference[:, 5] = torch.randn(1024, generator=generator)
        elif kind == "rows alike":
            difference += torch.randn(1024, generator=generator)
        else:
            sides = torch.randn(2, 1024, generator=generator)
            difference += torch.outer(*sides)
        ratios.append(float(sketch(difference).square().sum() / difference.square().sum()))
    assert all(abs(ratio - 1) < 0.5 for ratio in ratios)
    assert abs(sum(ratios) / 10 - 1) < 0.2


def test_distances_to_a_merge_that_has_not_run_are_those_to_its_result(tmp_path: Path):
    suite = small_clip()
    merged, merging, wanted = merger("arithmetic", suite)
    sketched(suite, tmp_path)
    sketches = {task: Sketches(tmp_path, task) for task in suite.experts}
    before = Distances(sketches, merged.state_dict(), merging.merge)
    after = Distances(sketches, wanted.state_dict(), None)
    name = next(name for name in merged.state_dict() if name.endswith("fc1.weight"))
    keys = dict.fromkeys(suite.experts, name)
    for task in suite.experts:
        assert before.away(task, name, keys) == pytest.approx(after.away(task, name, keys), 1e-3)


def test_limit_is_spent_on_what_is_far_and_reaches_many_blocks():
    def read(block: int, module: int, nbytes: int, away: float) -> Read:
        return Read(f"block {block}", Unit(0, block, module), f"{block}.{module}", nbytes, away)

    # away / nbytes * (blocks left)^2: 4, 40, 1, 9
    first = [read(0, 0, 10, 10), read(0, 1, 10, 100)]
    reads = {"a": [*first, read(1, 0, 10, 10), read(1, 1, 10, 90)]}
    wanted = {40: [], 30: ["1.0"], 20: ["0.0", "1.0"], 10: ["0.0", "1.0", "1.1"]}
    for limit, omitted in wanted.items():
        plan = make_plan(reads, limit, sketched=True)
        assert plan.omitted == {"a": omitted}
        assert plan.order == "farthest_first"
    assert make_plan(reads, 20).omitted == {"a": ["1.0", "1.1"]}


@pytest.mark.parametrize("make", [small_clip, gpt2_suite])
def test_run_by_sketches_is_the_run_with_merged_weights_in_the_experts(make: Any, tmp_path: Path):
    suite = make()
    found = run_fast(suite, **sketched(suite, tmp_path))
    plan = found.reads["plan"]
    assert plan["order"] == "farthest_first"
    assert any(plan["omitted"].values())
    assert found.reads["totals"]["experts_read"] <= plan["limit"]
    changed = with_parts_of(suite.merged, suite, plan["omitted"])
    assert_identical(found.model, run_fast(changed).model)


def test_merge_by_sketches_takes_no_step_where_an_expert_is_not_read(tmp_path: Path):
    suite = small_clip()
    merged, merging, _ = merger("arithmetic", suite)
    more = sketched(suite, tmp_path)
    found = run_fast(replace(suite, merged=merged), merging=merging, **more)
    omitted = found.reads["plan"]["omitted"]
    _, _, wanted = merger("arithmetic", with_parts_of(suite.base, suite, omitted))
    assert_identical(merged, wanted)


def test_sketches_of_other_weights_are_refused(tmp_path: Path):
    suite = small_clip()
    more = sketched(suite, tmp_path)
    changed = replace(suite, experts=copy.deepcopy(suite.experts))
    with torch.no_grad():
        next(changed.experts["task_0"].parameters()).mul_(1.01)
    with pytest.raises(CalibrationError, match=r"task_0.safetensors was made from other weights"):
        run_fast(changed, **more)
    (tmp_path / "task_1.safetensors").write_bytes(b"damaged")
    with pytest.raises(CalibrationError, match=r"task_1.safetensors is missing or damaged.*sketch"):
        run_fast(suite, **more)
    (tmp_path / "task_1.safetensors").unlink()
    with pytest.raises(CalibrationError, match=r"method.expert_sketches: .*task_1.safetensors is"):
        run_fast(suite, **more)
    write_sketch_file(tmp_path, "task_1", InMemoryExpert(torch.nn.Linear(2, 2)))
    with pytest.raises(CalibrationError, match=r"has no sketch of '.*weight'"):
        run_fast(suite, **more)


def test_sketches_without_a_budget_are_refused():
    with pytest.raises(ValueError, match=r"set method.expert_read_budget"):
        FeatCalSettings(expert_sketches="somewhere")


def test_command_sketches_the_experts_of_a_pool(tmp_path: Path, capsys: Any):
    assert main(["sketch", "modelpool=clip-vit-mini_alphabets2", "--out", str(tmp_path)]) == 0
    paths = capsys.readouterr().out.splitlines()
    assert [Path(path).stem for path in paths] == ["mini_balinese", "mini_korean"]
    weights = load_file(Path(suite_path("clip-vit-mini/mini_korean")) / "model.safetensors")
    found = load_file(paths[1])
    assert set(found) == set(weights)
    name = max(weights, key=lambda key: weights[key].numel())
    assert torch.equal(found[name], sketch(weights[name]))


def test_command_refuses_a_pool_without_experts(tmp_path: Path, capsys: Any):
    assert main(["sketch", "modelpool=nowhere", "--out", str(tmp_path)]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
