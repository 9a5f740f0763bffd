"""FeatCal's loop: repair a merged model block by block in forward order (Algorithm 1)."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.checkpoints import describe_run
from fusion_bench_featcal.core.float32_products import convolving_as_multiplying, exact_products
from fusion_bench_featcal.core.kernels import using_kernel
from fusion_bench_featcal.engine.block import BlockSums, load_updates
from fusion_bench_featcal.engine.checks import refuse_not_finite
from fusion_bench_featcal.engine.log import CalibrationLog
from fusion_bench_featcal.engine.memory import naming_memory
from fusion_bench_featcal.engine.merging import FusedMerge, UpstreamMerge
from fusion_bench_featcal.engine.passes import advance, collect, run_expert
from fusion_bench_featcal.engine.processes import OneProcess, Processes, announced
from fusion_bench_featcal.engine.reading import plan_reads, reads_manifest
from fusion_bench_featcal.engine.run import BASE, Autocast, Modes, Run, device_of
from fusion_bench_featcal.engine.samples import check_inputs, take_samples
from fusion_bench_featcal.engine.stages import (
    Streams,
    Tasks,
    begin_together,
    can_skip,
    skip_stage,
)
from fusion_bench_featcal.engine.start import start_run
from fusion_bench_featcal.engine.together import solve_together
from fusion_bench_featcal.engine.visits import accounts_of, task_record
from fusion_bench_featcal.experts import ExpertModel, ExpertSource
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.families.views import view_of
from fusion_bench_featcal.plan.advice import memory_advice
from fusion_bench_featcal.reads.ledger import stage_place
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
        base: The base model; None needs `anchor_rho` 1, where every anchor is the merged parameter.
        experts: Each task's expert: a module, or a source of its weights.
        batches: Each task's unlabeled model inputs, in batches of any size: mappings of keyword
            arguments, tuples of arguments, or single tensors; batch first.
        settings: Settings; `samples_per_task` samples of each task are used, or all where there
            are fewer.
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
        ValueError: If the family is unknown, rho needs a base that is not there, `in_place` would
            change the base or an expert, or what is asked for does not go together.
    """
    processes = processes or OneProcess()
    check_inputs(base, experts, batches, settings)
    if merging is not None:
        _check_merging(processes, in_place=in_place)
    if in_place:
        _check_in_place(merged, base, experts, settings)
    resolved = resolve_family(settings.family if family is None else family, merged)
    view = view_of(resolved)
    shown, home = view.shown(merged), device_of(merged)
    modes = Modes.of(shown)
    run = start_run(
        shown,
        base,
        experts,
        settings,
        resolved,
        device=torch.device(device or home),
        autocast=autocast or nullcontext,
        progress=progress,
        in_place=in_place,
        processes=processes,
    )
    if merging is not None:
        run.merges, run.prepare = True, FusedMerge(merging, shown, run)
    autocast_off = torch.autocast(run.device.type, enabled=False)
    explained = naming_memory(run.device, lambda: run.place, lambda: memory_advice(run))
    try:
        with (
            autocast_off,
            convolving_as_multiplying(),
            using_kernel(run.kernel),
            run.progress,
            explained,
            run.activations,
        ):
            if merging is None:
                _check_weights(run, "the merged model", "Check method.base_method")
            plan = plan_reads(run, shown.state_dict())
            run.log.add("engine", {"linear_kernel": run.kernel})
            _compare_with_kept(run, shown, merging)
            mine = run.shares.mine
            _run_blocks(run, {t: take_samples(t, batches[t], settings, shown) for t in mine})
            _check_weights(run, "the calibrated model", "Raise method.ridge_lambda")
    finally:
        modes.restore(run.model)
    reads = reads_manifest(run, plan)
    return CalibrationResult(view.restored(run.model).to(home), run.log, reads)


def _check_weights(run: Run, label: str, advice: str) -> None:
    """Refuse NaN and infinity in the model, naming the base or expert that brought them."""
    models = [*([run.base] if run.base is not None else []), *run.experts.values()]

    def reader(source: ExpertModel) -> Callable[[str], object]:
        return lambda name: source.stored(name) if name in source.keys else None

    refuse_not_finite(run.model, label, advice, map(reader, models))


def _check_merging(processes: Processes, *, in_place: bool) -> None:
    if in_place:
        raise ValueError("merging completes the merged model, which in_place would use up")
    if processes.size > 1:
        raise ValueError("merging needs all experts, of which each process reads only its own")


def _check_in_place(
    merged: nn.Module, base: Any, experts: Mapping[str, Any], settings: FeatCalSettings
) -> None:
    if settings.expert_read_budget is not None:
        raise ValueError(
            "in_place uses up the merged weights, which method.expert_read_budget puts in place of "
            "those that are not read; set one of them off"
        )
    if any(model is merged for model in (base, *experts.values())):
        raise ValueError("in_place needs a merged model that is neither the base nor an expert")


def _compare_with_kept(run: Run, shown: nn.Module, merging: UpstreamMerge | None) -> None:
    """See that kept blocks, if there are any, are of this very run."""
    models = [*([BASE] if run.base is not None else []), *run.shares.tasks]
    upstream = None if merging is None else dict(merging.description)
    parts = (run.family, run.stages, run.settings, models, run.autocast, run.kernel, run.device)
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
        finished = can_skip(run, index)
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
                    run_expert(run, expert_model, block, batch)
                    batch.exp_hidden = None
        advance(run, block, batches)
    run.progress.update(len(run.experts))
    run.checkpoints.confirm(block)


def _calibrate_block(run: Run, block: str, streams: Streams) -> list[str]:
    """Collect from every task, solve, load, advance: one turn of Algorithm 1's loop.

    Returns:
        Names of the block's new parameters.
    """
    start, sums = time.perf_counter(), None
    if run.shares.leads:
        sites = run.modules[block].sites
        sums = BlockSums(block, sites, run.model, run.base, run.settings, run.fold_dtype)
    visits = {task: collect(run, block, task, streams[task], sums) for task in streams}
    run.at(f"{block} · solve")
    with exact_products():
        updates, module_records = solve_together(sums, run.model, run.processes, run.shares)
    load_updates(run.model, block, updates)
    for task, batches in streams.items():
        run.at(f"{block} · {task} (update)")
        visits[task].after = advance(run, block, batches)
    told = run.processes.gather((accounts_of(visits), time.perf_counter() - start))
    for task, parts in run.shares.collected([theirs for theirs, _ in told]).items():
        run.log.add("task", task_record(block, task, parts))
    for record in module_records:
        run.log.add("module", record)
    seconds, left = max(taken for _, taken in told), list(run.modules[block].left)
    run.log.add("block", {"block": block, "seconds": seconds, "left": left})
    return list(updates)
