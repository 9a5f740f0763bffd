"""Bytes that a calibration holds and reads, from the counts of one batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fusion_bench_featcal.engine.precision import fold_dtype, row_dtype
from fusion_bench_featcal.plan.counting import Block, Work
from fusion_bench_featcal.reads.plan import make_plan, reading_of
from fusion_bench_featcal.settings import FeatCalSettings, budget_in_bytes

FEW_ROWS, WAITING_ROWS = 512, 1024
"""Rows of batches with fewer than the first wait until there are as many as the second."""

HOLES, SCRATCH = 1.15, 20 * 2**20
"""Share of memory that allocators hold beside what is in use, and bytes of libraries' buffers."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a calibration above the merged model that it is given.

    Attributes:
        parts: The calibrated copy (`model`), models loaded whole (`experts`), features of all
            samples (`activations`), one batch in a block (`batch`), sums and systems of a block
            (`statistics`), experts' blocks with anchors and new parameters (`block`).
        peak: All but the features, at the fullest block, with what allocators and libraries take.
    """

    parts: Mapping[str, int]
    peak: int


def predict_memory(
    work: Work,
    settings: FeatCalSettings,
    samples: int,
    tasks: int,
    *,
    held: int = 0,
    fused: bool = False,
) -> Memory:
    """Estimate the memory of a calibration.

    Args:
        work: Counts.
        settings: Settings.
        samples: Samples of all tasks of this process.
        tasks: Number of all tasks.
        held: Number of experts and bases that are loaded whole.
        fused: Whether a block of every expert is held, for the upstream merge.
    """
    at_once = tasks if fused else 1
    read = {visit.place: at_once * _size(work, visit.names) for visit in work.visits}
    visits = []
    for block in work.blocks:
        parts = _in_block(block, work, settings, tasks)
        visits.append({**parts, "block": parts["block"] + read.pop(block.name)})
    stem = max(s.peak + n for (s, _), n in zip(work.stages, read.values(), strict=True))
    model = sum(work.tensors.values())
    fixed = {"model": model, "experts": held * model}
    features = samples / work.batch * max(_carried(work, settings))
    largest = {name: max(visit[name] for visit in visits) for name in visits[0]}
    fullest = max(stem, *(sum(visit.values()) for visit in visits))
    peak = round(sum(fixed.values()) + HOLES * fullest + SCRATCH)
    return Memory({**fixed, "activations": round(features), **largest}, peak)


def _carried(work: Work, settings: FeatCalSettings) -> list[int]:
    """Bytes that one batch keeps, at each place."""
    sides = 2 if settings.mix_alpha > 0 or settings.log_drift else 1
    if work.whole_model:  # both sides begin from the inputs each time
        hidden = max(block.hidden for block in work.blocks) if settings.log_drift else 0
        return [work.inputs + hidden]
    later = work.inputs if len(work.stages) > 1 else 0
    places = [place for stem, blocks in work.stages for place in (stem, *blocks)]
    return [later + sides * place.carried for place in places]


def _in_block(block: Block, work: Work, settings: FeatCalSettings, tasks: int) -> dict[str, int]:
    """Bytes of one block's visit, where it is fullest: while a task is summed, or at the solve."""
    mixes = settings.mix_alpha > 0
    both = mixes or settings.log_drift
    row, fold = sum_sizes(work, settings, tasks)
    batch = block.peak + (block.recorded if both else 0)
    folded = summed = transient = system = 0
    for group in block.groups:
        width, outputs = group.width, sum(group.outputs)
        crosses = mixes and not group.is_narrow
        squares = (1 + crosses) * width**2
        folded += fold * (squares + outputs * width)
        summed += row * (squares + (mixes and group.is_narrow) * outputs * width)
        if group.rows < FEW_ROWS:
            summed += row * WAITING_ROWS * (width + mixes * (outputs if group.is_narrow else width))
        one = max(group.outputs) * width
        transient = max(transient, fold * (2 * width**2 + 2 * one))
        system = max(system, fold * (width**2 + 5 * one))
    summing = folded + summed + max(0, transient - batch)
    return {
        "batch": batch,
        "statistics": max(summing, folded + max(0, system - batch)),
        "block": fold * block.calibrated + block.parameters // 2,
    }


def sum_sizes(work: Work, settings: FeatCalSettings, tasks: int) -> tuple[int, int]:
    """Bytes of a number in the sums over rows, and in what is formed of them."""
    cpu, least = torch.device("cpu"), work.dtype.itemsize
    dtypes = row_dtype(settings, tasks, cpu), fold_dtype(settings, tasks, cpu)
    return max(dtypes[0].itemsize, least), max(dtypes[1].itemsize, least)


def read_bytes(
    work: Work, settings: FeatCalSettings, tasks: int, itemsize: int | None = None
) -> int:
    """Bytes that are read from all experts, as the log counts them.

    Args:
        work: Counts.
        settings: `expert_read_budget` is used.
        tasks: Number of tasks.
        itemsize: Bytes of a number in the experts' files; None: as in the model.

    Raises:
        CalibrationError: If a read budget is too small.
    """
    own = work.dtype.itemsize
    sizes = {name: size * (itemsize or own) // own for name, size in work.tensors.items()}
    blocks = [block.name for block in work.blocks]
    readings = {
        str(task): reading_of(task, work.visits, blocks, work.first_names, sizes.__getitem__)
        for task in range(tasks)
    }
    full = make_plan(readings, None)
    if settings.expert_read_budget is None:
        return full.bytes
    return make_plan(readings, budget_in_bytes(settings.expert_read_budget, full.bytes)).bytes


def _size(work: Work, names: Sequence[str]) -> int:
    return sum(work.tensors[name] for name in {work.first_names[name] for name in names})
