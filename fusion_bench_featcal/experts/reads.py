"""Weights of base and experts, with a count and a budget of the bytes read."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts.expert_model import ExpertModel
from fusion_bench_featcal.experts.model_config import check_same_function, config_of
from fusion_bench_featcal.experts.source import ExpertSource, Tensors, source_of
from fusion_bench_featcal.experts.working_model import WorkingModel
from fusion_bench_featcal.read_budgets import budget_in_bytes

BASE = "_pretrained_"
"""Name of the base model in FusionBench's pools."""

OUTSIDE = "outside the blocks"

Gather = Callable[[Any], list[Any]]
"""Returns every process's value."""


@dataclass(frozen=True)
class Grant:
    """Reads that a budget allows.

    Attributes:
        limit: Largest number of bytes to read of all experts, or None for no limit.
        full: Bytes of a full read, or None if a source has no sizes.
        bytes: Bytes of the granted tensors.
        omitted: Expert -> tensors that are not read, by the merged model's names.
    """

    limit: int | None = None
    full: int | None = None
    bytes: int | None = None
    omitted: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Weights:
    """Base and experts of one calibration. Each tensor counts once, however often it is read.

    Attributes:
        base: The base model, or None if it is not read.
        experts: The expert of each task of this process.
        tasks: All tasks, including tasks of other processes.
        grant: Tensors of the experts that may be read.
    """

    base: ExpertModel | None
    experts: Mapping[str, ExpertModel]
    tasks: Sequence[str]
    grant: Grant = field(default_factory=Grant)

    @property
    def models(self) -> dict[str, ExpertModel]:
        """Return base and experts by name."""
        return ({} if self.base is None else {BASE: self.base}) | {**self.experts}

    def limited(
        self,
        budget: float | str | None,
        order: Sequence[str],
        merged: Tensors,
        gather: Gather,
    ) -> "Weights":
        """Apply a budget to the experts' tensors in forward order, equally for all experts.

        Args:
            budget: The setting `expert_read_budget`. With None everything is read.
            order: The merged model's names of the tensors to read, in forward order.
            merged: The merged model's tensors, which replace the ones not read.
            gather: Exchanges values with other processes, whose experts count as well.

        Raises:
            CalibrationError: If there is a budget and a source has no sizes.
        """
        sizes: dict[str, Mapping[str, tuple[str, int]]] = {}
        try:
            for task, expert in self.experts.items():
                sizes[task] = {name: (expert.keys[name], expert.nbytes(name)) for name in order}
        except CalibrationError:
            if budget is not None:
                raise
            sizes = {}
        gathered = gather(sizes)
        if not all(gathered):
            return self
        everything = {task: of_task for part in gathered for task, of_task in part.items()}
        grant = grants(budget, {task: everything[task] for task in self.tasks})
        for task, expert in self.experts.items():
            keys = {expert.keys[n]: merged.names[n] for n in grant.omitted.get(task, ())}
            expert.stand_ins = Tensors(merged.read, keys)
        return replace(self, grant=grant)

    def manifest(
        self,
        budget: float | str | None,
        blocks: Sequence[str],
        merged: Mapping[str, Tensor],
        gather: Gather,
    ) -> dict[str, Any]:
        """Return the record of all reads, fit for JSON. docs/read_budget.md explains the entries.

        Args:
            budget: The setting `expert_read_budget`.
            blocks: The blocks.
            merged: The merged model's tensors.
            gather: Exchanges values with other processes.
        """
        grant = self.grant
        sizes = {name: _by_merged_names(model) for name, model in self.models.items()}
        read = self._joined(gather(sizes))
        counts = {name: _by_place(of_model, blocks) for name, of_model in read.items()}
        base = counts.pop(BASE, None)
        planned: dict[str, Any] = {"limit": grant.limit, "full": grant.full, "bytes": grant.bytes}
        planned["omitted"] = {task: _modules(names) for task, names in grant.omitted.items()}
        missing = [name for names in grant.omitted.values() for name in names]
        return {
            "budget": budget,
            "plan": None if grant.full is None else planned,
            "experts": counts,
            "base": base,
            "totals": {
                "experts_read": sum(sum(places.values()) for places in counts.values()),
                "experts_planned": grant.bytes,
                "base_read": sum((base or {}).values()),
                "merged_stood_in": sum(merged[name].nbytes for name in missing),
            },
        }

    def _joined(self, gathered: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict]:
        """Join the processes' records of each model's tensors, with the models in order."""
        joined: dict[str, dict[str, Any]] = defaultdict(dict)
        for part in gathered:
            for name, of_model in part.items():
                joined[name] |= of_model
        return {name: joined[name] for name in (BASE, *self.tasks) if name in joined}


def open_weights(
    merged: nn.Module,
    working: WorkingModel,
    base: nn.Module | ExpertSource | None,
    experts: Mapping[str, nn.Module | ExpertSource],
    view: Any,
    tasks: Iterable[str],
    *,
    spared: Collection[str] = (),
) -> Weights:
    """Open base and experts. Only names and shapes are read.

    Args:
        merged: The merged model, with its config.
        working: The calibrated model, which sets the dtypes and the device of the experts.
        base: The base model, or None if it is not read.
        experts: Experts by task.
        view: The family's view of models, which also applies to their sources.
        tasks: The tasks of this process. Other experts are not opened.
        spared: Names of tensors that are not needed, such as heads.

    Raises:
        CalibrationError: If a model's weights or config do not fit the merged model.
    """

    def paired(name: str, model_or_source: Any, role: str = "expert") -> ExpertModel:
        try:
            source = view.source(source_of(model_or_source))
        except CalibrationError as error:
            raise CalibrationError(f"{role} {name!r}: {error}") from error
        on = working.device
        options: Any = {"role": role, "device": on, "spared": spared}
        expert = ExpertModel(name, source, working.module, **options)
        check_same_function(name, config_of(model_or_source), config_of(merged), role=role)
        return expert

    first = None if base is None else paired(BASE, base, "base model")
    opened = {task: paired(task, experts[task]) for task in tasks}
    return Weights(first, opened, tuple(experts))


def grants(budget: float | str | None, sizes: Mapping[str, Mapping[str, tuple[str, int]]]) -> Grant:
    """Grant modules in forward order, each for all experts, until one exceeds the budget.

    The tensors granted by a larger budget include all tensors granted by a smaller one.

    Args:
        budget: The setting `expert_read_budget`.
        sizes: Expert -> the merged model's name of each tensor that is read, in forward order ->
            its name in the source, which tied tensors share, and its bytes.
    """
    full = sum(sum(dict(of_expert.values()).values()) for of_expert in sizes.values())
    limit = None if budget is None else budget_in_bytes(budget, full)
    order = list(dict.fromkeys(name for of_expert in sizes.values() for name in of_expert))
    remaining = full if limit is None else limit
    granted: dict[str, set[str]] = {task: set() for task in sizes}
    is_open, total = True, 0
    for _, names in groupby(order, key=_module):
        inside = list(names)
        for task, of_expert in sizes.items():
            new = dict(of_expert[n] for n in inside if of_expert[n][0] not in granted[task])
            cost = sum(new.values())
            is_open = is_open and total + cost <= remaining
            if is_open:
                granted[task] |= new.keys()
                total += cost
    omitted = {
        task: [name for name, (key, _) in of_expert.items() if key not in granted[task]]
        for task, of_expert in sizes.items()
    }
    return Grant(limit, full, total, omitted)


def _by_merged_names(model: ExpertModel) -> dict[str, int]:
    """Return sizes of the tensors read, by the merged model's names, tied ones once."""
    names = {key: name for name, key in reversed(model.keys.items())}
    return {names[key]: size for key, size in model.sizes.items()}


def _by_place(sizes: Mapping[str, int], blocks: Sequence[str]) -> dict[str, int]:
    """Add up the sizes of tensors by block."""
    places = dict.fromkeys((OUTSIDE, *blocks), 0)
    for name, size in sizes.items():
        inside = (block for block in blocks if name.startswith(f"{block}."))
        places[next(inside, OUTSIDE)] += size
    return places


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _modules(names: Iterable[str]) -> list[str]:
    """Return the modules that have some tensors, in order."""
    return list(dict.fromkeys(map(_module, names)))
