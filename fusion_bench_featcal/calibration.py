"""FeatCal's loop: repair a merged model block by block in forward order (Algorithm 1)."""

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from fusion_bench_featcal.core.drift import DriftSums, drift_norm_sum
from fusion_bench_featcal.engine.block import BlockSums, load_updates
from fusion_bench_featcal.engine.log import CalibrationLog
from fusion_bench_featcal.engine.modules import BlockModules, find_all_modules
from fusion_bench_featcal.engine.precision import exact_products
from fusion_bench_featcal.engine.recording import record_inputs
from fusion_bench_featcal.engine.samples import (
    Batch,
    check_inputs,
    naming_task,
    take_samples,
    to_device,
)
from fusion_bench_featcal.engine.task_sums import TaskSums
from fusion_bench_featcal.experts import ExpertModel, ExpertSource, InMemoryExpert, names_under
from fusion_bench_featcal.families import Family, resolve_family
from fusion_bench_featcal.families.views import view_of
from fusion_bench_featcal.settings import FeatCalSettings

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class CalibrationResult:
    """A calibrated model and what was done to it.

    Attributes:
        model: The calibrated model: class, dtype and device of the merged one.
        log: Records of every block.
    """

    model: nn.Module
    log: CalibrationLog


@dataclass
class Run:
    """Everything a calibration works with; `model` is the one thing it changes."""

    model: nn.Module
    base: ExpertModel | None
    experts: dict[str, ExpertModel]
    family: Family
    settings: FeatCalSettings
    autocast: Autocast
    progress: Any
    log: CalibrationLog
    stages: list[list[str]]
    modules: dict[str, BlockModules]
    drift: dict[str, list[DriftSums]] = field(default_factory=dict)

    @property
    def uses_expert_features(self) -> bool:
        """Whether experts run at all: a target without their share needs only their weights."""
        return self.settings.mix_alpha > 0 or self.settings.log_drift


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
) -> CalibrationResult:
    """Calibrate a merged model (Algorithm 1).

    All modules of a block are solved from one snapshot, taken before the block changes; the next
    block sees what the updated block produces.

    Args:
        merged: The merged model. It is not changed; its hooks, if any, go with the copy.
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

    Returns:
        The calibrated model and the log.

    Raises:
        CalibrationError: If the run cannot go on; the message names the place and the setting.
        ValueError: If the family is unknown or rho needs a base that is not there.
    """
    check_inputs(base, experts, batches, settings)
    resolved = resolve_family(settings.family if family is None else family, merged)
    view = view_of(resolved)
    shown = view.shown(merged)
    modules = find_all_modules(shown, resolved.stages(shown), settings)
    # Without gradients autocast keeps no copies of weights, which would be stale after an update.
    model = copy.deepcopy(shown).to(device or _device_of(merged)).eval().requires_grad_(False)
    run = Run(
        model=model,
        base=None
        if base is None
        else ExpertModel("_pretrained_", view.source(_source(base)), model, role="base model"),
        experts={t: ExpertModel(t, view.source(_source(e)), model) for t, e in experts.items()},
        family=resolved,
        settings=settings,
        autocast=autocast or nullcontext,
        progress=tqdm(
            total=len(modules) * len(experts), disable=not progress, leave=False, unit="visit"
        ),
        log=CalibrationLog(family=resolved.name),
        stages=resolved.stages(shown),
        modules=modules,
    )
    with torch.autocast(_device_of(model).type, enabled=False), run.progress:
        _run_blocks(run, {t: take_samples(t, batches[t], settings) for t in experts})
    _restore_modes(run.model, shown)
    return CalibrationResult(view.restored(run.model).to(_device_of(merged)), run.log)


def _run_blocks(run: Run, tasks: Mapping[str, Iterable[Batch]]) -> None:
    """Algorithm 1's loop: stage by stage, block by block, in forward order."""
    for index, stage in enumerate(run.stages):
        tasks = streams = _begin_stage(run, index, tasks)
        for block in stage:
            _calibrate_block(run, block, streams)


def _calibrate_block(run: Run, block: str, streams: dict[str, list[Batch]]) -> None:
    """Collect from every task, solve, load, advance: one turn of Algorithm 1's loop."""
    start = time.perf_counter()
    sums = BlockSums(block, run.modules[block].sites, run.model, run.base, run.settings)
    records = {task: _collect(run, block, task, streams[task], sums) for task in streams}
    with exact_products():
        updates, module_records = sums.solve()
    load_updates(run.model, block, updates)
    for task, batches in streams.items():
        records[task] |= _advance(run, block, batches)
        run.log.add("task", records[task])
    for record in module_records:
        run.log.add("module", record)
    left = list(run.modules[block].left)
    run.log.add("block", {"block": block, "seconds": time.perf_counter() - start, "left": left})


def _collect(
    run: Run, block: str, task: str, batches: list[Batch], into: BlockSums
) -> dict[str, Any]:
    """Sum one task's module inputs over its batches and fold them into the block's sums."""
    start, expert = time.perf_counter(), run.experts[task]
    read_before = expert.bytes_read
    sites = run.modules[block].sites
    demo = run.settings.token_weights == "demo_last_block" and block == run.stages[-1][-1]
    names = [site.name for site in sites]
    drift: list[DriftSums] = []
    rows = 0
    run.progress.set_description(f"FeatCal {block} · {task}")
    with expert.loaded(_needed_by(run, block)) as expert_model:
        sums = TaskSums(
            block,
            task,
            sites,
            demo_weights=demo,
            mix_alpha=run.settings.mix_alpha,
            expert=expert_model,
        )
        for batch in batches:
            with record_inputs(run.model, names) as cal, run.autocast():
                hidden, _ = run.family.step(run.model, block, batch.cal)
            exp = None
            if run.uses_expert_features:
                with record_inputs(expert_model, names) as exp, run.autocast():
                    batch.exp_hidden, batch.exp = run.family.step(expert_model, block, batch.exp)
            if run.settings.log_drift and batch.exp_hidden is not None:
                drift.append(drift_norm_sum(hidden, batch.exp_hidden, batch.valid))
            rows += _rows(hidden, batch.valid)
            with exact_products():
                sums.add(run.model, cal, exp, batch.valid, batch.other)
        with exact_products():
            into.add(sums, expert_model)
    run.progress.update()
    return {
        "block": block,
        "task": task,
        "samples": sum(batch.samples for batch in batches),
        "rows": rows,
        **_drift_record("before", drift),
        "seconds": time.perf_counter() - start,
        "expert_bytes": expert.bytes_read - read_before,
    }


def _advance(run: Run, block: str, batches: list[Batch]) -> dict[str, Any]:
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
    return _drift_record("after", drift)


def _drift_record(when: str, drift: list[DriftSums]) -> dict[str, float | None]:
    """Mean L2 drift over rows, and root mean square drift relative to the expert's features."""
    if not drift:
        return {f"drift_{when}": None, f"relative_drift_{when}": None}
    norms, squares, expert_squares, rows = (sum(column) for column in zip(*drift, strict=True))
    relative = (squares / expert_squares) ** 0.5 if expert_squares > 0 else None
    return {f"drift_{when}": norms / rows, f"relative_drift_{when}": relative}


def _rows(hidden: Tensor, valid: Tensor | None) -> int:
    return hidden.shape[:-1].numel() if valid is None else int((valid > 0).sum())


def _begin_stage(
    run: Run, index: int, tasks: Mapping[str, Iterable[Batch]]
) -> dict[str, list[Batch]]:
    """Run every task's samples, on both sides, up to the first block of a stage.

    Earlier stages are calibrated by then, and run whole on both sides.
    """
    first = run.stages[index][0]
    stem = _stem(run, index)
    device = _device_of(run.model)
    streams: dict[str, list[Batch]] = {}
    for task, batches in tasks.items():
        run.progress.set_description(f"FeatCal inputs · {task}")
        streams[task] = []
        read_before = run.experts[task].bytes_read
        with run.experts[task].loaded(stem if run.uses_expert_features else ()) as expert_model:
            for batch in batches:
                batch.cal = batch.exp = None  # what an earlier stage ended with is no longer needed
                inputs = to_device(batch.inputs, device)
                begun = Batch(batch.inputs if len(run.stages) > 1 else None, batch.samples)
                with naming_task(task):
                    begun.find_rows(run.family, inputs, index, run.settings.decoder_rows)
                    with run.autocast():
                        begun.cal = run.family.begin(run.model, inputs, first)
                        if run.uses_expert_features:
                            begun.exp = run.family.begin(expert_model, inputs, first)
                streams[task].append(begun)
        read = run.experts[task].bytes_read - read_before
        run.log.add("inputs", {"task": task, "stage": index, "expert_bytes": read})
    return streams


def _stem(run: Run, index: int) -> list[str]:
    """Names of the expert's tensors that lead to a stage: all but the blocks from it on, and head.

    A family that replays whole models begins without running anything.
    """
    if run.family.whole_model:
        return []
    model: Any = run.model
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    after = [block for stage in run.stages[index:] for block in stage]
    after += [name for name, module in model.named_modules() if module is head]
    names = list(model.state_dict())
    return sorted(set(names) - set(names_under(names, after)))


def _needed_by(run: Run, block: str) -> list[str]:
    """Names of the expert's tensors that one block's visit needs."""
    names = list(run.model.state_dict())
    return names if run.family.whole_model else names_under(names, [block])


def _restore_modes(model: nn.Module, merged: nn.Module) -> None:
    """Give every sub-module and parameter the merged one's training mode and gradient flag."""
    for ours, theirs in zip(model.modules(), merged.modules(), strict=True):
        ours.training = theirs.training
    for ours, theirs in zip(model.parameters(), merged.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)


def _source(model: nn.Module | ExpertSource) -> ExpertSource:
    return InMemoryExpert(model) if isinstance(model, nn.Module) else model


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
