"""Turns of a rule over groups of modules, their sums over tasks, and their solves."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from fusion_bench_featcal.core.float32_products import exact_products
from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.core.solve import UnsolvedError
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.place import error_context, message_of
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.modules.models import relative_change, tensors_under
from fusion_bench_featcal.rules.norms import NormMoments, StatisticsSums
from fusion_bench_featcal.rules.rule import GroupSums, Rule
from fusion_bench_featcal.run.state import CalibrationState
from fusion_bench_featcal.streams.checks import Checks
from fusion_bench_featcal.streams.task_sums import TaskSums

TensorGetter = Callable[[str], Tensor]
"""Returns a parameter or buffer by name, or the part of it that belongs to one routed expert."""


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
            f"rule: {type(rule).__name__}.turns must return lists of the block's groups, each "
            f"group in at most one{f'; it repeats {twice[0]}' if twice else f', not {turns}'}"
        )
    return list(with_statistics(turns, groups))


def with_statistics(
    turns: Sequence[Sequence[Group]], groups: Sequence[Group]
) -> Iterator[Sequence[Group]]:
    """Yield the turns, with a turn for each BatchNorm whose running statistics are stale.

    The merged model's running statistics are always stale. A stale BatchNorm is estimated before
    the next turn that runs it, or at the end.
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


def empty_sums(
    state: CalibrationState, group: Group, current: TensorGetter, base: TensorGetter | None
) -> GroupSums:
    """Return sums over no task for a group.

    Args:
        state: The calibration.
        group: The modules.
        current: Returns a tensor of the working model, merged or calibrated in an earlier turn.
        base: Returns those of the base, or None without one.
    """
    if group.kind == "statistics":
        return StatisticsSums(group.in_features, current(f"{group.name}.running_mean"))
    origin = None if base is None else group.stack_weights(base, state.dtype)
    return state.rule.sums(group, group.stack_weights(current, state.dtype), origin)


def tensor_getter(state: CalibrationState, block: str) -> TensorGetter:
    """Return a function from a tensor's name to the current tensor of a block."""
    return tensors_under(state.model, block).__getitem__


@exact_products()
def add_task(
    state: CalibrationState,
    block: str,
    task: str,
    sums: Mapping[Group, GroupSums],
    task_sums: Mapping[Group, TaskSums],
    checks: Checks,
    waiting: list[Callable[[], None]],
) -> None:
    """Complete the sums of one task, and add them to the sums over tasks and to the checks.

    One process alone does both, because the weight of a task depends on all of its samples. If
    several processes have samples of each task, the second step is appended to `waiting`, as the
    others would wait for it before they exchange sums of the next task. Errors of the last products
    name task, block and module.
    """
    moments = dict[Group, list[Moments] | list[NormMoments]]()
    for group, group_sums in task_sums.items():
        with group.place(block, task):
            moments[group] = group_sums.finalize()
    tensors = [t for parts in moments.values() for part in parts for t in part.tensors()]
    if not state.sum_task(task, tensors):
        return
    experts = {group: task_sums[group].expert for group in moments}

    @exact_products()
    def add() -> None:
        for group, parts in moments.items():
            sums[group].add(task, experts[group], *parts)
            checks.add(task, group.label, parts, sums[group].tensors())

    if not state.processes.divides_batches(state.tasks):
        add()
        return
    for parts in moments.values():
        for part in parts:
            part.rows = None  # they are those of this process only
    waiting.append(add)


@exact_products()
def solve(
    state: CalibrationState, block: str, sums: dict[Group, GroupSums], current: TensorGetter
) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
    """Return new parameters of a turn's groups, and metrics of each linear module.

    The sums of a group are freed as soon as it is solved.

    Args:
        state: The calibration.
        block: The block.
        sums: The groups' sums.
        current: Returns a tensor of the working model, merged or calibrated in an earlier turn.

    Raises:
        CalibrationError: If the solution cannot be trusted, naming block and module.
    """
    updates, metrics = dict[str, Tensor](), dict[str, dict[str, float]]()
    remedy, unsolved = state.rule.remedy, message_of(UnsolvedError)
    for group in list(sums):
        with error_context(block=block, module=group.label, cause=unsolved, remedy=remedy):
            solved = sums.pop(group).solve()
        new = group.unstack_weights(solved.linear, biases=state.rule.calibrate_bias)
        updates |= {name: value.to(current(name).dtype) for name, value in new.items()}
        group_metrics = {"residual": solved.residual, **solved.facts}
        for site in group.sites if group.kind == "linear" else ():
            change = relative_change(current(site.weight_name), new[site.weight_name])
            metrics[site.name] = group_metrics | change
    return updates, metrics
