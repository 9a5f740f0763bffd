"""How long each step of a calibration takes."""

from collections.abc import Mapping
from dataclasses import dataclass

from fusion_bench_featcal.core.cholesky import SINGLE_LAMBDA
from fusion_bench_featcal.core.moments import MOST_ROWS
from fusion_bench_featcal.engine.block import solve_cost
from fusion_bench_featcal.engine.together import spread_costs
from fusion_bench_featcal.plan.constants import Constants
from fusion_bench_featcal.plan.counting import Counts
from fusion_bench_featcal.plan.rates import Rates, gram_flops
from fusion_bench_featcal.plan.work import BlockWork, Group, Work
from fusion_bench_featcal.settings import FeatCalSettings

STEPS = ("reading", "stem", "passes", "moments", "folds", "solves", "update")
"""Steps in the order in which a block meets them."""

# Passes over memory, in entries of a row or of a matrix, that the engine makes beside products.
_CAL_PASSES, _EXP_PASSES, _NORM_PASSES, _DRIFT_PASSES = 4, 6, 14, 10
_GRAM_PASSES, _SHIFT_PASSES, _RIGHT_PASSES = 12, 9, 6
_SYSTEM_PASSES, _SOLUTION_PASSES, _RESIDUAL_PASSES = 8, 8, 3


@dataclass(frozen=True)
class Machine:
    """Rates with the constants that turn counts into seconds."""

    rates: Rates
    constants: Constants

    def products(self, kind: str, flops: float, size: float) -> float:
        """Seconds of a product by its kind and size."""
        return flops / self.rates.at(kind, max(size, 1.0))

    def moved(self, size: float, *, costly: bool = False) -> float:
        """Seconds to read and write bytes, in one operation."""
        return size / self.rates.at("costly" if costly else "moved", max(size, 1.0))

    def one_pass(self, counts: Counts, itemsize: int = 4) -> float:
        """Seconds of one pass over what was counted, with numbers of so many bytes."""
        total, kind = 0.0, {2: "low", 8: "wide"}.get(itemsize, "linear")
        for (batch, n, k, m), times in counts.products.items():
            flops = 2.0 * times * batch * n * k * m
            total += self.products(kind, flops, (n * k * m) ** (1 / 3))
        for (heads, queries, keys, width), times in counts.attention.items():
            total += self.products("attention", 4.0 * times * heads * queries * keys * width, keys)
        typical = max(counts.moved / max(counts.calls, 1), 1.0)
        elements = (counts.moved - counts.costly) / self.rates.at("moved", typical)
        elements += counts.costly / self.rates.at("costly", typical)
        constants = self.constants
        beside = constants.elements * elements + constants.call_seconds * counts.calls
        return constants.passes * total + beside


@dataclass(frozen=True)
class Amounts:
    """How often a batch's work is done.

    Attributes:
        tasks: Number of tasks.
        batches: Batches of a task, the last one counted by its share.
        both: Whether experts run.
        mixes: Whether their features are summed.
        drift: Whether drift is measured.
        entry: Bytes of a number in the sums.
        solvers: Number of processes that share the solves.
    """

    tasks: int
    batches: float
    both: bool
    mixes: bool
    drift: bool
    entry: int = 4
    solvers: int = 1

    @classmethod
    def of(cls, work: Work, settings: FeatCalSettings, tasks: int, solvers: int = 1) -> "Amounts":
        """The amounts that settings ask for."""
        mixes = settings.mix_alpha > 0
        return cls(
            tasks=tasks,
            batches=settings.samples_per_task / work.batch,
            both=mixes or settings.log_drift,
            mixes=mixes,
            drift=settings.log_drift,
            entry=work.entry(settings, tasks),
            solvers=solvers,
        )


def predict_stages(
    work: Work, settings: FeatCalSettings, tasks: int, machine: Machine, *, solvers: int = 1
) -> list[dict[str, float]]:
    """Seconds by step, for each stage.

    Args:
        work: What is done to one batch.
        settings: Settings.
        tasks: Number of tasks.
        machine: The machine.
        solvers: Number of processes that share the solves; the busiest one's count.

    Returns:
        Seconds of CPU time on one thread, else on the wall clock, by `STEPS`.
    """
    amounts = Amounts.of(work, settings, tasks, solvers)
    runs, sides, last = amounts.tasks * amounts.batches, 1 + amounts.both, work.blocks[-1]
    found = []
    for stage in work.stages:
        total: dict[str, float] = dict.fromkeys(STEPS, 0.0)
        if not work.replays:
            total["stem"] += sides * runs * machine.one_pass(stage.stem, work.itemsize)
            total["reading"] += amounts.both * tasks * _reading(stage.read, machine)
        for block in stage.blocks:
            one = machine.one_pass(block.counts, work.itemsize)
            short = one if amounts.drift else machine.one_pass(block.until_last, work.itemsize)
            expert = short if block is stage.blocks[-1] and work.is_closing(stage) else one
            total["passes"] += runs * (short + amounts.both * expert)
            total["update"] += runs * one if block is not last or amounts.drift else 0.0
            for name, seconds in _block_seconds(block, settings, amounts, machine, work).items():
                total[name] += seconds
        found.append(total)
    return found


def predict_seconds(
    work: Work, settings: FeatCalSettings, tasks: int, machine: Machine
) -> dict[str, float]:
    """Seconds by step, of all stages together; otherwise as `predict_stages`."""
    stages = predict_stages(work, settings, tasks, machine)
    return {step: sum(stage[step] for stage in stages) for step in STEPS}


def _block_seconds(
    block: BlockWork, settings: FeatCalSettings, amounts: Amounts, machine: Machine, work: Work
) -> Mapping[str, float]:
    """What a block takes beside its passes."""
    constants, entry = machine.constants, amounts.entry
    moments = folds = 0.0
    solves: list[float] = []
    for group in block.groups:
        rows = amounts.batches * group.rows
        moments += amounts.tasks * _moments(group, rows, amounts, machine, entry)
        folds += amounts.tasks * _folds(group, amounts, machine, entry)
        solves.append(_solves(group, settings, machine, entry))
    for width, norm_rows in block.norms:
        size = _NORM_PASSES * entry * norm_rows * width
        moments += amounts.tasks * amounts.batches * machine.moved(size)
    if amounts.drift:
        size = 2 * _DRIFT_PASSES * block.hidden
        moments += amounts.tasks * amounts.batches * machine.moved(size)
    reading = amounts.tasks * _reading(block.read, machine)
    solvers = range(amounts.solvers)
    owners = spread_costs([solve_cost(g.width, g.outputs) for g in block.groups], solvers)
    loads = [sum(s for s, o in zip(solves, owners, strict=True) if o == rank) for rank in solvers]
    return {
        "reading": reading + amounts.tasks * constants.visit_seconds,
        "moments": constants.moments * moments,
        "folds": constants.folds * folds,
        "solves": constants.solves * max(loads) + 3 * constants.byte_seconds * block.anchored,
    }


def _reading(size: int, machine: Machine) -> float:
    return machine.constants.byte_seconds * size


def _moments(group: Group, rows: float, amounts: Amounts, machine: Machine, entry: int) -> float:
    """One task's sums over the rows that reach a group."""
    width = group.width
    chunk = min(group.rows, MOST_ROWS)
    size = (chunk * width * width) ** (1 / 3)
    total = machine.products(_kind("gram", entry), gram_flops(rows, width), size)
    passes = _CAL_PASSES + (_EXP_PASSES if amounts.mixes else 0)
    total += rows / max(chunk, 1) * machine.moved(passes * entry * chunk * width)
    if not amounts.mixes:
        return total
    if not few(group):
        return total + machine.products(_kind("cross", entry), 2.0 * rows * width * width, size)
    for outputs in group.outputs:
        size = (chunk * outputs * width) ** (1 / 3)
        # From the expert's own outputs its weight meets the gram, else every row.
        met = width if entry == 4 and from_outputs(group, rows) else rows
        total += machine.products(_kind("linear", entry), 2.0 * met * outputs * width, size)
        total += machine.products(_kind("cross", entry), 2.0 * rows * outputs * width, size)
    return total


def _folds(group: Group, amounts: Amounts, machine: Machine, entry: int) -> float:
    """Adding one task's sums to the block's."""
    square, width = group.width**2, group.width
    crosses = amounts.mixes and not few(group)
    passes = _GRAM_PASSES + (_SHIFT_PASSES if crosses else 0)
    total = passes * machine.moved(entry * square)
    for outputs in group.outputs:
        total += _RIGHT_PASSES * machine.moved(entry * outputs * width)
        if not (amounts.mixes and few(group)):
            size = (outputs * square) ** (1 / 3)
            total += machine.products(_kind("linear", entry), 2.0 * outputs * square, size)
    return total


def _solves(group: Group, settings: FeatCalSettings, machine: Machine, entry: int) -> float:
    """The factor of a group's system, and every module's solution."""
    width, square = group.width, group.width**2
    wide = solves_wide(settings, entry)
    kinds = ("factor_wide", "solve_wide") if wide else ("factor", "solve")
    bytes_each = 8 if wide else entry
    total = machine.products(kinds[0], width**3 / 3, width)
    total += _SYSTEM_PASSES * machine.moved(bytes_each * square)
    for outputs in group.outputs:
        flops, size = 2.0 * outputs * square, (outputs * square) ** (1 / 3)
        total += machine.products(kinds[1], flops, width)
        total += machine.products(_kind("linear", entry), flops, size)  # what the anchor adds
        total += _SOLUTION_PASSES * machine.moved(bytes_each * outputs * width)
        total += machine.moved(_RESIDUAL_PASSES * 8 * (square + 2 * outputs * width))
    return total


def _kind(kind: str, entry: int) -> str:
    """Rate of a product of numbers of so many bytes."""
    return "wide" if entry == 8 else kind


def few(group: Group) -> bool:
    """Whether cross moments are summed from outputs, as `engine.linear_sums.outputs_are_few`."""
    return 2 * sum(group.outputs) <= group.width


def from_outputs(group: Group, rows: float) -> bool:
    """Whether they come from the expert's outputs, as `engine.linear_sums.rows_are_many`."""
    return few(group) and group.outputs_noted and rows > group.width


def solves_wide(settings: FeatCalSettings, entry: int) -> bool:
    """Whether systems are solved in float64, as `core.folded` chooses for sums of so many bytes."""
    return entry == 8 or settings.ridge_lambda < SINGLE_LAMBDA
