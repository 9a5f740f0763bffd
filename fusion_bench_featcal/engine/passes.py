"""Passes of one task's samples through one block, of the calibrated model and of the expert."""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.core.drift import sum_drift
from fusion_bench_featcal.core.float32_products import exact_products
from fusion_bench_featcal.core.products import summing_in
from fusion_bench_featcal.engine.ahead import expect_after
from fusion_bench_featcal.engine.block import BlockSums
from fusion_bench_featcal.engine.recording import Recording
from fusion_bench_featcal.engine.rows import CountedRows, rows_of
from fusion_bench_featcal.engine.run import Run
from fusion_bench_featcal.engine.samples import Batch
from fusion_bench_featcal.engine.task_sums import TaskSums
from fusion_bench_featcal.engine.together import combine_task
from fusion_bench_featcal.engine.visits import RowSums, Stopwatch, Visit


def collect(run: Run, block: str, task: str, batches: list[Batch], into: BlockSums | None) -> Visit:
    """Sum one task's module inputs over its batches and fold them into the block's sums."""
    watch, expert = Stopwatch(run.device), run.experts[task]
    sites = run.modules[block].sites
    demo = run.settings.token_weights == "demo_last_block" and block == run.stages[-1][-1]
    drift: list[RowSums] = []
    rows = 0

    def summing() -> AbstractContextManager[None]:
        return summing_in(run.settings.sums_precision, run.device)

    run.at(f"{block} · {task}")
    expect_after(run, block, task)
    with expert.loaded(run.needed_by(block)) as expert_model:
        sums = TaskSums(
            block,
            task,
            sites,
            demo_weights=demo,
            mix_alpha=run.settings.mix_alpha,
            expert=expert_model,
            dtype=run.row_dtype,
            mean_dtype=run.fold_dtype,
        )
        for batch in batches:
            hidden, _, cal = _run_recorded(run, run.model, block, batch.cal, to_end=False)
            exp = None
            if run.uses_expert_features:
                exp = run_expert(run, expert_model, block, batch)
            if run.settings.log_drift and batch.exp_hidden is not None:
                drift.append(_drift(hidden, batch))
            rows += _count(batch.cal.hidden if hidden is None else hidden, batch.valid)
            with summing():
                sums.add(run.model, cal, exp, batch.valid, batch.other)
        with exact_products():
            combine_task(sums, run.device, run.processes, run.shares)
            if into is not None:
                into.add(sums, expert_model)
    watch.stop()
    run.progress.update()
    return Visit(
        samples=sum(batch.samples for batch in batches),
        rows=rows,
        watch=watch,
        expert_bytes=run.reads.read(task, block),
        before=drift,
    )


def run_expert(run: Run, expert: nn.Module, block: str, batch: Batch) -> Recording:
    """Run the expert's block on a batch; what its modules received.

    Some modules compute otherwise where they have hooks: a restored block runs with them too.
    """
    closing = run.stages[-1:] if run.hands_on else run.stages
    last = any(block == stage[-1] for stage in closing)
    hidden, batch.exp, recording = _run_recorded(run, expert, block, batch.exp, to_end=not last)
    batch.exp_hidden = hidden if run.settings.log_drift else None
    return recording


def _run_recorded(
    run: Run, model: nn.Module, block: str, call: Any, *, to_end: bool
) -> tuple[Any, Any, Recording]:
    """Run a block; its output and what the next receives, None where the pass could end before.

    With `to_end` false nobody needs them but the drift's record.
    """

    def step() -> tuple[Any, Any]:
        with run.autocast():
            return run.family.step(model, block, call)

    sites = run.modules[block].sites
    may_stop = getattr(run.family, "same_calls", False)
    needs_output = to_end or run.settings.log_drift or not may_stop
    output, recording = run.recorder.record(
        model,
        [site.name for site in sites],
        step,
        needs_output=needs_output,
    )
    hidden, following = output or (None, None)
    return hidden, following, recording


def advance(run: Run, block: str, batches: list[Batch]) -> list[RowSums]:
    """Run the updated block, whose outputs the next block receives; the drift that is left."""
    drift: list[RowSums] = []
    last = block == run.stages[-1][-1]
    for batch in batches:
        if last and not run.settings.log_drift:
            break
        with run.autocast():
            hidden, batch.cal = run.family.step(run.model, block, batch.cal)
        if run.settings.log_drift and batch.exp_hidden is not None:
            drift.append(_drift(hidden, batch))
        batch.exp_hidden = None
    return drift


def _count(hidden: Tensor, valid: CountedRows | None) -> int:
    return hidden.shape[:-1].numel() if valid is None else valid.count


def _drift(hidden: Tensor, batch: Batch) -> RowSums:
    """The drift of a batch's features from the expert's, and over how many rows."""
    assert batch.exp_hidden is not None
    rows = rows_of(hidden, batch.valid), rows_of(batch.exp_hidden, batch.valid)
    return sum_drift(*rows), len(rows[0])
