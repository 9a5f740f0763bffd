"""Calibration samples at the beginning of a stage: run, on both sides, up to its first block."""

from collections.abc import Iterable, Mapping

import torch

from fusion_bench_featcal.engine.ahead import expect_after_inputs
from fusion_bench_featcal.engine.run import Run
from fusion_bench_featcal.engine.samples import Batch, naming_task, to_device

Tasks = Mapping[str, Iterable[Batch]]
Streams = dict[str, list[Batch]]


def begin_stage(run: Run, index: int, tasks: Tasks) -> Streams:
    """Run every task's samples, on both sides, up to the first block of a stage.

    Earlier stages are calibrated by then, and run whole on both sides.
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
                batch.cal = batch.exp = None  # what an earlier stage ended with is no longer needed
                inputs = to_device(batch.inputs, run.device)
                begun = _begun(run, batch, streams[task])
                with naming_task(task):
                    begun.find_rows(run.family, inputs, index, run.settings.decoder_rows)
                    with run.autocast():
                        begun.cal = run.family.begin(run.model, inputs, first)
                        if run.uses_expert_features:
                            begun.exp = run.family.begin(expert_model, inputs, first)
                streams[task].append(begun)
        read = run.reads.read(task, run.reads.place)
        run.log.add("inputs", {"task": task, "stage": index, "expert_bytes": read})
    return streams


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


def skip_stage(run: Run, tasks: Tasks) -> Streams:
    """Take every task's samples past a stage whose blocks are all restored: nothing has to run."""
    several = len(run.stages) > 1
    return {
        task: [Batch(b.inputs if several else None, b.samples) for b in batches]
        for task, batches in tasks.items()
    }
