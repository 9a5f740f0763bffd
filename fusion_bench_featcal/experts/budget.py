"""Limits on the bytes that are read of experts: the setting `expert_read_budget`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.experts.expert import LazyModel
from fusion_bench_featcal.experts.source import ExpertSource, SourceView
from fusion_bench_featcal.files.budgets import budget_in_bytes

Sizes = Mapping[str, Mapping[str, tuple[str, int]]]
"""Expert -> the merged model's name of each tensor that is read, in forward order -> its name in
the source, which tied tensors share, and its bytes."""


@dataclass(frozen=True)
class ReadPlan:
    """Reads that a budget allows.

    Attributes:
        limit: Largest number of bytes to read of all experts, or None for no limit.
        full: Bytes of a full read.
        bytes: Bytes of the tensors that are read.
        omitted: Expert -> tensors that are not read, by the merged model's names.
    """

    limit: int | None
    full: int
    bytes: int
    omitted: Mapping[str, list[str]]

    def as_dict(self) -> dict[str, object]:
        """Return plain values for JSON, with the modules that are not read."""
        not_read = {t: list(dict.fromkeys(map(_module, n))) for t, n in self.omitted.items() if n}
        return {"limit": self.limit, "full": self.full, "bytes": self.bytes, "not_read": not_read}


class PartialSource(SourceView):
    """A source of which some tensors are not read. The merged model's tensors replace them."""

    def __init__(
        self, source: ExpertSource, merged: ExpertSource, omitted: Mapping[str, str]
    ) -> None:
        """Wrap a source.

        Args:
            source: An expert's weights.
            merged: The merged model's weights.
            omitted: Names of the tensors that are not read -> their names in `merged`.
        """
        super().__init__(source)
        self._merged, self._omitted = merged, omitted

    def nbytes(self, name: str) -> int:
        """Return the number of bytes to read for one tensor, 0 if it is not read."""
        return 0 if name in self._omitted else super().nbytes(name)

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, or the merged model's in its place."""
        if name in self._omitted:
            return self._merged.tensor(self._omitted[name])
        return super().tensor(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return some rows of one tensor, or the merged model's in their place."""
        if name in self._omitted:
            return self._merged.rows(self._omitted[name], start, stop)
        return self._source.rows(name, start, stop)


def plan_reads(budget: float | str | None, sizes: Sizes) -> ReadPlan:
    """Choose the modules to read: in forward order, each for all experts, up to the budget.

    A larger budget reads all tensors that a smaller one does, and more.

    Args:
        budget: The setting `expert_read_budget`.
        sizes: Sizes of the tensors of all experts.
    """
    full = sum(sum(dict(expert_sizes.values()).values()) for expert_sizes in sizes.values())
    if budget is None:
        return ReadPlan(None, full, full, {})
    limit = budget_in_bytes(budget, full)
    order = list(dict.fromkeys(name for expert_sizes in sizes.values() for name in expert_sizes))
    keys: dict[str, set[str]] = {task: set() for task in sizes}
    is_open, total = True, 0
    for _, names in groupby(order, key=_module):
        inside = list(names)
        for task, expert_sizes in sizes.items():
            new = dict(expert_sizes[n] for n in inside if expert_sizes[n][0] not in keys[task])
            cost = sum(new.values())
            is_open = is_open and total + cost <= limit
            if is_open:
                keys[task] |= new.keys()
                total += cost
    omitted = {
        task: [name for name, (key, _) in expert_sizes.items() if key not in keys[task]]
        for task, expert_sizes in sizes.items()
    }
    return ReadPlan(limit, full, total, omitted)


def limit_reads(
    experts: Mapping[str, LazyModel],
    budget: float | str | None,
    order: Iterable[str],
    merged: LazyModel,
    tasks: Iterable[str],
    gather_dict: Callable[[dict[str, Any]], dict[str, Any]],
) -> ReadPlan:
    """Apply a budget to the experts of all processes.

    Args:
        experts: Expert of each task of this process. Their sources are replaced.
        budget: The setting `expert_read_budget`. With None everything is read.
        order: The merged model's names of the tensors to read, in forward order.
        merged: The merged model, whose tensors replace those that are not read.
        tasks: All tasks, of all processes.
        gather_dict: Returns the items of all processes, whose experts share the budget.

    Raises:
        CalibrationError: If the budget allows no read.
    """
    names = list(order)
    sizes = {
        task: {name: (key := expert.keys[name], expert.source.nbytes(key)) for name in names}
        for task, expert in experts.items()
    }
    all_sizes = gather_dict(sizes)
    read_plan = plan_reads(budget, {task: all_sizes[task] for task in tasks})
    if budget is not None and not read_plan.bytes:
        raise CalibrationError(
            f"{option('expert_read_budget', budget)} is smaller than one module of one "
            "expert: raise it"
        )
    for task, expert in experts.items():
        not_read = read_plan.omitted.get(task, ())
        if omitted := {expert.keys[name]: merged.keys[name] for name in not_read}:
            expert.source = PartialSource(expert.source, merged.source, omitted)
    return read_plan


def _module(name: str) -> str:
    return name.rpartition(".")[0]
