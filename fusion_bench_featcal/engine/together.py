"""Sums of several processes brought together, and a block solved from them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.checkpoints import describe_settings, glimpse
from fusion_bench_featcal.engine.block import BlockSums, Tallies, tally_of
from fusion_bench_featcal.engine.processes import Processes, check_agreement
from fusion_bench_featcal.engine.shares import Shares
from fusion_bench_featcal.engine.task_sums import TaskSums, common_parts
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

Names = tuple[str, ...]


def begin_sharing(
    processes: Processes,
    shares: Shares,
    settings: FeatCalSettings,
    stages: Sequence[Sequence[str]],
    merged: nn.Module,
) -> None:
    """See that all processes were started alike, and make ready to add up tensors.

    Raises:
        CalibrationError: If they were not, naming what differs.
    """
    check_agreement(
        processes,
        settings=describe_settings(settings),
        tasks=shares.tasks,
        blocks=stages,
        weights=lambda: glimpse(merged),
    )
    processes.prepare(shares.groups())


def solve_together(
    sums: BlockSums | None, model: nn.Module, processes: Processes, shares: Shares
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Solve a block from the sums of all processes.

    Modules that share an input are added up in one process, which solves them and gives the others
    their parameters: all processes hold the same bits, whatever machines they run on.

    Args:
        sums: This process's sums; None: it leads no task.
        model: The calibrated model.
        processes: The processes.
        shares: Who works on what.

    Returns:
        As `BlockSums.solve`, the same in every process.

    Raises:
        CalibrationError: As `BlockSums.solve`.
    """
    if processes.size == 1:
        assert sums is not None
        return sums.solve(sums.tallies())
    told = processes.gather({} if sums is None else sums.tallies())
    tallies = {task: told[shares.members(task)[0]][task] for task in shares.tasks}
    parts = common_partition(list(groups) for groups in tallies.values())
    updates: dict[str, Tensor] = {}
    records: list[dict[str, Any]] = []
    tensors = {} if sums is None else _summed(sums, parts)
    processes.gather(None)  # what may fail comes before: none may miss when the others add up
    if sums is not None:
        _bring_together(sums, tensors, tallies, processes, shares)
        updates, records = sums.solve(tallies)
    solved = processes.gather((list(updates), records))
    order = [name for names in parts for name in names]
    records = [record for _, theirs in solved for record in theirs]
    records.sort(key=lambda record: order.index(record["module"]))
    return _spread(updates, [names for names, _ in solved], model, processes), records


def common_partition(groupings: Iterable[Sequence[Names]]) -> list[Names]:
    """The coarsest groups of modules that share their inputs in every task.

    They come in the order that they have in one process.

    Args:
        groupings: Each task's groups, in order of the tasks.
    """
    first, *others = map(list, groupings)
    parts = first
    for groups in others:
        parts = [names for names, _, _ in common_parts(parts, groups)]
    return parts


def _summed(sums: BlockSums, parts: Sequence[Names]) -> dict[Names, list[Tensor]]:
    """The tensors to add up, of each group of modules."""
    sums.restrict(parts)
    return {names: sums.linear[names].tensors() for names in parts}


def _bring_together(
    sums: BlockSums,
    tensors: Mapping[Names, Sequence[Tensor]],
    tallies: Tallies,
    processes: Processes,
    shares: Shares,
) -> None:
    """Add up all sums, each in the process that will solve with it; the others let it go."""
    parts = list(tensors)
    costs = [sums.cost(names) for names in parts] + [0.0] * len(sums.norm)
    owners = spread_costs(costs, shares.leaders)
    for names, owner in zip(parts, owners, strict=False):
        folded = sums.linear[names]
        for tensor in tensors[names]:
            processes.reduce(tensor, owner, shares.leaders)
        if owner != processes.rank:
            del sums.linear[names]
            continue
        folded.adopt({task: tally_of(names, groups)[0] for task, groups in tallies.items()})
    for name, owner in zip(list(sums.norm), owners[len(parts) :], strict=True):
        for tensor in sums.norm[name].tensors():
            processes.reduce(tensor, owner, shares.leaders)
        if owner == processes.rank:
            sums.norm[name].tasks = len(tallies)
        else:
            del sums.norm[name]


def spread_costs(costs: Sequence[float], ranks: Sequence[int]) -> list[int]:
    """Deal out work, dearest first, each to the process that has the least.

    Args:
        costs: Cost of each piece.
        ranks: The processes.

    Returns:
        The process of each piece.
    """
    load = dict.fromkeys(ranks, 0.0)
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[index] = min(load, key=lambda rank: (load[rank], rank))
        load[owners[index]] += costs[index]
    return owners


def _spread(
    updates: Mapping[str, Tensor],
    solved: Sequence[Sequence[str]],
    model: nn.Module,
    processes: Processes,
) -> dict[str, Tensor]:
    """Give every process all new parameters, in the model's dtype."""
    owners = {name: rank for rank, names in enumerate(solved) for name in names}
    everything = {name: torch.empty_like(model.get_parameter(name)) for name in owners}
    for name, value in updates.items():
        everything[name].copy_(value)
    processes.gather(None)  # as above
    for name, rank in owners.items():
        processes.broadcast(everything[name], rank)
    return everything


def combine_task(
    sums: TaskSums, device: torch.device, processes: Processes, shares: Shares
) -> None:
    """Add up the sums of a task that several processes share, in the one that leads it.

    Its weight needs the whole gram, so this comes before it is folded into the block's sums.

    Args:
        sums: This process's sums; afterwards the whole task's, in the leader.
        device: Where sums are kept.
        processes: The processes.
        shares: Who works on what.

    Raises:
        CalibrationError: If the processes summed up different things.
    """
    if not shares.divided:
        return
    members = shares.members(sums.task)
    told = processes.gather(list(sums.linear) if sums.linear or sums.norm else None)
    groupings = [told[rank] for rank in members]
    parts = common_partition([groups for groups in groupings if groups is not None] or [[]])
    if groupings[members.index(processes.rank)] is not None:
        sums.restrict(parts)
    tensors = sums.tensors()
    shapes = processes.gather([(tuple(t.shape), t.dtype) for t in tensors])
    wanted = shapes[members[0]]
    for rank in members:
        if groupings[members.index(rank)] is not None and shapes[rank] != wanted:
            raise CalibrationError(
                f"task {sums.task}, block {sums.block}: modules share their inputs in other ways "
                f"in process {rank} than in process {members[0]}, so that the task cannot be "
                "divided. Lower fabric.devices to at most the number of tasks"
            )
    tensors = tensors or [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in wanted]
    for tensor in tensors:
        processes.reduce(tensor, members[0], members)
