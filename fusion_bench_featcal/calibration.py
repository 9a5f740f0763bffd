"""FeatCal's loop: repair a merged model block by block in forward order (Algorithm 1)."""

import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from fusion_bench_featcal.checkpoints import describe_run, open_checkpoints
from fusion_bench_featcal.core.drift import DriftSums, drift_norm_sum
from fusion_bench_featcal.engine.activations import open_activations
from fusion_bench_featcal.engine.ahead import expect_after
from fusion_bench_featcal.engine.block import BlockSums, load_updates
from fusion_bench_featcal.engine.kernels import (
    agreed_kernel,
    choose_kernel,
    using_kernel,
    with_kernel,
)
from fusion_bench_featcal.engine.log import CalibrationLog
from fusion_bench_featcal.engine.memory import naming_memory
from fusion_bench_featcal.engine.merging import FusedMerge, UpstreamMerge
from fusion_bench_featcal.engine.modules import find_all_modules
from fusion_bench_featcal.engine.precision import exact_products
from fusion_bench_featcal.engine.processes import OneProcess, Processes, announced
from fusion_bench_featcal.engine.reading import plan_reads, reads_manifest
from fusion_bench_featcal.engine.recording import Recording
from fusion_bench_featcal.engine.run import Autocast, Modes, Run, copied, room_of_a_visit
from fusion_bench_featcal.engine.samples import Batch, check_inputs, take_samples
from fusion_bench_featcal.engine.shares import Shares
from fusion_bench_featcal.engine.stages import Streams, Tasks, begin_together, skip_stage
from fusion_bench_featcal.engine.task_sums import TaskSums
from fusion_bench_featcal.engine.together import begin_sharing, combine_task, solve_together
from fusion_bench_featcal.engine.visits import Visit, task_record
from fusion_bench_featcal.experts import ExpertModel, ExpertSource, source_of
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.families.views import view_of
from fusion_bench_featcal.plan.advice import memory_advice
from fusion_bench_featcal.reads.ledger import LedgerSource, ReadLedger, stage_place
from fusion_bench_featcal.settings import FeatCalSettings


@dataclass(frozen=True)
class CalibrationResult:
    """A calibrated model and what was done to it.

    Attributes:
        model: The calibrated model: class, dtype and device of the merged one.
        log: Records of every block.
        reads: What was planned and what was read, see docs/read_budget.md.
    """

    model: nn.Module
    log: CalibrationLog
    reads: dict[str, Any] = field(default_factory=dict)


@announced
@torch.inference_mode(False)  # hooks tell tensors apart by version, which inference mode lacks
@torch.no_grad()
def calibrate(
    merged: nn.Module,
    base: nn.Module | ExpertSource | None,
    experts: Mapping[str, nn.Module | ExpertSource],
    batches: Mapping[str, Iterable[Any]],
    settings: FeatCalSettings,
    family: Any = None,
    *,
    device: torch.device | str | None = None,
    autocast: Autocast | None = None,
    progress: bool = True,
    in_place: bool = False,
    merging: UpstreamMerge | None = None,
    processes: Processes | None = None,
) -> CalibrationResult:
    """Calibrate a merged model (Algorithm 1).

    All modules of a block are solved from one snapshot, taken before the block changes; the next
    block sees what the updated block produces.

    Args:
        merged: The merged model. It is not changed (but by `in_place` and `merging`); its hooks,
            if any, go with the copy.
        base: The base model; None drops lambda for biases and norms and needs `anchor_rho` 1.
        experts: Each task's expert: a module, or a source of its weights.
        batches: Each task's unlabeled model inputs, in batches of any size: mappings of keyword
            arguments, tuples of arguments, or single tensors; batch first.
        settings: Settings; `samples_per_task` samples of each task are used.
        family: How the model is cut into blocks; None takes `settings.family`.
        device: Where to compute; None: where the merged model is.
        autocast: Makes the context for forward passes (Fabric's `autocast`); statistics are never
            inside it.
        progress: Whether to show a progress bar.
        in_place: Whether the merged model is used up, which saves a copy of it. A run that fails
            then leaves it partly calibrated.
        merging: An upstream merger to run on the way; then `merged` has the weights that it begins
            with, and becomes the merged model.
        processes: The processes that work on this calibration together: all of them call this with
            the same arguments, each on its own device. Each works on its share of the tasks; it
            asks for no other experts and no other samples. None: this process alone.

    Returns:
        The calibrated model and the log, the same in every process.

    Raises:
        CalibrationError: If the run cannot go on; the message names the place and the setting.
        ValueError: If the family is unknown, rho needs a base that is not there, or `in_place`
            would change the base or an expert.
    """
    check_inputs(base, experts, batches, settings)
    if in_place and merging is not None:
        raise ValueError("merging completes the merged model, which in_place would use up")
    if in_place and any(model is merged for model in (base, *experts.values())):
        raise ValueError("in_place needs a merged model that is neither the base nor an expert")
    processes = processes or OneProcess()
    shares = Shares(tuple(experts), processes.rank, processes.size)
    checkpoints = open_checkpoints(settings, processes)
    resolved = resolve_family(settings.family if family is None else family, merged)
    view = view_of(resolved)
    shown = view.shown(merged)

    ledger, sources = ReadLedger(), dict[str, LedgerSource]()

    def reader(name: str, source: nn.Module | ExpertSource, role: str = "expert") -> ExpertModel:
        sources[name] = LedgerSource(name, view.source(source_of(source)), ledger)
        return ExpertModel(name, checkpoints.watched(name, sources[name]), model, role=role)

    stages = resolved.stages(shown)
    modules = find_all_modules(shown, stages, settings)
    begin_sharing(processes, shares, settings, stages, shown)
    # Without gradients autocast keeps no copies of weights, which would be stale after an update.
    home, modes = _device_of(merged), Modes.of(shown)
    model = copied(shown, torch.device(device or home), in_place=in_place)
    kernel = choose_kernel(checkpoints.kernel() or settings.linear_kernel, _device_of(model))
    kernel = agreed_kernel(processes.gather(kernel))
    run = Run(
        model=model,
        base=None if base is None else reader("_pretrained_", base, "base model"),
        experts={task: reader(task, experts[task]) for task in shares.mine},
        family=resolved,
        settings=settings,
        autocast=with_kernel(kernel, autocast or nullcontext),
        progress=tqdm(
            total=len(modules) * len(shares.mine),
            disable=not progress or processes.rank > 0,
            leave=False,
            unit="visit",
        ),
        log=CalibrationLog(family=resolved.name),
        stages=stages,
        modules=modules,
        shares=shares,
        processes=processes,
        checkpoints=checkpoints,
        reads=ledger,
        merges=merging is not None,
        activations=open_activations(
            settings, _device_of(model), lambda: room_of_a_visit(model, modules)
        ),
    )
    if merging is not None:
        run.prepare = FusedMerge(merging, shown, run, sources)
    autocast_off = torch.autocast(_device_of(model).type, enabled=False)
    explained = naming_memory(_device_of(model), lambda: run.place, lambda: memory_advice(run))
    with autocast_off, using_kernel(kernel), run.progress, explained, run.activations:
        plan = plan_reads(run, sources, shown.state_dict())
        run.log.add("engine", {"linear_kernel": kernel})
        _compare_with_kept(run, shown, kernel, merging)
        _run_blocks(run, {t: take_samples(t, batches[t], settings) for t in shares.mine})
    modes.restore(run.model)
    reads = reads_manifest(run, plan)
    return CalibrationResult(view.restored(run.model).to(home), run.log, reads)


def _compare_with_kept(
    run: Run, shown: nn.Module, kernel: str, merging: UpstreamMerge | None
) -> None:
    """See that kept blocks, if there are any, are of this very run."""
    models = [*(["_pretrained_"] if run.base is not None else []), *run.shares.tasks]
    device, upstream = _device_of(run.model), None if merging is None else dict(merging.description)
    parts = (run.family, run.stages, run.settings, models, run.autocast, kernel, device)
    run.checkpoints.compare(lambda: describe_run(shown, *parts) | {"upstream": upstream})


def _run_blocks(run: Run, tasks: Tasks) -> None:
    """Algorithm 1's loop: stage by stage, block by block, in forward order.

    Blocks that an earlier run left behind are restored in place of being calibrated.
    """
    store = run.checkpoints
    tasks = {
        task: run.shares.cut(task, store.watched_samples(task, batches))
        for task, batches in tasks.items()
    }
    for index, stage in enumerate(run.stages):
        run.enter(stage_place(index))
        finished = all(map(store.has, stage))
        streams = skip_stage(run, tasks) if finished else begin_together(run, index, tasks)
        store.start()
        for block in stage:
            run.enter(block)
            if store.has(block):
                _restore_block(run, block, {} if finished else streams)
            else:
                updates = _calibrate_block(run, block, streams)
                store.keep(block, run.model, updates, run.log)
        tasks = streams
    run.processes.gather(None)  # none ends well while another still fails
    store.finish(run.log)


def _restore_block(run: Run, block: str, streams: Streams) -> None:
    """Load what an earlier run made of a block, and run the samples through it as that run did."""
    run.checkpoints.restore(block, run.model, run.log)
    for task, batches in streams.items():
        run.at(f"{block} · {task} (restored)")
        names = run.needed_by(block) if run.uses_expert_features else ()
        with run.experts[task].loaded(names) as expert_model:
            for batch in batches:
                if run.uses_expert_features:
                    _run_expert(run, expert_model, block, batch)
                    batch.exp_hidden = None
        _advance(run, block, batches)
    run.progress.update(len(run.experts))
    run.checkpoints.confirm(block)


def _calibrate_block(run: Run, block: str, streams: Streams) -> list[str]:
    """Collect from every task, solve, load, advance: one turn of Algorithm 1's loop.

    Returns:
        Names of the block's new parameters.
    """
    start, sums = time.perf_counter(), None
    if run.shares.leads:
        sums = BlockSums(block, run.modules[block].sites, run.model, run.base, run.settings)
    visits = {task: _collect(run, block, task, streams[task], sums) for task in streams}
    run.at(f"{block} · solve")
    with exact_products():
        updates, module_records = solve_together(sums, run.model, run.processes, run.shares)
    load_updates(run.model, block, updates)
    for task, batches in streams.items():
        run.at(f"{block} · {task} (update)")
        visits[task].after = _advance(run, block, batches)
    told = run.processes.gather((visits, time.perf_counter() - start))
    for task, parts in run.shares.collected([theirs for theirs, _ in told]).items():
        run.log.add("task", task_record(block, task, parts))
    for record in module_records:
        run.log.add("module", record)
    seconds, left = max(taken for _, taken in told), list(run.modules[block].left)
    run.log.add("block", {"block": block, "seconds": seconds, "left": left})
    return list(updates)


def _collect(
    run: Run, block: str, task: str, batches: list[Batch], into: BlockSums | None
) -> Visit:
    """Sum one task's module inputs over its batches and fold them into the block's sums."""
    start, expert = time.perf_counter(), run.experts[task]
    sites = run.modules[block].sites
    demo = run.settings.token_weights == "demo_last_block" and block == run.stages[-1][-1]
    drift: list[DriftSums] = []
    rows = 0
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
            # processes that share a task must sum alike, however many batches each has
            batches=0 if run.shares.divided else len(batches),
        )
        for batch in batches:
            hidden, _, cal = _run_recorded(run, run.model, block, batch.cal, to_end=False)
            exp = None
            if run.uses_expert_features:
                exp = _run_expert(run, expert_model, block, batch)
            if run.settings.log_drift and batch.exp_hidden is not None:
                drift.append(drift_norm_sum(hidden, batch.exp_hidden, batch.valid))
            rows += _rows(batch.cal.hidden if hidden is None else hidden, batch.valid)
            with exact_products():
                sums.add(run.model, cal, exp, batch.valid, batch.other)
        with exact_products():
            combine_task(sums, _device_of(run.model), run.processes, run.shares)
            if into is not None:
                into.add(sums, expert_model)
    run.progress.update()
    return Visit(
        samples=sum(batch.samples for batch in batches),
        rows=rows,
        seconds=time.perf_counter() - start,
        expert_bytes=run.reads.read(task, block),
        before=drift,
    )


def _run_expert(run: Run, expert: nn.Module, block: str, batch: Batch) -> Recording:
    """Run the expert's block on a batch; what its modules received.

    Some modules compute otherwise where they have hooks: a restored block runs with them too.
    """
    last = any(block == stage[-1] for stage in run.stages)
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
        outputs_of=[site.name for site in sites if site.narrows(model)] if to_end else (),
    )
    hidden, following = output or (None, None)
    return hidden, following, recording


def _advance(run: Run, block: str, batches: list[Batch]) -> list[DriftSums]:
    """Run the updated block, whose outputs the next block receives; the drift that is left."""
    drift: list[DriftSums] = []
    last = block == run.stages[-1][-1]
    for batch in batches:
        if last and not run.settings.log_drift:
            break
        with run.autocast():
            hidden, batch.cal = run.family.step(run.model, block, batch.cal)
        if run.settings.log_drift and batch.exp_hidden is not None:
            drift.append(drift_norm_sum(hidden, batch.exp_hidden, batch.valid))
        batch.exp_hidden = None
    return drift


def _rows(hidden: Tensor, valid: Tensor | None) -> int:
    return hidden.shape[:-1].numel() if valid is None else int((valid > 0).sum())


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
