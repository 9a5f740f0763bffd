"""How much memory a calibration takes, by part, and which setting lowers which part."""

from collections.abc import Mapping
from dataclasses import dataclass

from fusion_bench_featcal.core.moments import MOST_ROWS
from fusion_bench_featcal.plan.constants import Constants
from fusion_bench_featcal.plan.seconds import few, solves_wide
from fusion_bench_featcal.plan.work import BlockWork, Group, Work
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings, budget_in_bytes

PARTS = ("model", "experts", "activations", "batch", "statistics", "block")
"""Copy of the model; experts held whole; samples' features; one batch in a block; sums and systems;
an expert's block, anchors and new parameters."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a calibration, above the merged model that it is given.

    Attributes:
        parts: By `PARTS`, each at its largest; features wherever they wait.
        carried: Features of all samples between two blocks.
        peak: Largest sum of what is held at once beside the features, with the model's copy.
    """

    parts: Mapping[str, int]
    carried: int
    peak: int


def predict_memory(
    work: Work,
    settings: FeatCalSettings,
    tasks: int,
    constants: Constants,
    *,
    experts_held: int = 0,
    fused: bool = False,
) -> Memory:
    """Bytes by part.

    Args:
        work: What is done to one batch.
        settings: Settings.
        tasks: Number of tasks.
        constants: Fitted constants.
        experts_held: Bytes of the experts and the base that are loaded whole.
        fused: Whether the upstream merge shares the reads: a block of every expert is held then.

    Returns:
        The bytes.
    """
    batches = settings.samples_per_task / work.batch
    carried = round(tasks * batches * max(_carried(work, settings)))
    at_once = tasks if fused else 1
    stem = max(s.stem.peak + at_once * s.read for s in work.stages)
    entry = work.entry(settings, tasks)
    visits = [_visit(block, settings, work, entry, at_once) for block in work.blocks]
    largest = max((sum(visit.values()) for visit in visits), default=0)
    held = constants.visited * max(largest, stem) + constants.memory_bytes
    parts = {
        "model": work.model,
        "experts": experts_held,
        "activations": round(constants.carried * carried),
        "batch": max(visit["batch"] for visit in visits),
        "statistics": max(visit["statistics"] for visit in visits),
        "block": max(visit["block"] for visit in visits),
    }
    return Memory(parts, carried, round(work.model + experts_held + held))


def _carried(work: Work, settings: FeatCalSettings) -> list[float]:
    """Bytes that one batch carries, at each block."""
    both = settings.mix_alpha > 0 or settings.log_drift
    later = work.inputs if len(work.stages) > 1 else 0
    if work.replays:
        hidden = max(block.hidden for block in work.blocks) if settings.log_drift else 0
        return [work.inputs + hidden]
    return [
        later + (1 + both) * size
        for stage in work.stages
        for size in (stage.calls, *(block.calls for block in stage.blocks))
    ]


def _visit(
    block: BlockWork, settings: FeatCalSettings, work: Work, entry: int, experts: int
) -> dict[str, int]:
    """What a block's visit holds at its fullest: while a task is summed, or while it is solved."""
    mixes = settings.mix_alpha > 0
    both = mixes or settings.log_drift
    folded = sum(_folded(group, mixes) for group in block.groups) * entry
    summed = sum(_summed(group, mixes) for group in block.groups) * entry
    fold = max((_fold_transient(group) for group in block.groups), default=0) * entry
    recorded = sum(group.rows * group.width for group in block.groups) * work.itemsize
    batch = block.counts.peak + (recorded if both else 0)
    summing = folded + summed + max(fold - batch, 0)
    solving = folded + max((_solving(g, settings, entry) for g in block.groups), default=0)
    return {
        "batch": batch,
        "statistics": max(summing, solving - batch),
        "block": experts * block.read + block.anchored * entry // 4 + block.parameters // 2,
    }


def _folded(group: Group, mixes: bool) -> int:
    squares = 2 if mixes and not few(group) else 1
    return squares * group.width**2 + sum(group.outputs) * group.width


def _summed(group: Group, mixes: bool) -> int:
    """One task's sums, and the rows that wait to be multiplied or are about to be."""
    sides, width = 1 + mixes, group.width
    waiting = 0
    passing = 0 if waiting else mixes * min(group.rows, MOST_ROWS) * width  # differences, targets
    if mixes and few(group):
        outputs = sum(group.outputs)
        return width**2 + 2 * outputs * width + waiting * (width + outputs) + passing
    return sides * (width**2 + waiting * width) + passing


def _fold_transient(group: Group) -> int:
    return 2 * group.width**2 + 2 * max(group.outputs) * group.width


def _solving(group: Group, settings: FeatCalSettings, entry: int) -> int:
    size = 8 if solves_wide(settings, entry) else entry
    squares = 1 + (size != entry)  # the factor; in the sums' own dtype the gram is the system
    return size * (squares * group.width**2 + 5 * max(group.outputs) * group.width)


def read_bytes(
    work: Work, settings: FeatCalSettings, tasks: int, *, mine: int | None = None
) -> int:
    """Bytes that are read from experts, as the log counts them; a budget's, where that is less.

    Args:
        work: What is done to one batch.
        settings: Settings.
        tasks: Number of all tasks, for which the budget is.
        mine: Number of tasks whose experts are read here; None: all.

    Raises:
        CalibrationError: If a budget does not reach for what is always read.
    """
    runs = settings.mix_alpha > 0 or settings.log_drift
    stems = sum(stage.read for stage in work.stages) if runs else 0
    each = stems + sum(block.read for block in work.blocks)
    full, mine = tasks * each, tasks if mine is None else mine
    if settings.expert_read_budget is None:
        return mine * each
    budget = budget_in_bytes(settings.expert_read_budget, full)
    if budget < tasks * stems:
        raise CalibrationError(
            f"method.expert_read_budget allows {budget} bytes, but {tasks * stems} of {full} lead "
            "to the blocks and are always read. Raise it"
        )
    return min(mine * each, budget)
