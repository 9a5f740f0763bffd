"""Models, modules and streams of one calibration, prepared and checked."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.digests import glimpse
from fusion_bench_featcal.experts import ExpertModel, ExpertSource
from fusion_bench_featcal.experts.reads import Weights, open_weights
from fusion_bench_featcal.log import CalibrationLog
from fusion_bench_featcal.modules.models import (
    copied,
    gives_images,
    names_in_order,
    refuse_not_finite,
    tensors_of_head,
)
from fusion_bench_featcal.modules.sites import BlockModules, find_all_modules
from fusion_bench_featcal.processes import Processes, check_agreement
from fusion_bench_featcal.progress import Progress
from fusion_bench_featcal.rules.rule import Rule
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.checks import sums_dtype
from fusion_bench_featcal.streams.drift import DriftLog, Watch
from fusion_bench_featcal.streams.last_rows import last_rows_of
from fusion_bench_featcal.streams.places import place_of
from fusion_bench_featcal.streams.runner import Runner
from fusion_bench_featcal.streams.streams import Streams
from fusion_bench_featcal.team import Alone

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problem:
    """Models and modules of one calibration. Only the parameters of `model` change.

    Attributes:
        model: The merged model; blocks that have been passed are calibrated.
        base: The base model; None: anchors are the merged parameters.
        experts: The expert of each task.
        modules: The modules of each block.
        rule: How blocks are calibrated.
        dtype: Least precise dtype of sums over rows.
        precision: How their products are formed, as `sums_precision`.
        log: Records of every block.
        progress: Shows and names the work in hand.
    """

    model: nn.Module
    base: ExpertModel | None
    experts: Mapping[str, ExpertModel]
    modules: Mapping[str, BlockModules]
    rule: Rule
    dtype: torch.dtype
    precision: str
    log: CalibrationLog
    progress: Progress


def prepare(
    shown: nn.Module,
    base: nn.Module | ExpertSource | None,
    experts: Mapping[str, nn.Module | ExpertSource],
    samples: Mapping[str, list[Batch]],
    settings: FeatCalSettings,
    rule: Rule,
    runner: Runner,
    team: Alone,
    progress: Progress,
    *,
    streams_type: Callable[..., Streams],
    hashed: bool,
) -> tuple[Problem, Weights, Streams]:
    """Return the problem, the weights of the tasks of this process, and their streams.

    Args:
        shown: The merged model as the family sees it.
        base: The base model, or None.
        experts: The experts of all tasks.
        samples: The batches of each task of this process.
        settings: The settings.
        rule: The rule.
        runner: Runs blocks of models.
        team: The processes.
        progress: Shows and names the work in hand.
        streams_type: Makes the streams.
        hashed: Whether the count of reads has digests.
    """
    device, family, stages = runner.device, runner.family, runner.stages
    modules = find_all_modules(shown, stages, settings, calibrate_norm=rule.calibrate_norm)
    warn_of_routed(modules)
    model = copied(shown, device)
    weights = open_weights(
        shown,
        model,
        base,
        experts,
        settings.ignore_config,
        family.view,
        own=samples,
        spared=set(tensors_of_head(shown, stages[0][0])),
        hashed=hashed,
    )
    images = any(gives_images(model.get_submodule(block)) for block in modules)
    watch = DriftLog(channels_first=images) if settings.log_drift else Watch()
    runs_experts = rule.runs_experts or watch.needs_features
    order = names_in_order(model, family, stages, modules, runs_experts=runs_experts)
    budget = settings.expert_read_budget
    weights = weights.limited(budget, order, shown.state_dict(), team.gather)
    problem = Problem(
        model=model,
        base=weights.base,
        experts=weights.experts,
        modules=modules,
        rule=rule,
        dtype=sums_dtype(rule, settings.sums_precision, len(experts), device),
        precision=settings.sums_precision,
        log=CalibrationLog(family=family.name),
        progress=progress,
    )
    streams = streams_type(
        samples,
        runner,
        model,
        problem.experts,
        rule,
        watch=watch,
        place=place_of(settings, device),
        last_rows=last_rows_of(settings, rule, family),
        merged=merged_aside(problem, runner, shown) if settings.held_out != 0 else None,
    )
    return problem, weights, streams


def check_alike(
    processes: Processes,
    merged: nn.Module,
    experts: Mapping[str, Any],
    settings: FeatCalSettings,
    rule: Rule,
) -> None:
    """Refuse processes that were started with other arguments than the first one.

    Raises:
        CalibrationError: If one differs, naming the process and the difference.
    """
    if processes.size > 1:
        facts = {"settings": (rule, settings.of_the_model().as_dict()), "tasks": tuple(experts)}
        check_agreement(processes, **facts, weights=glimpse(merged))


def warn_of_routed(modules: Mapping[str, BlockModules]) -> None:
    """Warn of modules that a router chooses: they stay as merged."""
    if routed := sum(of_block.routed for of_block in modules.values()):
        logger.warning(
            "all %d linear modules of experts stay as merged: modules that a router chooses are "
            "not calibrated",
            routed,
        )


def check_weights(problem: Problem, label: str, advice: str) -> None:
    """Refuse NaN and infinity in the model, naming the base or expert that brought them."""
    models = [*([problem.base] if problem.base else []), *problem.experts.values()]

    def reader(source: ExpertModel) -> Callable[[str], object]:
        return lambda name: source.stored(name) if name in source.keys else None

    refuse_not_finite(problem.model, label, advice, map(reader, models))


def merged_aside(problem: Problem, runner: Runner, shown: nn.Module) -> nn.Module | None:
    """Return a copy of the merged model, if held-out samples need blocks that have changed."""
    family, stages = runner.family, runner.stages
    several = len(stages) > 1 and not family.hands_on
    statistics = any(s.kind == "batch_norm" for m in problem.modules.values() for s in m.sites)
    return copied(shown, runner.device) if family.whole_model or several or statistics else None
