"""Algorithm 1: calibrate a merged model block by block, in forward order."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.float32_products import exact_products
from fusion_bench_featcal.core.solve import UnsolvedError
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts import ExpertSource
from fusion_bench_featcal.families.open_clip import fused
from fusion_bench_featcal.modules.groups import Group, find_groups
from fusion_bench_featcal.modules.models import (
    Modes,
    device_of,
    load_updates,
    relative_change,
    tensors_under,
    without_ties,
)
from fusion_bench_featcal.rules.norms import StatisticsSums
from fusion_bench_featcal.rules.plus import Plus
from fusion_bench_featcal.rules.rule import GroupSums, Rule
from fusion_bench_featcal.run.checkpoint import open_checkpoint
from fusion_bench_featcal.run.memory import naming_memory, return_freed_memory
from fusion_bench_featcal.run.problem import (
    BASE,
    Autocast,
    CalibrationResult,
    Inputs,
    Problem,
    Runtime,
    check_merged,
    open_problem,
)
from fusion_bench_featcal.run.processes import Processes
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.settings.options import Options
from fusion_bench_featcal.settings.rules import rule_of
from fusion_bench_featcal.streams.checks import Checks
from fusion_bench_featcal.streams.samples import check_inputs, naming_module
from fusion_bench_featcal.streams.task_rows import TaskRows, empty_rows


def calibrate_blocks(problem: Problem) -> None:
    """Calibrate every block (Algorithm 1)."""
    for index, stage in enumerate(problem.streams.stages):
        problem.progress.at(stage[0])
        problem.streams.begin(index)
        if index == 0 and problem.rule.weighs_trust and problem.base is not None:
            with problem.streams.loaded(stage[0]):
                problem = trusting(problem, stage[0])
        for block in stage:
            calibrate_block(problem, block)


def calibrate_block(problem: Problem, block: str) -> None:
    """Calibrate one block, unless an earlier run has, and advance all samples past it."""
    problem.progress.at(block)
    with problem.streams.loaded(block):
        calibrate_loaded(problem, block)


def calibrate_loaded(problem: Problem, block: str) -> None:
    """Calibrate a block whose merged tensors are in memory, and store the new parameters."""
    start, finished = time.perf_counter(), problem.output.read(block, problem.working)
    merged, figures = tensors_under(problem.model, block), dict[str, Any]()
    narrow(problem, block)
    groups = [] if finished else groups_of(problem, block)
    for number, turn in enumerate(turns_of(problem.rule, groups)):
        sums = collect(problem, block, turn, None if number else groups)
        problem.processes.add_up(t for of_group in sums.values() for t in of_group.tensors())
        new, of_turn = solve(problem, block, sums)  # every process solves the same systems
        figures |= of_turn
        load_updates(problem.model, block, {**finished, **new}, problem.rule.remedy)
    problem.progress.at(f"{block} · update")
    problem.streams.advance(block)
    note(problem, block, figures, time.perf_counter() - start)
    current = tensors_under(problem.model, block)
    changed = {name: t.detach() for name, t in current.items() if t is not merged[name]}
    problem.working.finish(problem.output.write(block, problem.working, changed, problem.log))
    if not finished:
        problem.progress.finished(block, time.perf_counter() - start)


def narrow(problem: Problem, block: str) -> None:
    """In the last block, count only first positions, if the model's head reads no others."""
    streams = problem.streams
    if streams.reads_first and block == streams.stages[-1][-1]:
        names = streams.feeding_first(block, problem.modules[block].sites)
        streams.narrow(problem.processes.decided(streams.largest[0], names))


def trusting(problem: Problem, block: str) -> Problem:
    """Return the problem with a rule that includes the trust in each task's samples."""
    from fusion_bench_featcal.run.trust import with_trust

    return with_trust(problem, block, groups_of(problem, block))


def groups_of(problem: Problem, block: str) -> list[Group]:
    """Return the groups of a block's modules, in the order of their calls.

    They are equal in all processes, which add up sums over them.
    """
    sites, estimates = problem.modules[block].sites, problem.rule.estimates_statistics
    sites = [site for site in sites if estimates or site.kind != "statistics"]
    if not sites:
        return []
    recorded, rows = problem.streams.record_largest(block, [site.name for site in sites])
    groups = find_groups(problem.model, block, sites, recorded, rows.of)
    return problem.processes.decided(problem.streams.largest[0], groups)


def turns_of(rule: Rule, groups: Sequence[Group]) -> list[Sequence[Group]]:
    """Return a rule's turns for the groups of a block.

    Raises:
        CalibrationError: If they are not lists of these groups, each at most once.
    """
    learned = [group for group in groups if group.kind != "statistics"]
    turns = list(rule.turns(learned)) or [[]]
    are_lists = all(isinstance(turn, Sequence) for turn in turns)
    solved = [group for turn in turns for group in turn] if are_lists else []
    twice = [group.name for group in groups if solved.count(group) > 1]
    if twice or not are_lists or not {*solved} <= {*learned}:
        raise CalibrationError(
            f"rule: {type(rule).__name__}.turns must give lists of the block's groups, each "
            f"group in at most one{f'; it repeats {twice[0]}' if twice else f', not {turns}'}"
        )
    return list(with_statistics(turns, groups))


def with_statistics(
    turns: Sequence[Sequence[Group]], groups: Sequence[Group]
) -> Iterator[Sequence[Group]]:
    """Yield turns, and a turn for each BatchNorm whose running statistics do not fit the weights.

    Those of the merged model never fit. A BatchNorm is estimated before the first turn that runs
    it, and again at the end if a module before it was solved since.
    """
    call = {group: number for number, group in enumerate(groups)}
    norms = [group for group in groups if group.kind == "statistics"]
    stale = {*norms}
    for turn in turns:
        # A single turn is solved from inputs of the whole merged block.
        end = max(map(call.__getitem__, turn), default=0) if len(turns) > 1 else len(groups)
        for norm in (norm for norm in norms if norm in stale and call[norm] < end):
            stale.remove(norm)
            yield [norm]
        yield turn
        start = min(map(call.__getitem__, turn), default=len(groups))
        stale |= {norm for norm in norms if call[norm] > start}
    yield from ([norm] for norm in norms if norm in stale)


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
    sums = {group: empty_sums(problem, group) for group in turn}
    checks = Checks(block)
    for task, rows in task_rows(problem, block, turn, entering):
        with exact_products():
            for group in rows:
                of_task = rows[group].finished()
                sums[group].add(task, rows[group].expert, *of_task)
                checks.add(task, group.name, of_task, sums[group].tensors())
        rows.clear()  # frees the rows before the next task
    checks.run(problem.processes.gather)
    return sums


def empty_sums(problem: Problem, group: Group) -> GroupSums:
    """Return sums over no task for a group."""
    dtype, base = problem.dtype, problem.base
    if group.kind == "statistics":
        return StatisticsSums(group.inputs, problem.model.get_buffer(f"{group.name}.running_mean"))
    merged = group.linear(problem.model.get_parameter, dtype)
    return problem.rule.sums(group, merged, base and group.linear(base.tensor, dtype))


def task_rows(
    problem: Problem, block: str, turn: Sequence[Group], entering: Sequence[Group] | None
) -> Iterator[tuple[str, dict[Group, TaskRows]]]:
    """Yield each task of this process with the sums over its rows. Arguments as for `collect`."""
    model, rule, streams = problem.model, problem.rule, problem.streams
    follows = entering is not None and streams.runs_experts
    needed = [name for group in turn for name in group.parameters]
    for task in streams.tasks:
        problem.progress.at(f"{block} · {task}")
        names = streams.tensors_of(block) if follows else needed
        with ExitStack() as stack:
            expert = stack.enter_context(problem.experts[task].loaded(names))
            rows = {group: empty_rows(group, model, expert, rule, problem.dtype) for group in turn}
            if not follows:
                stack.close()  # the rows have copies of the expert's parameters
            for batch in streams.visits(task):
                if follows:
                    streams.follow(task, batch, block, expert, entering or [])
                if turn:
                    inputs = streams.inputs_of(task, batch, block, turn)
                    for group in rows:
                        with naming_module(task, block, group.name), exact_products():
                            rows[group].add(batch, inputs[group.name])
                    del inputs  # frees memory before the next batch runs
        if entering is not None:
            problem.progress.step()
        yield task, rows


@exact_products()
def solve(
    problem: Problem, block: str, sums: dict[Group, GroupSums]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return new parameters of a turn's groups, and figures of each linear module.

    Each group's sums are freed as soon as it is solved.

    Raises:
        CalibrationError: If the solution cannot be trusted, naming block and module.
    """
    problem.progress.at(f"{block} · solve")
    updates, figures = dict[str, Tensor](), dict[str, Any]()
    like = problem.model.state_dict()
    for group in list(sums):
        try:
            solved = sums.pop(group).solve()
        except UnsolvedError as error:
            raise CalibrationError(
                f"block {block}, module {group.name}: {error}. {problem.rule.remedy}"
            ) from error
        new = group.updates(solved.linear, biases=problem.rule.calibrate_bias)
        updates |= {name: value.to(like[name].dtype) for name, value in new.items()}
        of_group = {"residual": solved.residual, **solved.facts}
        for site in group.sites if group.kind == "linear" else ():
            change = relative_change(like[site.weight_name], new[site.weight_name])
            figures[site.name] = of_group | change
    return updates, figures


def note(problem: Problem, block: str, figures: Mapping[str, Any], seconds: float) -> None:
    """Log a finished block. The log is equal in every process."""
    log, modules, streams = problem.log, problem.modules[block], problem.streams
    gather, drift = problem.processes.gather, streams.drift
    for module in (site.name for site in modules.sites if site.name in figures):
        log.add("module", {"block": block, "module": module, **figures[module]})
    drifts = {} if drift is None else drift.records(gather)
    counts = gather({task: streams.counts(task) for task in streams.tasks})
    samples = {task: count for part in counts for task, count in part.items()}
    for task in problem.tasks:
        of_task = {"block": block, "task": task, "samples": samples[task]}
        log.add("task", of_task | drifts.get(task, {}))
    log.add("block", {"block": block, "seconds": seconds, "left": list(modules.unchanged)})


@torch.inference_mode(False)  # hooks compare tensor versions, which inference mode lacks
@torch.no_grad()
def calibrate(
    merged: nn.Module,
    base: nn.Module | ExpertSource | None,
    experts: Mapping[str, nn.Module | ExpertSource],
    batches: Mapping[str, Iterable[Any]],
    rule: Rule | FeatCalSettings = Plus(),  # noqa: B008 (frozen)
    family: Any = "auto",
    *,
    samples_per_task: int | None = None,
    seed: int = 42,
    augment: str | None = None,
    modules: Sequence[str] | None = None,
    decoder_rows: str | None = None,
    expert_read_budget: float | str | None = None,
    activations: str = "device",
    checkpoint_dir: str | None = None,
    resume: bool = False,
    device: torch.device | str | None = None,
    autocast: Autocast | None = None,
    progress: bool = True,
    processes: Processes | None = None,
    merged_weights: ExpertSource | None = None,
) -> CalibrationResult:
    """Calibrate a merged model (Algorithm 1).

    Args:
        merged: The merged model. It is not changed.
        base: The model that the experts were fine-tuned from, or a source of its weights. None:
            FeatCal+ uses samples alone, and the paper's rule needs `anchor_rho` 1, which pulls
            towards the merged parameters.
        experts: Each task's expert: a module, or a source of its weights.
        batches: Each task's unlabeled model inputs, in batches of any size: mappings of keyword
            arguments, tuples of arguments, or single tensors. The batch is the first dimension.
        rule: How a block is solved: `Plus(...)` (FeatCal+), `Paper(...)` or a rule of your own.
            `FeatCalSettings`, the flat form of YAML, stand for their rule and for all options
            below that they have.
        family: How the model is cut into blocks: `auto` (the default), a family's name, a list of
            the blocks' names, or a `Family`.
        samples_per_task: Samples of each task that are used, by default all.
        seed: Seeds each task's random numbers, together with its name.
        augment: Jittered copies of images in addition to them: `none`, `auto` (none of anything
            else) or `jitter`. By default the rule's.
        modules: Patterns of the modules to calibrate: a name or its end, `*` for anything, `!` in
            front to exclude. By default every linear module, convolution and norm of the blocks.
        decoder_rows: Decoder positions that count: `all` but padding, `targets`, or `auto`. By
            default the rule's.
        expert_read_budget: Limit on the bytes of expert weights that are read: a number, an amount
            such as `"800MB"`, or a share such as `"50%"`.
        activations: Storage of samples' features between blocks: `device` or `host`.
        checkpoint_dir: Folder that keeps finished blocks, so that an interrupted run can go on.
        resume: Whether to go on from the blocks in `checkpoint_dir`.
        device: Device of the calculation, by default the merged model's device.
        autocast: Returns the context of forward passes (Fabric's `autocast`). Statistics are
            computed outside it.
        progress: Whether to show a progress bar.
        processes: The processes that share this calibration, each on a separate device. All call
            this function with the same arguments. Each reads only experts and samples of its tasks.
            By default there is one process.
        merged_weights: Weights of the merged model. `merged` is then its structure, on the meta
            device except for buffers that no checkpoint has. They are read block by block, and the
            calibrated model is written to `checkpoint_dir` without being whole in memory.

    Returns:
        The calibrated model (only its structure with `merged_weights`), the log and a count of
        reads, equal in every process.

    Raises:
        CalibrationError: If the calibration cannot go on, naming the location and the argument.
        ValueError: If an option is not accepted, the family or rule is unknown, or the rule needs a
            base model and there is none.
        TypeError: If `rule` is neither a rule nor settings.
    """
    given = Options(
        samples_per_task=samples_per_task,
        seed=seed,
        augment=augment,
        modules=modules,
        decoder_rows=decoder_rows,
        family=family,
        expert_read_budget=expert_read_budget,
        activations=activations,
        checkpoint_dir=checkpoint_dir,
        resume=resume,
    )
    rule, options = rule_and_options(rule, given)
    check_inputs(base, experts, batches, rule)
    if merged_weights is not None and options.checkpoint_dir is None:
        raise ValueError("merged_weights needs checkpoint_dir, where the calibrated model goes")
    runtime = Runtime(
        torch.device(device or ("cpu" if merged_weights else device_of(merged))),
        autocast or nullcontext,
        processes or Processes(),
        progress,
    )
    inputs = Inputs(merged, base, experts, batches, merged_weights)
    return calibrate_inputs(inputs, rule, options, runtime)


def rule_and_options(rule: Rule | FeatCalSettings, options: Options) -> tuple[Rule, Options]:
    """Return a rule, and options with its values in place of null.

    Args:
        rule: The rule. Settings stand for a rule and options.
        options: The options, which have priority over settings where they are no defaults.

    Raises:
        TypeError: If `rule` is neither a rule nor settings.
    """
    if isinstance(rule, FeatCalSettings):
        changed = {k: v for k, v in vars(options).items() if v != getattr(Options, k)}
        rule, options = rule_of(rule), replace(rule.options, **changed)
    if not isinstance(rule, Rule):
        raise TypeError(
            f"rule must be a Rule, such as Plus() or Paper(), or settings, not {rule!r}"
        )
    return rule, options.of_rule(rule)


def calibrate_inputs(
    inputs: Inputs, rule: Rule, options: Options, runtime: Runtime
) -> CalibrationResult:
    """Calibrate checked inputs. Raises as `calibrate`."""
    device, processes = runtime.device, runtime.processes
    if inputs.merged_weights is not None:
        return_freed_memory()
    with (
        naming_memory(device, lambda: processes.doing),
        open_checkpoint(options, processes) as output,
    ):
        problem = open_problem(inputs, rule, options, runtime, output)
        with problem.computing():
            if inputs.merged_weights is None:
                check_merged(problem)
            problem.output.start(problem, options)
            if problem.output.is_complete:
                restore(problem)
            else:
                calibrate_blocks(problem)
        return result_of(problem)


def restore(problem: Problem) -> None:
    """Load all blocks that an earlier run has finished."""
    for block in problem.modules:
        problem.output.read(block, problem.working)  # raises if the file is damaged
        problem.working.finish(problem.output.write(block, problem.working, {}, problem.log))


def result_of(problem: Problem) -> CalibrationResult:
    """Return the calibrated model in the merged model's form, the log and the count of reads."""
    model, working = problem.merged, problem.working
    if working.is_in_memory:
        model = working.assembled(device_of(model))
        Modes.of(problem.merged).restore(model)
        model = fused(model)
        problem.output.finish(without_ties(model), problem.log)
    else:
        problem.output.finish(working.tensors, problem.log)
    return CalibrationResult(model, problem.log, reads_of(problem), problem.output.weights)


def reads_of(problem: Problem) -> dict[str, Any]:
    """Return the bytes read of each model and the reads that a budget allowed, fit for JSON."""
    sizes = {name: sum(model.sizes.values()) for name, model in problem.models.items()}
    gathered = problem.processes.gather(sizes)
    read = {name: size for of_process in gathered for name, size in of_process.items()}
    base = read.pop(BASE, 0)
    return {"plan": problem.grant.as_dict(), "experts": read, "base": base}
