"""Sums of several processes brought together, and a block solved from them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.checkpoints import describe_settings, glimpse
from fusion_bench_featcal.engine.block import BlockSums, Names, Tallies
from fusion_bench_featcal.engine.processes import Processes, check_agreement
from fusion_bench_featcal.engine.shares import Shares
from fusion_bench_featcal.engine.task_sums import TaskSums
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings


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
    groups = _same_groups(tallies)
    updates: dict[str, Tensor] = {}
    records: list[dict[str, Any]] = []
    tensors = {} if sums is None else {names: sums.linear[names].tensors() for names in groups}
    processes.gather(None)  # what may fail comes before: none may miss when the others add up
    if sums is not None:
        _bring_together(sums, tensors, tallies, processes, shares)
        updates, records = sums.solve(tallies)
    solved = processes.gather((list(updates), records))
    order = [name for names in groups for name in names]
    records = [record for _, theirs in solved for record in theirs]
    records.sort(key=lambda record: order.index(record["module"]))
    return _spread(updates, [names for names, _ in solved], model, processes), records


def _same_groups(tallies: Tallies) -> list[Names]:
    """The groups of modules that share their inputs, which must be every task's."""
    first, *others = tallies
    for task in others:
        for names in tallies[task]:
            if names not in tallies[first]:
                raise CalibrationError(
                    f"task {task}: modules {', '.join(names)} share their input otherwise than in "
                    f"task {first}, which is not supported. Exclude them: "
                    f"method.modules=['!{names[0]}', ...]"
                )
    return list(tallies[first])


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
        folded.adopt({task: groups[names][0] for task, groups in tallies.items()})
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
    # A process without batches of the task has no sums, and adds zeros.
    tensors = sums.tensors()
    told = processes.gather((list(sums.linear), [(tuple(t.shape), t.dtype) for t in tensors]))
    wanted = told[members[0]]
    for rank in members:
        if told[rank][1] and told[rank] != wanted:
            raise CalibrationError(
                f"task {sums.task}, block {sums.block}: modules share their inputs in other ways "
                f"in process {rank} than in process {members[0]}, so that the task cannot be "
                "divided. Lower fabric.devices to at most the number of tasks"
            )
    shapes = wanted[1]
    tensors = tensors or [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes]
    for tensor in tensors:
        processes.reduce(tensor, members[0], members)
