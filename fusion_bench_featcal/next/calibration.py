"""Algorithm 1: repair a merged model block by block, in forward order."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.calibration import CalibrationResult
from fusion_bench_featcal.core.cholesky import UnsolvedError
from fusion_bench_featcal.core.float32_products import convolving_as_multiplying, exact_products
from fusion_bench_featcal.core.kernels import choose_kernel, using_kernel
from fusion_bench_featcal.engine.block import load_updates
from fusion_bench_featcal.engine.family_check import checked_family
from fusion_bench_featcal.engine.log import CalibrationLog
from fusion_bench_featcal.engine.modules import Site
from fusion_bench_featcal.engine.problem import Autocast, Modes, copied, device_of
from fusion_bench_featcal.engine.processes import Processes
from fusion_bench_featcal.engine.samples import check_inputs, rows_named
from fusion_bench_featcal.engine.setup import set_up
from fusion_bench_featcal.experts import ExpertModel, ExpertSource
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.next.modules.groups import Group, find_groups
from fusion_bench_featcal.next.rules.rule import GroupSums, Rule
from fusion_bench_featcal.next.streams.checks import Checks
from fusion_bench_featcal.next.streams.drift import DriftLog, Watch
from fusion_bench_featcal.next.streams.runner import Runner
from fusion_bench_featcal.next.streams.samples import take
from fusion_bench_featcal.next.streams.streams import Streams
from fusion_bench_featcal.next.streams.task_rows import AffineRows, LinearRows
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings


@dataclass(frozen=True)
class Problem:
    """Models and modules of one calibration. Only the parameters of `model` change.

    Attributes:
        model: The merged model; blocks that have been passed are calibrated.
        base: The base model; None: anchors are the merged parameters.
        experts: The expert of each task.
        sites: The calibrated modules of each block.
        rule: How blocks are calibrated.
        dtype: Least precise dtype of sums over rows.
        log: Records of every block.
    """

    model: nn.Module
    base: ExpertModel | None
    experts: Mapping[str, ExpertModel]
    sites: Mapping[str, Sequence[Site]]
    rule: Rule
    dtype: torch.dtype
    log: CalibrationLog


def calibrate_blocks(problem: Problem, streams: Streams) -> None:
    """Calibrate every block (Algorithm 1)."""
    for index, stage in enumerate(streams.runner.stages):
        streams.begin(index)
        for block in stage:
            start, entering = time.perf_counter(), groups_of(problem, streams, block)
            for turn in problem.rule.turns(entering) or [[]]:
                sums = collect(problem, streams, block, turn, entering)
                load_updates(problem.model, block, solve(problem, block, sums))
                entering = None
            streams.advance(block)
            note(problem.log, block, streams, time.perf_counter() - start)


def groups_of(problem: Problem, streams: Streams, block: str) -> list[Group]:
    """Return the groups of a block's modules, in the order of their calls."""
    sites = problem.sites[block]
    if not sites:
        return []
    streams.narrow(block, [site.name for site in sites if site.kind == "linear"])
    recorded, rows = streams.record_first(block, [site.name for site in sites])
    return find_groups(problem.model, block, sites, recorded, rows.of)


def collect(
    problem: Problem,
    streams: Streams,
    block: str,
    turn: Sequence[Group],
    entering: Sequence[Group] | None,
) -> dict[Group, GroupSums]:
    """Sum what the modules of a turn receive, over all tasks.

    Args:
        problem: The problem.
        streams: The samples, at the block.
        block: The block.
        turn: The groups that are solved.
        entering: In a block's first turn, in which experts run, all groups of the block.

    Raises:
        CalibrationError: If sums are empty or not finite, naming task and module.
    """
    sums, checks = {group: empty_sums(problem, group) for group in turn}, Checks(block)
    needed = [name for group in turn for name in group.parameters]
    if entering is not None and streams.runs_experts:
        needed = streams.tensors_of(block)
    for task, batches in streams.tasks.items():
        with problem.experts[task].loaded(needed) as expert:
            rows = {group: empty_rows(problem, group, expert) for group in turn}
            for batch in batches:
                if entering is not None and streams.runs_experts:
                    streams.follow(task, batch, block, expert, entering)
                if turn and not batch.is_held_out:
                    inputs = streams.inputs_of(task, batch, block, turn)
                    for group, task_rows in rows.items():
                        task_rows.add(batch, inputs.get(group.name, []))
            with exact_products():
                for group, task_rows in rows.items():
                    figures = sums[group].add(task_rows.finished(), task_rows.expert)
                    checks.add(task, group, task_rows, figures)
    checks.run()
    return sums


def empty_rows(problem: Problem, group: Group, expert: nn.Module) -> LinearRows | AffineRows:
    """Return sums over no rows of one task for one group."""
    if group.kind == "norm":
        return AffineRows(group, problem.model, expert, problem.dtype)
    return LinearRows(group, expert, problem.rule, problem.dtype)


def empty_sums(problem: Problem, group: Group) -> GroupSums:
    """Return sums over no task for one group."""
    merged = group.linear(problem.model.get_parameter, problem.dtype)
    base = None
    if problem.base is not None:
        base = group.linear(problem.base.tensor, problem.dtype)
    return problem.rule.sums(group, merged, base)


@exact_products()
def solve(problem: Problem, block: str, sums: Mapping[Group, GroupSums]) -> dict[str, Tensor]:
    """Return new parameters of the modules of a turn.

    Raises:
        CalibrationError: If a system has no trustworthy solution, naming block and module.
    """
    updates: dict[str, Tensor] = {}
    for group, group_sums in sums.items():
        try:
            solved = group_sums.solve()
        except UnsolvedError as error:
            raise CalibrationError(
                f"block {block}, module {group.name}: {error}. {problem.rule.remedy}"
            ) from error
        updates |= group.updates(solved.linear, biases=problem.rule.calibrate_bias)
        figures = {"residual": solved.residual, "condition": solved.condition, **solved.facts}
        for site in group.sites if group.kind == "linear" else ():
            problem.log.add("module", {"block": block, "module": site.name, **figures})
    return updates


def note(log: CalibrationLog, block: str, streams: Streams, seconds: float) -> None:
    """Log a finished block."""
    for task, figures in streams.watch.records().items():
        log.add("task", {"block": block, "task": task, **figures})
    log.add("block", {"block": block, "seconds": seconds})


@torch.inference_mode(False)  # hooks tell tensors apart by version, which inference mode lacks
@torch.no_grad()
def calibrate(
    merged: nn.Module,
    base: nn.Module | ExpertSource | None,
    experts: Mapping[str, nn.Module | ExpertSource],
    batches: Mapping[str, Iterable[Any]],
    settings: FeatCalSettings,
    rule: Rule,
    *,
    device: torch.device | str | None = None,
    autocast: Autocast | None = None,
) -> CalibrationResult:
    """Calibrate a merged model by a rule.

    Args:
        merged: The merged model. It is not changed.
        base: The base model; None: anchors are the merged parameters.
        experts: Each task's expert: a module, or a source of its weights.
        batches: Each task's unlabeled model inputs, batch first.
        settings: Settings of everything but the rule.
        rule: `Paper(...)` or `Plus(...)`.
        device: Where to compute; None: where the merged model is.
        autocast: Makes the context of forward passes. Statistics are never inside it.

    Returns:
        The calibrated model and the log.

    Raises:
        CalibrationError: If the calibration cannot go on, naming the place and the setting.
        ValueError: If the family is unknown.
    """
    check_inputs(base, experts, batches, settings)
    family, batches = checked_family(
        resolve_family(settings.family, merged),
        settings.family,
        merged,
        batches,
        tuple(experts),
        Processes(),
    )
    shown, home = family.view.shown(merged), device_of(merged)
    modes, place = Modes.of(shown), torch.device(device or home)
    kernel = choose_kernel(settings.linear_kernel, place)
    parts, _ = set_up(
        shown,
        base,
        experts,
        settings.replace(calibrate_norm=rule.calibrate_norm),
        family,
        device=place,
        autocast=autocast or nullcontext,
        kernel=kernel,
    )
    log = CalibrationLog(family=family.name)
    sites = {block: modules.sites for block, modules in parts.modules.items()}
    dtype = rule.dtype(len(experts), place)
    problem = Problem(parts.model, parts.base, parts.experts, sites, rule, dtype, log)
    samples = {task: take(task, batches[task], settings, shown) for task in experts}
    first = next(iter(samples.values()))[0].inputs
    rows = rows_named(settings, first)
    images = any(parts.gives_images(block) for block in sites)
    watch = DriftLog(channels_first=images) if settings.log_drift else Watch()
    aside = copied(shown, place) if settings.held_out != 0 and family.whole_model else None
    runner = Runner(family, parts.stages, place, parts.autocast, rows)
    streams = Streams(samples, runner, parts.model, parts.experts, rule, watch, aside)
    with (
        torch.autocast(place.type, enabled=False),
        convolving_as_multiplying(),
        using_kernel(kernel),
    ):
        calibrate_blocks(problem, streams)
    modes.restore(parts.model)
    return CalibrationResult(family.view.restored(parts.model).to(home), log)
