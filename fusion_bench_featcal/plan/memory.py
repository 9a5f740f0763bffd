"""Bytes that a calibration holds and reads, from the counts of one batch."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fusion_bench_featcal.engine.precision import fold_dtype, row_dtype
from fusion_bench_featcal.experts.read_plan import make_plan, reads_of
from fusion_bench_featcal.plan.counting import Place, Work
from fusion_bench_featcal.settings import FeatCalSettings, budget_in_bytes

HOLES, SCRATCH = 1.15, 20 * 2**20
"""Share of memory that allocators hold beside what is in use, and bytes of libraries' buffers."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a calibration above the merged model that it is given."""

    parts: Mapping[str, int]  # by the names in `advice.LABELS`
    peak: int  # all but the features, at the fullest block, with what allocators and libraries take


def predict_memory(
    work: Work,
    settings: FeatCalSettings,
    samples: int,
    tasks: int,
    *,
    held: int = 0,
    fused: bool = False,
) -> Memory:
    """Estimate the memory of a calibration with `samples` samples of all this process's tasks.

    `held` experts and bases are loaded whole; `fused` holds a block of every expert, for the
    upstream merge.
    """
    model = sum(work.tensors.values())
    parts = {"model": model, "experts": held * model}
    features = max(_carried(place, work, settings) for place in work.places)
    visits = [_visit(place, work, settings, tasks, fused=fused) for place in work.places]
    fullest = max(sum(visit.values()) for visit in visits)
    peak = round(sum(parts.values()) + HOLES * fullest + SCRATCH)
    parts["activations"] = round(samples / work.batch * features)
    parts |= {name: max(visit[name] for visit in visits) for name in visits[0]}
    return Memory(parts, peak)


def _carried(place: Place, work: Work, settings: FeatCalSettings) -> int:
    """Bytes that one batch keeps after a place."""
    both = settings.runs_experts
    if work.whole_model:  # both sides begin from the inputs each time
        return work.inputs + settings.log_drift * place.hidden
    return (1 + both) * place.carried + (len(work.stages) > 1) * work.inputs


def _visit(
    place: Place, work: Work, settings: FeatCalSettings, tasks: int, *, fused: bool
) -> dict[str, int]:
    """Bytes of a place where it is fullest: while a task is summed, or at the solve."""
    mixes = settings.mix_alpha > 0
    batch = place.peak + (mixes or settings.log_drift) * place.recorded
    row, fold = sum_sizes(work, settings, tasks)
    folded = summed = transient = system = 0
    for group in place.groups:
        width, outputs = group.width, sum(group.outputs)
        squares = (1 + (mixes and not group.is_narrow)) * width**2
        products = mixes * (outputs if group.is_narrow else width)
        folded += fold * (squares + outputs * width)
        summed += row * (squares + group.is_narrow * products * width)
        one = max(group.outputs) * width
        transient = max(transient, fold * 2 * (width**2 + one))
        system = max(system, fold * (width**2 + 5 * one))
    read = sum(work.tensors[name] for name in {work.names[name] for name in place.needed})
    return {
        "batch": batch,
        "statistics": folded + max(0, summed + max(0, transient - batch), system - batch),
        "block": (tasks if fused else 1) * read + fold * place.calibrated + place.parameters // 2,
    }


def sum_sizes(work: Work, settings: FeatCalSettings, tasks: int) -> tuple[int, int]:
    """Bytes of a number in the sums over rows, and in what is formed of them."""
    cpu, least = torch.device("cpu"), work.dtype.itemsize
    dtypes = row_dtype(settings, tasks, cpu), fold_dtype(settings, tasks, cpu)
    return max(dtypes[0].itemsize, least), max(dtypes[1].itemsize, least)


def read_bytes(
    work: Work,
    settings: FeatCalSettings,
    tasks: int,
    *,
    itemsize: int | None = None,
    fused: bool = False,
) -> int:
    """Bytes that are read from all experts, as the log counts them.

    Their files have numbers of `itemsize` bytes, by default as in the model. A `fused` upstream
    merge, which shares the reads, needs every tensor.

    Raises:
        CalibrationError: If a read budget is too small.
    """
    own = work.dtype.itemsize
    sizes = {name: size * (itemsize or own) // own for name, size in work.tensors.items()}
    blocks = [block.name for block in work.blocks]
    needed = {place.name: list(place.needed) for place in work.places}
    for name in work.names if fused else ():  # those outside of blocks are merged first
        place = next((b for b in blocks if name.startswith(f"{b}.")), work.places[0].name)
        needed[place].append(name)
    reads = {
        str(task): reads_of(task, needed, blocks, work.names, sizes.__getitem__)
        for task in range(tasks)
    }
    full = make_plan(reads, None)
    if settings.expert_read_budget is None:
        return full.bytes
    return make_plan(reads, budget_in_bytes(settings.expert_read_budget, full.bytes)).bytes
