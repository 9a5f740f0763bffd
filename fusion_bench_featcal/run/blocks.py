"""Algorithm 1: a merged model is calibrated block by block, in forward order."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, zip_longest
from typing import Any

from fusion_bench_featcal.core.float32_products import exact_products
from fusion_bench_featcal.modules.groups import Group, find_groups
from fusion_bench_featcal.modules.models import load_updates, tensors_under
from fusion_bench_featcal.rules.rule import GroupSums
from fusion_bench_featcal.run.routed_experts import calibrate_mixture
from fusion_bench_featcal.run.state import CalibrationState
from fusion_bench_featcal.run.trust import Trust, measure_trust, with_trust
from fusion_bench_featcal.run.turns import add_task, empty_sums, solve, tensor_getter, turns_of
from fusion_bench_featcal.streams.checks import Checks
from fusion_bench_featcal.streams.task_sums import empty_task_sums

NO_SAMPLE = (math.inf, "", 0)
"""Lowest priority, for a process without samples in the stage."""


def calibrate_blocks(state: CalibrationState) -> None:
    """Calibrate every block (Algorithm 1).

    With FeatCal+ and a base, the agreement of samples and experts (trust) is measured in the first
    stage that all samples run. Before that stage, samples are trusted in full. After it, samples
    that fit no task let only task vectors change weights.
    """
    given, must_measure_trust = state, state.rule.weighs_trust and state.base is not None
    if state.rule.weighs_trust:
        state = with_trust(given, Trust())
    for index, stage in enumerate(state.streams.stages):
        state.progress.set_description(stage[0])
        state.streams.enter_stage(index)
        batches = (batch for batches in state.streams.tasks.values() for batch in batches)
        if must_measure_trust and all(
            state.processes.gather(not any(b.skips_stage for b in batches))
        ):
            with state.streams.loaded(stage[0]):
                trust = measure_trust(state, stage[0], groups_of(state, stage[0]))
            state, must_measure_trust = with_trust(given, trust), False
        for block in stage:
            state.progress.set_description(block)
            with state.streams.loaded(block):
                calibrate_block(state, block)


def calibrate_block(state: CalibrationState, block: str) -> None:
    """Calibrate a block, or load it if an earlier run finished it. Its tensors are in memory.

    The new parameters are stored, and all samples are advanced past the block.
    """
    start, finished = time.perf_counter(), state.checkpoint.load_block(block, state.working)
    merged, metrics = tensors_under(state.model, block), dict[str, Mapping[str, float]]()
    streams, modules = state.streams, state.modules[block]
    # Every process agrees on the modules that mix positions, because sums are added over them.
    if streams.decoder_rows == "auto" or (streams.head_reads_first and block == streams.last_block):
        mixing = state.processes.gather(streams.modules_mixing_positions(block, modules.sites))
        streams.restrict_positions(block, chain.from_iterable(mixing))
    groups = [] if finished else groups_of(state, block)
    for number, turn in enumerate(turns_of(state.rule, groups)):
        sums = collect(state, block, turn, None if number else groups)
        state.processes.all_reduce_sum(t for part in sums.values() for t in part.tensors())
        # Every process solves the same systems: while one solved, the others would only wait.
        state.progress.set_description(f"{block} · solve")
        new, new_metrics = solve(state, block, sums, tensor_getter(state, block))
        metrics |= new_metrics
        load_updates(state.model, block, {**finished, **new}, state.rule.remedy)
    for mixture in () if finished else modules.mixtures:
        calibrate_mixture(state, block, mixture)
    state.progress.set_description(f"{block} · update")
    streams.advance(block)
    log_block(state, block, metrics, time.perf_counter() - start)
    current = tensors_under(state.model, block)
    changed = {name: t.detach() for name, t in current.items() if t is not merged[name]}
    tensors = state.checkpoint.save_block(block, state.working, changed, state.log)
    state.working.set_finished_block(tensors)
    if not finished:
        state.progress.finished(block, time.perf_counter() - start)


def groups_of(state: CalibrationState, block: str) -> list[Group]:
    """Return the groups of a block's modules, in the order of their calls.

    All processes get the same groups, because they add up the sums of each group.
    """
    sites = state.modules[block].sites
    if not sites:
        return []
    decide, names = state.processes.value_of_min, [site.name for site in sites]
    if not state.streams.active_batches:
        return decide(NO_SAMPLE, [])
    recorded, rows, priority = state.streams.record_largest(block, names)
    return decide(priority, find_groups(state.model, block, sites, recorded, rows.positions_key))


def collect(
    state: CalibrationState,
    block: str,
    turn: Sequence[Group],
    first_turn_groups: Sequence[Group] | None,
) -> dict[Group, GroupSums]:
    """Sum the inputs of a turn's modules over the tasks that this process completes.

    Args:
        state: The calibration.
        block: The block.
        turn: The groups that are solved.
        first_turn_groups: In the first turn all groups of the block: the experts run, and their
            inputs are recorded for all turns. None in later turns.

    Raises:
        CalibrationError: If sums are empty or not finite, naming task and module.
    """
    model, rule, streams = state.model, state.rule, state.streams
    checks, waiting = Checks(block), list[Callable[[], None]]()
    current, tail = tensor_getter(state, block), streams.family.tail
    base = None if state.base is None else state.base.tensor
    # Modules of the tail get no base, because its head may differ.
    sums = {g: empty_sums(state, g, current, None if g.name in tail else base) for g in turn}
    runs_expert = first_turn_groups is not None and streams.runs_experts
    needed = [name for group in turn for name in group.parameters]
    names = streams.tensors_of(block) if runs_expert else needed
    kinds = ("linear",) if rule.features == "calibrated" else ("linear", "norm")
    recorded_modules = [group.name for group in first_turn_groups or () if group.kind in kinds]
    recorded_modules += [mixture.name for mixture in state.modules[block].mixtures]
    tasks = streams.active_tasks
    for task, next_task in zip_longest(tasks, tasks[1:]):
        state.progress.set_description(f"{block} · {task}")
        with ExitStack() as stack:
            expert = stack.enter_context(state.experts[task].loaded(names))
            if next_task is not None:
                state.experts[next_task].read_ahead(names)
            elif runs_expert and (next_block := streams.next_block(block)):
                state.experts[tasks[0]].read_ahead(streams.tensors_of(next_block))
            options = model, expert, rule, state.dtype
            task_sums = {group: empty_task_sums(group, *options) for group in turn}
            if not runs_expert:
                stack.close()  # the sums have copies of the expert's parameters
            for batch in streams.iter_batches(task):
                # The expert runs first: its recorded inputs are paired with the model's below in
                # all turns of the block, and its weights are in memory in the first turn only.
                if runs_expert:
                    streams.run_expert_block(batch, block, expert, recorded_modules)
                if turn:
                    inputs = streams.inputs_of(task, batch, block, turn)
                    for group in task_sums:
                        with group.place(block, task), exact_products():
                            task_sums[group].add(batch, inputs[group.name])
                    del inputs  # frees memory before the next batch runs
        if first_turn_groups is not None:
            state.progress.step()
        add_task(state, block, task, sums, task_sums, checks, waiting)
        # Frees the task's Gram matrices and the copies of its expert's parameters before the next
        # task allocates its own.
        del task_sums
    for add in waiting:
        add()
    # Once per turn, as each check waits for the device.
    checks.run(state.processes.gather)
    return sums


def log_block(
    state: CalibrationState, block: str, metrics: Mapping[str, Any], seconds: float
) -> None:
    """Log a finished block. The log is equal in every process."""
    log, modules, streams = state.log, state.modules[block], state.streams
    processes, drift, drifts = state.processes, streams.drift, dict[str, dict[str, Any]]()
    for module in (site.name for site in modules.sites if site.name in metrics):
        log.add("module", {"block": block, "module": module, **metrics[module]})
    if drift is not None:
        device = state.working.device
        completed = [t for t in streams.active_tasks if state.sum_task(t, drift.tensors(t, device))]
        drifts = drift.records(completed, processes.gather_dict)
    samples = processes.sum_counts({t: streams.num_samples(t) for t in streams.active_tasks})
    for task in (task for task in state.tasks if task in samples):
        task_sums = {"block": block, "task": task, "samples": samples[task]}
        log.add("task", task_sums | drifts.get(task, {}))
    log.add("block", {"block": block, "seconds": seconds, "left": list(modules.unchanged)})
