"""A second opinion on FeatCal+: slow, plain, and independent of the package's formulas.

Every group of modules sees whole forward passes of whole models in float64. All rows stay in one
table with their weights and folds, and every fold's map is solved from the rows of other folds.
"""

import copy
import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from oracle import record
from plus_rows import (
    FOLDS,
    RowMasks,
    Seen,
    Table,
    groups_of,
    is_linear,
    parameters_of,
    rows_of,
    writers_of,
)
from tiny_models import Suite, modules_of
from torch import Tensor, nn

GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
MIDDLE = 2  # where the search begins
SKETCHED = 16  # more outputs than this are compared through as many random sums of them


@dataclass
class Sums:
    """Moments of a table of rows, about their means if there is a bias to be solved for."""

    rows: Table
    biased: bool

    def mean(self, values: Tensor) -> Tensor:
        return self.rows.p @ values / self.rows.p.sum()

    def moment(self, left: Tensor, right: Tensor) -> Tensor:
        if self.biased:
            left, right = left - self.mean(left), right - self.mean(right)
        return (self.rows.p[:, None] * left).T @ right / self.rows.p.sum()

    @cached_property
    def gram(self) -> Tensor:
        return self.moment(self.rows.x, self.rows.x)

    @cached_property
    def own(self) -> Tensor:
        return self.moment(self.rows.own, self.rows.x)

    @cached_property
    def full(self) -> Tensor:
        return self.moment(self.rows.full, self.rows.x)

    @cached_property
    def scale(self) -> float:
        return float(self.gram.diagonal().mean())

    def ridge(self, right: Tensor, penalty: float) -> Tensor:
        """`right (G + penalty I)^-1`."""
        system = self.gram + penalty * torch.eye(len(self.gram), dtype=torch.float64)
        return torch.linalg.solve(system, right.T).T

    def first(self, l1: float | None, anchor: Tensor | float = 0.0) -> Tensor:
        """Stage 1's map of the own drift, pulled towards an anchor; without that stage, zero."""
        if l1 is None:
            return torch.zeros_like(self.own)
        pull = l1 * self.scale
        return self.ridge(self.own + pull * anchor, pull)

    def missing(self, step: Tensor, tasks: int) -> Tensor:
        """By how much a step from the base is too short to do what the experts' steps do."""
        given = self.rows.x @ step.T
        wanted = self.rows.own + given
        if self.biased:
            given, wanted = given - self.mean(given), wanted - self.mean(wanted)

        def mean(one: Tensor, other: Tensor) -> float:
            return float(self.mean((one * other).sum(dim=1)))

        reached = mean(wanted, given)
        if not reached > 0:
            return torch.zeros_like(step)
        return step * (min(mean(wanted, wanted) / reached, tasks) - 1)

    def second(self, start: Tensor, l2: float) -> Tensor:
        """Stage 2's map of the full drift, pulled towards stage 1's."""
        if math.isinf(l2):
            return start
        pull = l2 * self.scale
        return self.ridge(self.full + pull * start, pull)

    def offset(self, target: Tensor, change: Tensor) -> Tensor:
        """The bias that goes with a map."""
        if not self.biased:
            return target.new_zeros(target.shape[1])
        return self.mean(target) - change @ self.mean(self.rows.x)


def calibrated_plus(suite: Suite, settings: Any) -> dict[str, Tensor]:
    """New parameters by name, float64, of the suite's merged model.

    `settings` has the fields of FeatCalSettings. Suites of tiny_models.py and tricky_models.py.
    """
    model = copy.deepcopy(suite.merged).double().eval()
    base = copy.deepcopy(suite.base).double()
    experts = {task: copy.deepcopy(e).double().eval() for task, e in suite.experts.items()}
    masks = RowMasks(suite, settings)
    batch = next(iter(suite.inputs.values()))[0]
    new: dict[str, Tensor] = {}
    for block in suite.blocks:
        names = [n for n in modules_of(model, [block])[block] if is_linear(model, n)]
        writers = writers_of(model, block, names) if settings.target == "residual" else []
        groups = groups_of(model, batch, names, partial(masks.kind, writers=writers))
        theirs = {task: listen(e, suite.inputs[task], block, names) for task, e in experts.items()}
        ours: dict[str, Seen] = {}
        solved: dict[str, Tensor] = {}
        behind = [block]
        for group in groups:
            if settings.order == "module":
                load(model, solved)
            if settings.order == "module" or not ours:
                ours = {task: listen(model, suite.inputs[task], block, names) for task in experts}
            is_writer = group[0] in writers
            behind += group * is_writer
            factors = settings.task_weights or {}
            table = rows_of(group, model, experts, ours, theirs, masks, behind * is_writer, factors)
            biased = masks.biased(group[0])
            solved |= solve(group, model, base, table, biased, len(experts), settings)
        load(model, solved)
        new |= solved
    return new


def listen(model: nn.Module, batches: list, block: str, names: list[str]) -> Seen:
    return Seen(*record(model, batches, [block, *names], names))


def choice(table: Table, biased: bool, stages: int) -> tuple[float | None, float]:
    """Both penalties, as the rows of held-out folds have it."""
    splits = []
    for fold in range(FOLDS):
        held = table.fold == fold
        if held.any():
            splits.append((Sums(table.only(~held), biased), table.only(held)))
    if len(splits) < 2:
        return (1.0, math.inf) if stages == 2 else (None, 1.0)

    def error(l1: float | None, l2: float | None) -> float:
        total = 0.0
        for sums, held in splits:
            change, trained, target = sums.first(l1), sums.rows.own, held.own
            if l2 is not None:
                change, trained, target = sums.second(change, l2), sums.rows.full, held.full
            left = target - held.x @ change.T - sums.offset(trained, change)
            total += float(held.p @ (left @ sketch(left.shape[1]).T).square().sum(dim=1))
        return total

    l1, start = None, MIDDLE
    if stages == 2:
        start = downhill([error(penalty, None) for penalty in GRID], MIDDLE)
        l1 = GRID[start]
    ends = [*GRID, math.inf]
    return l1, ends[downhill([error(l1, penalty) for penalty in ends], start)]


def downhill(errors: list[float], start: int) -> int:
    """The place of the nearest minimum uphill in lambda, or else downhill."""
    up = start
    while up + 1 < len(errors) and errors[up + 1] < errors[up]:
        up += 1
    down = start
    while down > 0 and errors[down - 1] < errors[down]:
        down -= 1
    return up if up > start else down


def sketch(m: int) -> Tensor:
    if m <= SKETCHED:
        return torch.eye(m, dtype=torch.float64)
    signs = torch.randint(2, (m, SKETCHED), generator=torch.Generator().manual_seed(0)) * 2 - 1
    return signs.T.double() / 4


def solve(
    group: list[str],
    model: nn.Module,
    base: nn.Module,
    table: Table,
    biased: bool,
    tasks: int,
    settings: Any,
) -> dict[str, Tensor]:
    """New parameters of a group, by name, from the model's present ones."""
    sums = Sums(table, biased)
    weight, bias = parameters_of(model, group)
    target = table.full
    beyond, step = settings.anchor_rho - 1, weight - parameters_of(base, group)[0]
    if settings.ridge == "fixed":
        alpha = settings.mix_alpha
        target = (1 - alpha) * table.own + alpha * table.full
        pull = settings.ridge_lambda * float(sums.gram.norm()) / tasks
        change = sums.ridge(sums.moment(target, table.x) + pull * beyond * step, pull)
    else:
        l1, l2 = choice(table, biased, settings.stages)
        l1 = None if l1 is None else l1 * settings.first_ridge_scale
        anchor = 2 * beyond * sums.missing(step, tasks) if beyond else 0.0
        change = sums.second(sums.first(l1, anchor), l2)
    weight, bias = weight + change, bias + sums.offset(target, change)
    new, start = {}, 0
    for name in group:
        stored = model.get_submodule(name)
        m = len(parameters_of(model, [name])[1])
        part = weight[start : start + m]
        new[f"{name}.weight"] = part.T if type(stored).__name__ == "Conv1D" else part
        if biased:
            new[f"{name}.bias"] = bias[start : start + m]
        start += m
    return new


def load(model: nn.Module, new: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in new.items():
            model.get_parameter(name).copy_(value)
