"""Samples that take no part in the solves: on them the calibrated and the merged model compare."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from fusion_bench_featcal.engine.problem import Problem
from fusion_bench_featcal.engine.rows import CountedRows
from fusion_bench_featcal.engine.samples import Batch
from fusion_bench_featcal.engine.sensitivity import final_rows
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.settings import CalibrationError

SHARE, MOST, LEAST = 8, 32, 16
"""`auto` holds out one sample of 8, 32 at most, and none of fewer than 16."""


def held_out_of(samples: int, held_out: int | str) -> int:
    """Number of samples to hold out.

    Args:
        samples: Number of samples of a task.
        held_out: The setting.
    """
    if held_out != "auto":
        return int(held_out)
    return 0 if samples < LEAST else min(samples // SHARE, MOST)


def hold_out(task: str, batches: Iterable[Batch], held_out: int | str) -> Iterator[Batch]:
    """Yield a task's batches, its last samples in batches that are held out.

    Args:
        task: The task.
        batches: Its batches, before their way through the blocks.
        held_out: The setting.

    Raises:
        CalibrationError: If no sample is left to solve with.
    """
    most = MOST if held_out == "auto" else int(held_out)
    waiting: deque[Batch] = deque()
    total = last = 0  # samples, and those of them that may be held out
    for batch in batches:
        waiting.append(batch)
        total, last = total + batch.samples, last + batch.samples
        while waiting and last - waiting[0].samples >= most:
            last -= waiting[0].samples
            yield waiting.popleft()
    held = held_out_of(total, held_out)
    if held >= total:
        raise CalibrationError(
            f"task {task}: method.held_out={held} leaves none of its {counted(total, 'sample')} to "
            "solve with. Lower it, or set it to auto"
        )
    used = last - held
    for batch in waiting:
        part, rest = batch.split(min(used, batch.samples))
        used -= part.samples
        if part.samples:
            yield part
        if rest.samples:
            yield replace(rest, held=True)


def compared_rows(problem: Problem, stage: int, inputs: Any, batch: Batch) -> CountedRows | None:
    """Positions at which a batch compares models in a stage; None: all.

    In the last stage those whose final features are read, elsewhere those that count.

    Args:
        problem: The problem.
        stage: The stage's index.
        inputs: The model's inputs.
        batch: The batch at the stage's first block.
    """
    if stage < len(problem.stages) - 1:
        return batch.valid
    hidden = getattr(batch.cal, "hidden", None)
    read = None
    if isinstance(hidden, Tensor):
        read = problem.family.closing_rows(problem.model, hidden)
    return final_rows(problem, inputs) if read is None else CountedRows.of_weights(read)
