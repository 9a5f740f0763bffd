"""Plan of what to read of each expert under a limit, from names and sizes, before any read."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from fusion_bench_featcal.setting_checks import budget_in_bytes
from fusion_bench_featcal.settings import CalibrationError


class Unit(NamedTuple):
    """Tensors that are read or left out together: one module's of one expert.

    Attributes:
        expert: The expert's place in the pool.
        block: The block's place in forward order.
        module: The module's place in the block.
    """

    expert: int
    block: int
    module: int


class Read(NamedTuple):
    """One tensor of an expert that a visit reads.

    Attributes:
        place: The visit's place.
        unit: The unit that it belongs to; None: it is always read.
        name: Its name in the merged model.
        nbytes: Its size.
    """

    place: str
    unit: Unit | None
    name: str
    nbytes: int


def first_blocks_first(unit: Unit) -> tuple[int, ...]:
    """Order of the units by which a limit is spent: the first blocks of all experts come first.

    An expert's own features reach as far as its blocks are read without a gap, and what the first
    blocks get wrong no later one can mend: benchmarks/read_budget.py compares other orders.
    """
    return (unit.block, unit.module, unit.expert)


ORDER: Callable[[Unit], tuple[int, ...]] = first_blocks_first


@dataclass(frozen=True)
class ReadPlan:
    """Reads of each expert.

    Attributes:
        limit: Most bytes that may be read; None: any.
        full: Bytes of a full read.
        least: Bytes that no plan can do without.
        order: Name of the order in which the limit was spent.
        planned: Expert -> place -> bytes.
        omitted: Expert -> tensors that the merged model stands in for, by its names.
    """

    limit: int | None
    full: int
    least: int
    order: str
    planned: Mapping[str, Mapping[str, int]]
    omitted: Mapping[str, Sequence[str]]

    @property
    def bytes(self) -> int:
        """Bytes that are read in all."""
        return sum(sum(places.values()) for places in self.planned.values())


def reads_of(
    expert: int,
    visits: Mapping[str, Iterable[str]],
    blocks: Sequence[str],
    keys: Mapping[str, str],
    nbytes: Callable[[str], int],
) -> list[Read]:
    """List the reads of one expert without a limit.

    Args:
        expert: The expert's place in the pool.
        visits: Place -> the merged model's names of the tensors that are loaded there, in order.
        blocks: All blocks in forward order.
        keys: The merged model's name of a tensor -> the expert's; tied names share one.
        nbytes: Size of a tensor by the expert's name.

    Returns:
        The reads. A tensor that is shared between modules, or lies in no block, has no unit.
    """
    owners: dict[str, set[str]] = {}
    for name, key in keys.items():
        owners.setdefault(key, set()).add(name.rpartition(".")[0])
    units: dict[str, Unit] = {}
    for index, block in enumerate(blocks):
        inside = [name for name in keys if name.startswith(f"{block}.")]
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in inside))
        for name in inside:
            if len(owners[keys[name]]) == 1:
                units[name] = Unit(expert, index, modules.index(name.rpartition(".")[0]))
    return [
        Read(place, units.get(name), name, nbytes(key))
        for place, names in visits.items()
        for key, name in {keys[name]: name for name in names}.items()
    ]


def make_plan(reads: Mapping[str, Sequence[Read]], limit: int | None) -> ReadPlan:
    """Spend a limit on units, in a fixed order, until the next one does not fit.

    A larger limit reads all that a smaller one does, and more.

    Args:
        reads: Expert -> its reads without a limit.
        limit: Most bytes to read; None: any.

    Returns:
        The plan; its bytes are never above the limit.

    Raises:
        CalibrationError: If the limit is below what every plan reads, naming that.
    """
    costs: dict[Unit | None, int] = {None: 0}
    for read in chain.from_iterable(reads.values()):
        costs[read.unit] = costs.get(read.unit, 0) + read.nbytes
    full, least = sum(costs.values()), costs.pop(None)
    if limit is not None and limit < least:
        raise CalibrationError(
            f"method.expert_read_budget allows {limit} bytes, but {least} are needed at least: "
            f"what lies outside the blocks, of each of the {len(reads)} experts (a full read takes "
            f"{full}). Raise it, or calibrate a stored merged model (method.base_method=null) with "
            "method.mix_alpha=0 and method.log_drift=false: experts do not run then, and only "
            "calibrated modules are read"
        )
    left = full - least if limit is None else limit - least
    taken: set[Unit | None] = {None}
    for unit in sorted(filter(None, costs), key=ORDER):
        left -= costs[unit]
        if left < 0:
            break
        taken.add(unit)
    planned: dict[str, dict[str, int]] = {}
    omitted: dict[str, list[str]] = {}
    for expert, listed in reads.items():
        places = planned[expert] = dict.fromkeys((read.place for read in listed), 0)
        for read in listed:
            places[read.place] += read.nbytes if read.unit in taken else 0
        omitted[expert] = list(
            dict.fromkeys(read.name for read in listed if read.unit not in taken)
        )
    return ReadPlan(limit, full, least, ORDER.__name__, planned, omitted)


def budget_left(
    budget: float | str, upstream: int, merger: str, *, fused: bool, why: str = ""
) -> float | str:
    """Rest of a read budget that an upstream merger leaves which reads every expert whole.

    Args:
        budget: The setting `expert_read_budget`.
        upstream: Bytes of the experts' files.
        merger: The merger's name, for the message.
        fused: Whether the calibration shares the merger's reads.
        why: Reason why it does not, for the message.

    Returns:
        The calibration's own budget: all of it where reads are shared, else the rest in bytes.

    Raises:
        CalibrationError: If nothing is left, naming what can be set instead.
    """
    if fused or upstream == 0:
        return budget
    limit = budget_in_bytes(budget, upstream)
    if limit > upstream and not str(budget).endswith("%"):
        return limit - upstream
    raise CalibrationError(
        f"method.expert_read_budget={budget} cannot be kept: {merger} reads every expert whole "
        f"({upstream} bytes), and the calibration reads besides: they do not share their reads"
        f"{why and f', because {why}'}. Let them (docs/read_budget.md), calibrate a stored merged "
        "model (method.base_method=null, modelpool.models._merged_=...), allow more than "
        f"{upstream} bytes, or set it to null"
    )


def plan_hash(plan: ReadPlan, depends: Mapping[str, Any]) -> str:
    """SHA-256 of a plan and what the calibration depends on besides, as canonical JSON.

    Args:
        plan: The plan.
        depends: JSON-able values.
    """
    content = {
        "limit": plan.limit,
        "planned": plan.planned,
        "omitted": {expert: list(names) for expert, names in plan.omitted.items()},
        **depends,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
