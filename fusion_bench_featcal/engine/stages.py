"""Calibration samples at the beginning of a stage: run, on both sides, up to its first block."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.engine.ahead import expect_after_inputs
from fusion_bench_featcal.engine.run import Run
from fusion_bench_featcal.engine.samples import Batch, check_finite_inputs, naming_task, to_device

Tasks = Mapping[str, Iterable[Batch]]
Streams = dict[str, list[Batch]]


def begin_stage(run: Run, index: int, tasks: Tasks) -> Streams:
    """Run every task's samples, on both sides, up to the first block of a stage.

    Earlier stages are calibrated by then. They run whole on both sides, but for families that hand
    on what their last blocks gave.
    """
    first = run.stages[index][0]
    stem = run.leading_to(index)
    streams: Streams = {}
    for task, batches in tasks.items():
        run.at(f"inputs · {task}")
        expect_after_inputs(run, index, task)
        streams[task] = []
        with run.experts[task].loaded(stem if run.uses_expert_features else ()) as expert_model:
            for batch in batches:
                if run.example is None:
                    run.example = to_device(batch.inputs, torch.device("meta"))
                ends = (batch.cal, batch.exp) if run.hands_on else (None, None)
                batch.cal = batch.exp = None
                inputs = to_device(batch.inputs, run.device)
                begun = _begun(run, batch, streams[task])
                with naming_task(task):
                    begun.find_rows(run.family, inputs, index, run.settings.decoder_rows)
                    if index == 0 and begun.valid is None:  # padding may hold anything
                        check_finite_inputs(batch.inputs, task, batch.index)
                    with run.autocast():
                        begun.cal = _first_call(run, run.model, inputs, first, ends[0])
                        if run.uses_expert_features:
                            begun.exp = _first_call(run, expert_model, inputs, first, ends[1])
                streams[task].append(begun)
        read = run.reads.read(task, run.reads.place)
        run.log.add("inputs", {"task": task, "stage": index, "expert_bytes": read})
    return streams


def _first_call(run: Run, model: nn.Module, inputs: Any, first: str, end: Any) -> Any:
    """Input of a stage's first block, given what a block behind the last stage's would receive."""
    if end is None:
        return run.family.begin(model, inputs, first)
    family: Any = run.family
    return family.begin(model, inputs, first, family.ending(model, end))


def _begun(run: Run, batch: Batch, before: list[Batch]) -> Batch:
    """A batch at the beginning of a stage, which the last one before it knows of."""
    begun = Batch(
        batch.inputs if len(run.stages) > 1 else None,
        batch.samples,
        waits=run.activations,
    )
    if before:
        before[-1].following = begun
    return begun


def begin_together(run: Run, index: int, tasks: Tasks) -> Streams:
    """Begin a stage with this process's samples, and log it for those of all processes."""
    known = len(run.log.records)
    streams = begin_stage(run, index, tasks)
    mine = {record["task"]: record for record in run.log.records[known:]}
    told = run.shares.collected(run.processes.gather(mine))
    run.log.records[known:] = [records[0] for records in told.values()]
    return streams


def can_skip(run: Run, index: int) -> bool:
    """Return whether a stage's blocks are all kept, and nothing that they give is needed."""
    needed = run.stages[index:] if run.hands_on else [run.stages[index]]
    return all(run.checkpoints.has(block) for stage in needed for block in stage)


def skip_stage(run: Run, tasks: Tasks) -> Streams:
    """Take every task's samples past a stage whose blocks are all restored: nothing has to run."""
    several = len(run.stages) > 1
    return {
        task: [Batch(b.inputs if several else None, b.samples) for b in batches]
        for task, batches in tasks.items()
    }
