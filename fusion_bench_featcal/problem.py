"""One calibration, prepared and checked: models, modules and samples."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.core.kernels import (
    agreed_kernel,
    choose_kernel,
    processor,
    with_kernel,
)
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
from fusion_bench_featcal.modules.sites import BlockModules, find_all_modules
from fusion_bench_featcal.output import InMemory, open_output
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.processes import Processes, check_agreement
from fusion_bench_featcal.progress import Progress
from fusion_bench_featcal.rules import rule_of
from fusion_bench_featcal.rules.rule import Rule
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.checks import sums_dtype
from fusion_bench_featcal.streams.drift import DriftLog
from fusion_bench_featcal.streams.family_check import checked_family
from fusion_bench_featcal.streams.last_rows import last_rows_of
from fusion_bench_featcal.streams.runner import Runner
from fusion_bench_featcal.streams.samples import rows_named, take
from fusion_bench_featcal.streams.storage import storage_for
from fusion_bench_featcal.streams.streams import Streams
from fusion_bench_featcal.team import Team

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
    hashed: bool = False

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
        team: The processes.
        output: Stores finished blocks.
        dtype: Least precise dtype of sums over rows.
        precision: Precision of the products in these sums, as `sums_precision`.
        sums_at_once: The setting.
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
    team: Team
    output: InMemory
    dtype: torch.dtype
    precision: str
    sums_at_once: str
    kernel: str
    log: CalibrationLog
    progress: Progress

    @property
    def model(self) -> nn.Module:
        """Return the calibrated model, with only some tensors in memory."""
        return self.working.module

    @property
    def structure(self) -> nn.Module:
        """Return the model without tensors, while no expert is in memory."""
        return next(iter(self.experts.values())).module

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
    rule, tasks = rule_of(settings), tuple(request.experts)
    output = open_output(settings, processes)
    check_alike(request, rule)
    team = Team(processes, tasks, device)
    samples = {}
    for task in team.tasks:
        processes.doing = f"inputs · {task}"
        samples[task] = take(task, request.batches[task], settings, request.merged, team.cut)
    kernel = agreed_kernel(team.gather(choose_kernel(settings.linear_kernel, device)))
    runner = runner_of(request, rule, samples, team, kernel)
    processes.doing = "the models"
    return problem_of(request, rule, samples, team, output, runner, kernel)


def runner_of(
    request: Request, rule: Rule, samples: Mapping[str, list[Batch]], team: Team, kernel: str
) -> Runner:
    """Return the runner for blocks of models, with the family that the settings name."""
    settings, merged = request.settings, request.merged
    family = checked_family(
        resolve_family(settings.family, merged),
        settings.family,
        request.runnable,
        samples,
        device=request.device if request.merged_weights is not None else None,
        needs_closing=rule.reads_closing_rows or settings.held_out != 0,
        of_first=team.of_first,
    )
    rows = team.of_first(lambda: rows_named(settings, next(iter(samples.values()))[0].inputs))
    stages = stages_of(family, family.view.arranged(merged))
    return Runner(family, stages, request.device, with_kernel(kernel, request.autocast), rows)


def problem_of(
    request: Request,
    rule: Rule,
    samples: Mapping[str, list[Batch]],
    team: Team,
    output: InMemory,
    runner: Runner,
    kernel: str,
) -> Problem:
    """Return the problem for selected samples, with the block-wise sources opened."""
    settings, device = request.settings, request.device
    family, stages = runner.family, runner.stages
    merged = family.view.arranged(request.merged)
    modules = find_all_modules(merged, stages, settings, calibrate_norm=rule.calibrate_norm)
    warn_of_routed(modules)
    source = request.merged_weights and family.view.source(request.merged_weights)
    working = WorkingModel(merged, source, device=device)
    model = working.module
    weights = open_weights(
        merged,
        working,
        request.base if rule.reads_base else None,
        request.experts,
        settings.ignore_config,
        family.view,
        tasks=samples,
        spared=set(tensors_of_head(merged, stages[0][0])),
        hashed=request.hashed,
    )
    images = any(gives_images(model.get_submodule(block)) for block in modules)
    drift = DriftLog(channels_first=images) if settings.log_drift else None
    runs_experts = rule.runs_experts or drift is not None
    order = names_in_order(model, family, stages, modules, runs_experts=runs_experts)
    budget = settings.expert_read_budget
    weights = weights.limited(budget, order, working.merged, team.gather)
    aside = None
    if settings.held_out != 0 and needs_merged_aside(runner, modules):
        aside = WorkingModel(merged, source, device=device)
    streams = request.streams_type(
        samples,
        runner,
        working,
        weights.experts,
        rule,
        drift=drift,
        storage=storage_for(settings, device),
        last_rows=last_rows_of(settings, rule, family),
        aside=aside,
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
        team=team,
        output=output,
        dtype=sums_dtype(rule, settings.sums_precision, len(request.experts), device),
        precision=settings.sums_precision,
        sums_at_once=settings.sums_at_once,
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
        from fusion_bench_featcal.output.fingerprint import glimpse

        settings, tasks = request.settings.of_the_model().as_dict(), tuple(request.experts)
        weights = glimpse(request.merged_weights or source_of(request.merged))
        facts = {"settings": (rule, settings), "tasks": tasks, "weights": weights}
        check_agreement(request.processes, **facts)


def warn_of_routed(modules: Mapping[str, BlockModules]) -> None:
    """Warn of modules that a router selects, which keep their merged weights."""
    if routed := sum(of_block.routed for of_block in modules.values()):
        logger.warning(
            "the experts of %s stay as merged: modules that a router chooses are not calibrated",
            counted(routed, "mixture"),
        )


def check_merged(problem: Problem) -> None:
    """Refuse NaN and infinity in the merged model, naming the base or expert they came from."""
    models = [*([problem.base] if problem.base else []), *problem.experts.values()]

    def reader(source: ExpertModel) -> Callable[[str], object]:
        return lambda name: source.stored(name) if name in source.keys else None

    refuse_not_finite(
        problem.merged, "the merged model", "Check method.base_method", map(reader, models)
    )


def needs_merged_aside(runner: Runner, modules: Mapping[str, BlockModules]) -> bool:
    """Return whether held-out samples need the merged weights of blocks already calibrated."""
    family = runner.family
    several = len(runner.stages) > 1 and not family.hands_on
    statistics = any(site.kind == "batch_norm" for m in modules.values() for site in m.sites)
    return family.whole_model or several or statistics
