"""One calibration, prepared and checked: models, modules and samples."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.checkpoint import Checkpoint, open_checkpoint
from fusion_bench_featcal.core.kernels import (
    agreed_kernel,
    choose_kernel,
    processor,
    with_kernel,
)
from fusion_bench_featcal.digests import glimpse
from fusion_bench_featcal.experts import ExpertModel, ExpertSource, source_of
from fusion_bench_featcal.experts.reads import Weights, open_weights
from fusion_bench_featcal.experts.working_model import WorkingModel
from fusion_bench_featcal.families import resolve_family, stages_of
from fusion_bench_featcal.log import CalibrationLog
from fusion_bench_featcal.modules.models import (
    gives_images,
    names_in_order,
    refuse_not_finite,
    tensors_of_head,
)
from fusion_bench_featcal.modules.sites import BlockModules, find_all_modules, left_out
from fusion_bench_featcal.processes import Processes, check_agreement
from fusion_bench_featcal.progress import Progress
from fusion_bench_featcal.rules import rule_of
from fusion_bench_featcal.rules.rule import Rule
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.drift import DriftLog
from fusion_bench_featcal.streams.family_check import checked_family
from fusion_bench_featcal.streams.runner import Runner
from fusion_bench_featcal.streams.samples import rows_named, take
from fusion_bench_featcal.streams.storage import storage_for
from fusion_bench_featcal.streams.streams import Streams

logger = logging.getLogger(__name__)


Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Request:
    """Arguments of `calibrate`, documented there."""

    merged: nn.Module
    base: nn.Module | ExpertSource | None
    experts: Mapping[str, nn.Module | ExpertSource]
    batches: Mapping[str, Iterable[Any]]
    settings: FeatCalSettings
    device: torch.device
    merged_weights: ExpertSource | None = None
    autocast: Autocast = nullcontext
    progress: bool = True
    processes: Processes = field(default_factory=Processes)
    streams_type: Callable[..., Streams] = Streams

    @property
    def runnable(self) -> nn.Module:
        """Return the merged model. If it is only a structure, tensors are loaded when needed."""
        if self.merged_weights is None:
            return self.merged
        from fusion_bench_featcal.experts.offloaded import offloaded

        return offloaded(self.merged, self.merged_weights, self.device)


@dataclass(frozen=True)
class Problem:
    """One calibration. Only the parameters of `model` and the samples' features change.

    Attributes:
        merged: The merged model in the family's view.
        working: The calibrated model, with one block at a time in memory.
        weights: Weights of the base and of the experts of this process's tasks.
        modules: The modules of each block.
        rule: The rule that calibrates blocks.
        streams: The samples of this process.
        processes: The processes, each of which works on some tasks.
        output: Stores finished blocks.
        dtype: Least precise dtype of sums over rows.
        kernel: Library that multiplies float32 matrices on the CPU.
        log: Records of every block.
        progress: Shows the current work.
    """

    merged: nn.Module
    working: WorkingModel
    weights: Weights
    modules: Mapping[str, BlockModules]
    rule: Rule
    streams: Streams
    processes: Processes
    output: Checkpoint
    dtype: torch.dtype
    kernel: str
    log: CalibrationLog
    progress: Progress

    @property
    def model(self) -> nn.Module:
        """Return the calibrated model, with only some tensors in memory."""
        return self.working.module

    @property
    def base(self) -> ExpertModel | None:
        """Return the base model, or None if anchors are the merged parameters."""
        return self.weights.base

    @property
    def experts(self) -> Mapping[str, ExpertModel]:
        """Return the expert of each task of this process."""
        return self.weights.experts

    def read_ahead(self, block: str, task: str, names: Sequence[str]) -> None:
        """Start reading the weights that are needed after a task's first visit to a block.

        These are the tensors `names` of the next task's expert and, after the last task, the next
        block of the calibrated model, the base and the first expert.
        """
        streams, tasks, blocks = self.streams, list(self.streams.tasks), list(self.modules)
        if task != tasks[-1]:
            self.experts[tasks[tasks.index(task) + 1]].will_need(names)
        elif block != blocks[-1]:
            following = blocks[blocks.index(block) + 1]
            solved = [name for site in self.modules[following].sites for name in site.names]
            run = streams.tensors_of(following)
            self.working.will_need(run)
            if self.base is not None:
                self.base.will_need(solved)
            self.experts[tasks[0]].will_need(run if streams.runs_experts else solved)


@dataclass(frozen=True)
class CalibrationResult:
    """A calibrated model and its history.

    Attributes:
        model: The calibrated model, with class, dtype and device of the merged one. With
            `merged_weights` only its structure.
        log: Records of every block.
        reads: Count of the bytes read (see docs/read_budget.md).
        folder: The output folder with the calibrated model, or None.
    """

    model: nn.Module
    log: CalibrationLog
    reads: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None


def prepare(request: Request) -> Problem:
    """Open models and samples of a calibration, and check them."""
    settings, processes, device = request.settings, request.processes, request.device
    rule = rule_of(settings)
    output = open_checkpoint(settings, processes)
    check_alike(request, rule)
    samples = {}
    for task in processes.share(request.experts):
        processes.doing = f"inputs · {task}"
        batches = request.batches[task]
        samples[task] = take(task, batches, settings, request.merged, holds_out=rule.holds_out)
    kernel = agreed_kernel(processes.gather(choose_kernel(device)))
    runner = runner_of(request, rule, samples, kernel)
    processes.doing = "the models"
    return problem_of(request, rule, samples, output, runner, kernel)


def runner_of(
    request: Request, rule: Rule, samples: Mapping[str, list[Batch]], kernel: str
) -> Runner:
    """Return the runner for blocks of models, with the family that the settings name."""
    settings, merged = request.settings, request.merged
    family = checked_family(
        resolve_family(settings.family, merged),
        request.runnable,
        samples,
        device=request.device if request.merged_weights is not None else None,
        needs_closing=rule.reads_closing_rows,
    )
    rows = rows_named(settings, next(iter(samples.values()))[0].inputs)
    stages = stages_of(family, family.view.arranged(merged))
    return Runner(family, stages, request.device, with_kernel(kernel, request.autocast), rows)


def problem_of(
    request: Request,
    rule: Rule,
    samples: Mapping[str, list[Batch]],
    output: Checkpoint,
    runner: Runner,
    kernel: str,
) -> Problem:
    """Return the problem for selected samples, with the block-wise sources opened."""
    settings, device, processes = request.settings, request.device, request.processes
    family, stages = runner.family, runner.stages
    merged = family.view.arranged(request.merged)
    modules = find_all_modules(merged, stages, settings, calibrate_norm=rule.calibrate_norm)
    if kinds := left_out(modules):
        logger.warning("modules that stay as merged: %s", ", ".join(kinds))
    source = request.merged_weights and family.view.source(request.merged_weights)
    working = WorkingModel(merged, source, device=device)
    model = working.module
    weights = open_weights(
        merged,
        working,
        request.base if rule.reads_base else None,
        request.experts,
        family.view,
        tasks=samples,
        spared=set(tensors_of_head(merged, stages[0][0])),
    )
    images = any(gives_images(model.get_submodule(block)) for block in modules)
    drift = DriftLog(channels_first=images) if rule.runs_experts else None
    runs_experts = rule.runs_experts
    order = names_in_order(model, family, stages, modules, runs_experts=runs_experts)
    budget = settings.expert_read_budget
    weights = weights.limited(budget, order, working.merged, processes.gather)
    streams = request.streams_type(
        samples,
        runner,
        working,
        weights.experts,
        rule,
        drift=drift,
        storage=storage_for(settings, device),
    )
    steps = sum(map(len, stages)) * len(samples)
    log = CalibrationLog(family=family.name)
    log.add("engine", {"linear_kernel": kernel, "processor": processor()})
    return Problem(
        merged=merged,
        working=working,
        weights=weights,
        modules=modules,
        rule=rule,
        streams=streams,
        processes=processes,
        output=output,
        dtype=rule.dtype(len(request.experts), device),
        kernel=kernel,
        log=log,
        progress=Progress(request.processes, steps, show=request.progress),
    )


def check_alike(request: Request, rule: Rule) -> None:
    """Refuse processes with other arguments than the first process.

    Raises:
        CalibrationError: If one differs, naming the process and the difference.
    """
    if request.processes.size > 1:
        settings, tasks = request.settings.of_the_model().as_dict(), tuple(request.experts)
        weights = glimpse(request.merged_weights or source_of(request.merged))
        facts = {"settings": (rule, settings), "tasks": tasks, "weights": weights}
        check_agreement(request.processes, **facts)


def check_merged(problem: Problem) -> None:
    """Refuse NaN and infinity in the merged model, naming the base or expert they came from."""
    models = [*([problem.base] if problem.base else []), *problem.experts.values()]

    def reader(source: ExpertModel) -> Callable[[str], object]:
        return lambda name: source.stored(name) if name in source.keys else None

    refuse_not_finite(
        problem.merged, "the merged model", "Check method.base_method", map(reader, models)
    )
