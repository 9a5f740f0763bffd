"""Plans of reads for random models: within every limit, growing with it, the same every time."""

import random

import pytest

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.experts.read_plan import (
    Read,
    ReadPlan,
    make_plan,
    plan_hash,
    reads_of,
)


def random_reads(seed: int) -> dict[str, list[Read]]:
    """Experts with random tensors in random blocks, some tied, some visited twice."""
    draw = random.Random(seed)
    blocks = [f"stack.{index}" for index in range(draw.randint(1, 4))]
    names = [f"embed.{leaf}" for leaf in "ab"[: draw.randint(0, 2)]]
    for block in blocks:
        for module in range(draw.randint(1, 3)):
            names += [f"{block}.m{module}.{leaf}" for leaf in ("weight", "bias")]
    keys = {name: name for name in names}
    if draw.random() < 0.5:  # a tensor that two modules share
        keys[names[-1]] = keys[names[0]]
    visits = {"stage 0": [n for n in names if n.startswith("embed")]}
    visits |= {b: [n for n in names if n.startswith(b)] for b in blocks}
    if draw.random() < 0.5:  # a second stage that begins with what was read before
        visits["stage 1"] = names[: len(names) // 2]
    reads = {}
    for index in range(draw.randint(1, 5)):
        sizes = {name: draw.randint(1, 1000) for name in names}
        reads[f"expert {index}"] = reads_of(index, visits, blocks, keys, sizes.__getitem__)
    return reads


def total(plan: ReadPlan) -> int:
    return sum(nbytes for places in plan.planned.values() for nbytes in places.values())


@pytest.mark.parametrize("seed", range(30))
def test_no_plan_exceeds_its_limit_and_a_larger_one_reads_all_that_a_smaller_one_does(seed: int):
    reads, draw = random_reads(seed), random.Random(1000 + seed)
    full = make_plan(reads, None)
    assert total(full) == full.bytes == full.full
    limits = [draw.randint(full.least, full.full) for _ in range(8)]
    before: set[tuple[str, str]] | None = None
    for limit in sorted([*limits, full.least, full.full]):
        plan = make_plan(reads, limit)
        assert total(plan) == plan.bytes <= limit
        omitted = {(expert, name) for expert, names in plan.omitted.items() for name in names}
        assert before is None or omitted <= before
        before = omitted
        assert plan == make_plan(reads, limit)
    assert before == set()  # nothing is left out of a full read


@pytest.mark.parametrize("seed", range(10))
def test_what_is_left_out_is_what_is_not_read(seed: int):
    reads = random_reads(seed)
    full = make_plan(reads, None)
    plan = make_plan(reads, (full.least + full.full) // 2)
    for expert, listed in reads.items():
        left_out = set(plan.omitted[expert])
        units = {read.unit for read in listed if read.name in left_out}
        assert left_out == {read.name for read in listed if read.unit in units}
        saved = sum(read.nbytes for read in listed if read.unit in units)
        planned = sum(plan.planned[expert].values())
        assert planned + saved == sum(full.planned[expert].values())


def test_limit_below_the_least_is_refused_with_the_least_named():
    reads = {"a": [Read("stage 0", None, "x", 70)], "b": [Read("stage 0", None, "x", 30)]}
    assert make_plan(reads, 100).bytes == 100
    with pytest.raises(
        CalibrationError, match=r"expert_read_budget allows 99 bytes, but 100 are needed.*mix_alpha"
    ):
        make_plan(reads, 99)


def test_hash_tells_plans_and_conditions_apart():
    reads = random_reads(3)
    full = make_plan(reads, None)
    less = make_plan(reads, full.least)
    seen = {
        plan_hash(full, {"seed": 1}),
        plan_hash(full, {"seed": 2}),
        plan_hash(less, {"seed": 1}),
        plan_hash(less, {"seed": 1, "order": "other"}),
    }
    assert len(seen) == 4
    assert plan_hash(less, {"seed": 1}) == plan_hash(make_plan(reads, full.least), {"seed": 1})
