"""Algorithm 1: repair a merged model block by block, in forward order."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.float32_products import convolving_as_multiplying, exact_products
from fusion_bench_featcal.core.kernels import (
    agreed_kernel,
    choose_kernel,
    processor,
    using_kernel,
    with_kernel,
)
from fusion_bench_featcal.core.products import summing_in
from fusion_bench_featcal.core.solve import UnsolvedError
from fusion_bench_featcal.experts import ExpertSource
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.log import CalibrationLog
from fusion_bench_featcal.memory import memory_advice, naming_memory
from fusion_bench_featcal.modules.groups import Group, find_groups
from fusion_bench_featcal.modules.models import Modes, device_of, load_updates, relative_change
from fusion_bench_featcal.output import NoOutput, open_output
from fusion_bench_featcal.output.fingerprint import describe_run
from fusion_bench_featcal.problem import Problem, check_alike, check_weights, prepare
from fusion_bench_featcal.processes import Processes, announced
from fusion_bench_featcal.progress import Progress
from fusion_bench_featcal.rules import rule_of
from fusion_bench_featcal.rules.rule import GroupSums, Rule
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.streams.checks import Checks
from fusion_bench_featcal.streams.family_check import checked_family
from fusion_bench_featcal.streams.runner import Runner
from fusion_bench_featcal.streams.samples import (
    check_inputs,
    naming_module,
    rows_named,
    take,
)
from fusion_bench_featcal.streams.streams import Streams
from fusion_bench_featcal.streams.task_rows import TaskRows, empty_rows, empty_sums
from fusion_bench_featcal.team import Alone, Figures, team_of

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class CalibrationResult:
    """A calibrated model and its history.

    Attributes:
        model: The calibrated model: class, dtype and device of the merged one.
        log: Records of every block.
        reads: Count of what was read, see docs/read_budget.md.
    """

    model: nn.Module
    log: CalibrationLog
    reads: dict[str, Any] = field(default_factory=dict)


def calibrate_blocks(problem: Problem, streams: Streams, team: Alone, output: NoOutput) -> None:
    """Calibrate every block (Algorithm 1)."""
    for index, stage in enumerate(streams.runner.stages):
        problem.progress.at(stage[0])
        streams.begin(index)
        if index == 0 and problem.rule.weighs_trust and problem.base is not None:
            problem = trusting(problem, streams, team, stage[0])
        for block in stage:
            problem.progress.at(block)
            start, finished = time.perf_counter(), output.read(block, problem.model)
            groups = [] if finished else groups_of(problem, streams, team, block)
            entering, figures = groups, Figures()
            for turn in turns_of(problem.rule, groups):
                enters = not only_statistics(turn)
                sums = collect(problem, streams, team, block, turn, entering if enters else None)
                solved = solve(problem, block, team.add_up(sums))
                del sums  # before those of the next turn
                new, new_figures = team.spread(*solved)
                figures |= new_figures
                load_updates(problem.model, block, {**finished, **new}, problem.rule.remedy)
                entering = None if enters else entering
            problem.progress.at(f"{block} · update")
            streams.advance(block)
            note(problem, streams, team, block, figures, time.perf_counter() - start)
            output.write(block, problem.model, problem.log)


def trusting(problem: Problem, streams: Streams, team: Alone, block: str) -> Problem:
    """Return the problem with a rule that knows how far each task's samples are trusted."""
    from fusion_bench_featcal.trust import with_trust

    return with_trust(problem, streams, team, block, groups_of(problem, streams, team, block))


def restore(problem: Problem, output: NoOutput) -> None:
    """Take over all blocks from a run that has finished them."""
    for block in problem.modules:
        load_updates(problem.model, block, output.read(block, problem.model), problem.rule.remedy)
        output.write(block, problem.model, problem.log)


def turns_of(rule: Rule, groups: Sequence[Group]) -> list[Sequence[Group]]:
    """Return the turns of a block, in at least one of which experts can run."""
    turns = rule.turns(groups)
    return [*turns, []] if all(map(only_statistics, turns)) else turns


def only_statistics(turn: Sequence[Group]) -> bool:
    """Return whether a turn changes nothing but statistics, in which experts have no part."""
    return any(group.kind == "batch_norm" for group in turn)


def groups_of(problem: Problem, streams: Streams, team: Alone, block: str) -> list[Group]:
    """Return the groups of a block's modules, in the order of their calls."""
    sites = problem.modules[block].sites
    if not sites:
        return []
    streams.narrow(block, team.of_first(lambda: streams.names_of_last_rows(block, sites)))

    def find() -> list[Group]:
        recorded, rows = streams.record_first(block, sites)
        return find_groups(problem.model, block, sites, recorded, rows.of)

    return team.of_first(find)


def collect(
    problem: Problem,
    streams: Streams,
    team: Alone,
    block: str,
    turn: Sequence[Group],
    entering: Sequence[Group] | None,
) -> dict[Group, GroupSums]:
    """Sum what the modules of a turn receive, over all tasks.

    Args:
        problem: The problem.
        streams: The samples, at the block.
        team: The processes.
        block: The block.
        turn: The groups that are solved.
        entering: In a block's first turn, in which experts run, all groups of the block.

    Raises:
        CalibrationError: If sums are empty or not finite, naming task and module.
    """
    model, rule, dtype = problem.model, problem.rule, problem.dtype
    base = None if problem.base is None else problem.base.tensor
    sums = {group: empty_sums(group, model, base, rule, dtype) for group in turn}
    checks = Checks(block)
    for task, rows in team.whole(task_rows(problem, streams, block, turn, entering)):
        with exact_products():
            for group in rows:
                figures = sums[group].add(task, rows[group].finished(), rows[group].expert)
                checks.add(task, group, rows[group], figures)
        rows.clear()  # before those of the next task
    checks.run(team.gather)
    return sums


def task_rows(
    problem: Problem,
    streams: Streams,
    block: str,
    turn: Sequence[Group],
    entering: Sequence[Group] | None,
) -> Iterator[tuple[str, dict[Group, TaskRows]]]:
    """Yield each task of this process with the sums over its rows. Arguments as for `collect`."""
    model, rule, dtype = problem.model, problem.rule, problem.dtype
    needed = [name for group in turn for name in group.parameters]
    if entering is not None and streams.runs_experts:
        needed = streams.tensors_of(block)
    for task in streams.tasks:
        problem.progress.at(f"{block} · {task}")
        with problem.experts[task].loaded(needed) as expert:
            rows = {group: empty_rows(group, model, expert, rule, dtype) for group in turn}
            for batch in streams.visits(task):
                if entering is not None and streams.runs_experts:
                    streams.follow(task, batch, block, expert, entering)
                if turn and not batch.is_held_out:
                    watched = entering is not None
                    inputs = streams.inputs_of(task, batch, block, turn, watched=watched)
                    with summing_in(problem.precision, streams.runner.device):
                        for group in rows:
                            with naming_module(task, block, group.name):
                                rows[group].add(batch, inputs.get(group.name, []))
        if entering is not None:
            problem.progress.step()
        yield task, rows


@exact_products()
def solve(
    problem: Problem, block: str, sums: Mapping[Group, GroupSums]
) -> tuple[dict[str, Tensor], Figures]:
    """Return new parameters of groups of a turn, and figures of each linear module.

    Raises:
        CalibrationError: If a system has no trustworthy solution, naming block and module.
    """
    problem.progress.at(f"{block} · solve")
    updates, figures, like = dict[str, Tensor](), Figures(), problem.model.state_dict()
    for group, group_sums in sums.items():
        try:
            solved = group_sums.solve()
        except UnsolvedError as error:
            raise CalibrationError(
                f"block {block}, module {group.name}: {error}. {problem.rule.remedy}"
            ) from error
        new = group.updates(solved.linear, biases=problem.rule.calibrate_bias)
        updates |= {name: value.to(like[name].dtype) for name, value in new.items()}
        of_group = {"residual": solved.residual, "condition": solved.condition, **solved.facts}
        for site in group.sites if group.kind == "linear" else ():
            change = relative_change(like[site.weight_name], new[site.weight_name])
            figures[site.name] = of_group | change
    return updates, figures


def note(
    problem: Problem, streams: Streams, team: Alone, block: str, figures: Figures, seconds: float
) -> None:
    """Log a finished block, alike in every process."""
    log, modules = problem.log, problem.modules[block]
    for module in (site.name for site in modules.sites if site.name in figures):
        log.add("module", {"block": block, "module": module, **figures[module]})
    drifts, counts = streams.watch.records(team.gather), dict[str, Counter[str]]()
    for part in team.gather({task: streams.counts(task) for task in streams.tasks}):
        for task, of_task in part.items():
            counts.setdefault(task, Counter()).update(of_task)
    for task, of_task in counts.items():
        log.add("task", {"block": block, "task": task, **of_task, **drifts.get(task, {})})
    log.add("block", {"block": block, "seconds": seconds, "left": list(modules.left)})


@announced
@torch.inference_mode(False)  # hooks tell tensors apart by version, which inference mode lacks
@torch.no_grad()
def calibrate(
    merged: nn.Module,
    base: nn.Module | ExpertSource | None,
    experts: Mapping[str, nn.Module | ExpertSource],
    batches: Mapping[str, Iterable[Any]],
    settings: FeatCalSettings | Rule,
    family: Any = None,
    *,
    device: torch.device | str | None = None,
    autocast: Autocast | None = None,
    progress: bool = True,
    processes: Processes | None = None,
    streams_type: Callable[..., Streams] = Streams,
    hashed: bool = False,
) -> CalibrationResult:
    """Calibrate a merged model (Algorithm 1).

    Args:
        merged: The merged model. It is not changed.
        base: The base model or a source of its weights. None needs `anchor_rho` 1, which pulls
            towards the merged parameters, and FeatCal+ then has samples alone.
        experts: Each task's expert: a module, or a source of its weights.
        batches: Each task's unlabeled model inputs, in batches of any size: mappings of keyword
            arguments, tuples of arguments, or single tensors. The first dimension is the batch's.
        settings: Settings, or a rule (`Paper(...)`, `Plus(...)`) with all else at its default.
            `samples_per_task` samples of each task are used, or all where there are fewer.
        family: How the model is cut into blocks; None: `settings.family`.
        device: Where to compute; None: where the merged model is.
        autocast: Makes the context of forward passes (Fabric's `autocast`). Statistics are never
            inside it.
        progress: Whether to show a progress bar.
        processes: The processes that work on this calibration together, each on a device of its
            own. All call this with the same arguments. Each asks only for experts and samples of
            tasks that it works on. None: this process alone.
        streams_type: Makes the streams: `Streams`, or a subclass that runs batches otherwise.
        hashed: Whether the count of reads has digests of all tensors that were read.

    Returns:
        The calibrated model, the log and a count of reads, the same in every process.

    Raises:
        CalibrationError: If the calibration cannot go on, naming the place and the setting.
        ValueError: If the family or rule is unknown, or rho needs a base that is not there.
    """
    if not isinstance(settings, FeatCalSettings):
        settings = FeatCalSettings(rule=settings, calibrate_norm=settings.calibrate_norm)
    if family is not None:
        settings = settings.replace(family=family)
    check_inputs(base, experts, batches, settings)

    on, among = torch.device(device or device_of(merged)), processes or Processes()

    def calibrated(settings: FeatCalSettings) -> CalibrationResult:
        with naming_memory(on, lambda: among.doing, partial(memory_advice, settings, on)):
            return calibrate_once(
                merged,
                base,
                experts,
                batches,
                settings,
                device=on,
                autocast=autocast or nullcontext,
                progress=progress,
                processes=among,
                streams_type=streams_type,
                hashed=hashed,
            )

    if settings.held_out == 0:
        return calibrated(settings)
    from fusion_bench_featcal.agreement import calibrate_and_compare

    if settings.task_weights == "drift":  # there may be a second calibration
        batches = {t: list(b) if isinstance(b, Iterator) else b for t, b in batches.items()}
    return calibrate_and_compare(calibrated, settings)


def calibrate_once(
    merged: nn.Module,
    base: nn.Module | ExpertSource | None,
    experts: Mapping[str, nn.Module | ExpertSource],
    batches: Mapping[str, Iterable[Any]],
    settings: FeatCalSettings,
    *,
    device: torch.device,
    autocast: Autocast,
    progress: bool,
    processes: Processes,
    streams_type: Callable[..., Streams],
    hashed: bool,
) -> CalibrationResult:
    """Calibrate with given task weights. Arguments and errors are those of `calibrate`."""
    rule, output = rule_of(settings), open_output(settings, processes)
    check_alike(processes, merged, experts, settings, rule)
    team = team_of(processes, tuple(experts), device)
    samples = {}
    for task in team.tasks(experts):
        processes.doing = f"inputs · {task}"
        samples[task] = take(task, batches[task], settings, merged, team.cut)
    family = checked_family(
        resolve_family(settings.family, merged),
        settings.family,
        merged,
        samples,
        needs_closing=rule.reads_closing_rows or settings.held_out != 0,
        of_first=team.of_first,
    )
    shown, home = family.view.shown(merged), device_of(merged)
    modes, stages = Modes.of(shown), family.stages(shown)
    kernel = agreed_kernel(team.gather(choose_kernel(settings.linear_kernel, device)))
    rows = team.of_first(lambda: rows_named(settings, next(iter(samples.values()))[0].inputs))
    runner = Runner(family, stages, device, with_kernel(kernel, autocast), rows)
    bar = Progress(processes, sum(map(len, stages)) * len(samples), show=progress)
    processes.doing = "the copy of the merged model"
    problem, weights, streams = prepare(
        shown,
        base if rule.reads_base else None,
        experts,
        samples,
        settings,
        rule,
        runner,
        team,
        bar,
        streams_type=streams_type,
        hashed=hashed,
    )
    problem.log.add("engine", {"linear_kernel": kernel, "processor": processor()})
    with (
        torch.autocast(device.type, enabled=False),
        convolving_as_multiplying(),
        using_kernel(kernel),
        bar.bar,
    ):
        check_weights(problem, "the merged model", "Check method.base_method")
        describe = partial(describe_run, shown, weights, settings, rule, runner, samples, kernel)
        output.start(describe, list(problem.modules))
        if output.is_complete:
            restore(problem, output)
        else:
            calibrate_blocks(problem, streams, team, output)
        check_weights(problem, "the calibrated model", problem.rule.remedy)
    modes.restore(problem.model)
    calibrated = family.view.restored(problem.model).to(home)
    output.finish(calibrated, problem.log)
    sites = {block: [site.name for site in found.sites] for block, found in problem.modules.items()}
    reads = weights.manifest(settings.expert_read_budget, sites, shown.state_dict(), team.gather)
    for record in problem.log.of_kind("task"):
        record["expert_bytes"] = reads["experts"].get(record["task"], {}).get(record["block"], 0)
    return CalibrationResult(calibrated, problem.log, reads)
