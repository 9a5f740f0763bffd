"""Algorithm 1: a merged model is calibrated block by block, in forward order."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

from fusion_bench_featcal.core.float32_products import exact_products
from fusion_bench_featcal.modules.groups import Group, find_groups
from fusion_bench_featcal.modules.models import (
    load_updates,
    tensors_under,
)
from fusion_bench_featcal.rules.rule import GroupSums
from fusion_bench_featcal.run.problem import Problem
from fusion_bench_featcal.run.slots import calibrate_mixture
from fusion_bench_featcal.run.trust import measured_trust, with_gammas
from fusion_bench_featcal.run.turns import add_task, empty_sums_of, solve, tensors_of, turns_of
from fusion_bench_featcal.streams.checks import Checks
from fusion_bench_featcal.streams.task_sums import TaskSums, empty_task_sums

NO_SAMPLE = (math.inf, "", 0)
"""Priority of a process without samples that run a stage."""


def calibrate_blocks(problem: Problem) -> None:
    """Calibrate every block (Algorithm 1).

    Trust in the samples is measured in the first stage that all of them run, and is full before it.
    """
    given, measures = problem, problem.rule.weighs_trust and problem.base is not None
    if measures:
        problem = with_gammas(given, {})
    for index, stage in enumerate(problem.streams.stages):
        problem.progress.at(stage[0])
        problem.streams.begin(index)
        batches = (batch for batches in problem.streams.tasks.values() for batch in batches)
        if measures and all(problem.processes.gather(not any(b.is_idle for b in batches))):
            with problem.streams.loaded(stage[0]):
                trust = measured_trust(problem, stage[0], groups_of(problem, stage[0]))
            problem, measures = with_gammas(given, trust), False
        for block in stage:
            problem.progress.at(block)
            with problem.streams.loaded(block):
                calibrate_block(problem, block)


def calibrate_block(problem: Problem, block: str) -> None:
    """Calibrate a block whose merged tensors are in memory, unless an earlier run has.

    Its new parameters are stored, and all samples are advanced past it.
    """
    start, finished = time.perf_counter(), problem.output.read(block, problem.working)
    merged, figures = tensors_under(problem.model, block), dict[str, Mapping[str, float]]()
    streams, modules = problem.streams, problem.modules[block]
    # Some positions may count less in the block. This is equal in all processes.
    if streams.decoder_rows == "auto" or (streams.reads_first and block == streams.last_block):
        feeding = problem.processes.gather(streams.feeding(block, modules.sites))
        streams.narrow(block, chain.from_iterable(feeding))
    groups = [] if finished else groups_of(problem, block)
    for number, turn in enumerate(turns_of(problem.rule, groups)):
        sums = collect(problem, block, turn, None if number else groups)
        problem.processes.add_up(t for of_group in sums.values() for t in of_group.tensors())
        # Every process solves the same systems: while one solved, the others would only wait.
        problem.progress.at(f"{block} · solve")
        new, of_turn = solve(problem, block, sums, tensors_of(problem, block))
        figures |= of_turn
        load_updates(problem.model, block, {**finished, **new}, problem.rule.remedy)
    for mixture in () if finished else modules.mixtures:
        calibrate_mixture(problem, block, mixture)
    problem.progress.at(f"{block} · update")
    streams.advance(block)
    note(problem, block, figures, time.perf_counter() - start)
    current = tensors_under(problem.model, block)
    changed = {name: t.detach() for name, t in current.items() if t is not merged[name]}
    problem.working.finish(problem.output.write(block, problem.working, changed, problem.log))
    if not finished:
        problem.progress.finished(block, time.perf_counter() - start)


def groups_of(problem: Problem, block: str) -> list[Group]:
    """Return the groups of a block's modules, in the order of their calls.

    They are equal in all processes, which add up sums over them.
    """
    sites = problem.modules[block].sites
    if not sites:
        return []
    decide, names = problem.processes.decided, [site.name for site in sites]
    if not problem.streams.running:
        return decide(NO_SAMPLE, [])
    recorded, rows, priority = problem.streams.record_largest(block, names)
    return decide(priority, find_groups(problem.model, block, sites, recorded, rows.kind_of))


def collect(
    problem: Problem, block: str, turn: Sequence[Group], entering: Sequence[Group] | None
) -> dict[Group, GroupSums]:
    """Sum the inputs of a turn's modules over the tasks of this process.

    Args:
        problem: The problem.
        block: The block.
        turn: The groups that are solved.
        entering: All groups of the block in its first turn, in which experts run, else None.

    Raises:
        CalibrationError: If sums are empty or not finite, naming task and module.
    """
    sums = empty_sums_of(problem, block, turn)
    checks = Checks(block)
    for task, of_task in sums_by_task(problem, block, turn, entering):
        for group in of_task:
            moments = add_task(sums[group], group, block, task, of_task[group])
            checks.add(task, group.name, moments, sums[group].tensors())
        # The generator holds this dict, too. Emptied, a task's Gram matrices and the copies of its
        # expert's parameters are freed before those of the next task are made.
        of_task.clear()
    # Once per turn, as each check waits for the device.
    checks.run(problem.processes.gather)
    return sums


def sums_by_task(
    problem: Problem, block: str, turn: Sequence[Group], entering: Sequence[Group] | None
) -> Iterator[tuple[str, dict[Group, TaskSums]]]:
    """Yield each task of this process with sums over its samples. Arguments as for `collect`."""
    model, rule, streams = problem.model, problem.rule, problem.streams
    follows = entering is not None and streams.runs_experts
    needed = [name for group in turn for name in group.parameters]
    names = streams.tensors_of(block) if follows else needed
    kinds = ("linear",) if rule.features == "calibrated" else ("linear", "norm")
    followed = [group.name for group in entering or () if group.kind in kinds]
    followed += [mixture.name for mixture in problem.modules[block].mixtures]
    for task in streams.running:
        problem.progress.at(f"{block} · {task}")
        with ExitStack() as stack:
            expert = stack.enter_context(problem.experts[task].loaded(names))
            options = model, expert, rule, problem.dtype
            sums = {group: empty_task_sums(group, *options) for group in turn}
            if not follows:
                stack.close()  # the sums have copies of the expert's parameters
            for batch in streams.visits(task):
                # The expert first: it notes the inputs that are paired with the model's below, for
                # all turns of the block, and its weights are in memory in the first turn only.
                if follows:
                    streams.follow(batch, block, expert, followed)
                if turn:
                    inputs = streams.inputs_of(task, batch, block, turn)
                    for group in sums:
                        with group.place(block, task), exact_products():
                            sums[group].add(batch, inputs[group.name])
                    del inputs  # frees memory before the next batch runs
        if entering is not None:
            problem.progress.step()
        yield task, sums


def note(problem: Problem, block: str, figures: Mapping[str, Any], seconds: float) -> None:
    """Log a finished block. The log is equal in every process."""
    log, modules, streams = problem.log, problem.modules[block], problem.streams
    united, drift = problem.processes.united, streams.drift
    for module in (site.name for site in modules.sites if site.name in figures):
        log.add("module", {"block": block, "module": module, **figures[module]})
    drifts = {} if drift is None else drift.records(united)
    samples = united({task: streams.counts(task) for task in streams.running})
    for task in (task for task in problem.tasks if task in samples):
        of_task = {"block": block, "task": task, "samples": samples[task]}
        log.add("task", of_task | drifts.get(task, {}))
    log.add("block", {"block": block, "seconds": seconds, "left": list(modules.unchanged)})
