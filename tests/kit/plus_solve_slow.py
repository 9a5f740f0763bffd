"""Slow solve of modules with one input, by FeatCal+.

Rows stay in one table with their weights, and the rows out of an expert's weights stand in it too,
as far as they count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
UNKNOWN = 1e-2  # the ridge without samples to choose it by, of many samples
CONSTANT = 1e-6  # inputs of less variance, relative to their mean square, are constant
SKETCHED = 16  # more outputs than this are compared through as many random sums of them


@dataclass(frozen=True)
class Table:
    """Rows of one task in front of modules with one input, and the expert's modules.

    `u` is what the expert's modules give on its rows, less what the model's give on `x`, and `q`
    has the rows' weights.
    """

    x: Tensor
    u: Tensor
    held_out: Tensor
    q: Tensor
    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Numbers:
    """Numbers of the rule, each task's gamma and lack of samples, and if task vectors are all."""

    gamma: float
    factors: Mapping[str, float]
    far: float
    ridges: Sequence[float]
    gammas: Mapping[str, float]
    lacks: Mapping[str, float]
    vectors_only: bool = False


def solved_group(
    tables: Mapping[str, Table],
    merged: tuple[Tensor, Tensor],
    base: Tensor,
    biased: bool,
    numbers: Numbers,
) -> tuple[Tensor, Tensor]:
    """New weight and bias of modules, given the merged ones and the base's weight."""
    samples, rows, lacking, energies, (weight, bias) = [], [], 0.0, 0.0, merged
    lack, total = 0.0, 0.0
    for task, of in tables.items():
        answer = of.x @ of.weight.T + of.bias
        mismatch = of.q @ (answer - of.x @ weight.T - bias).square().sum(1)
        drift = max(mismatch / (of.q @ answer.square().sum(1)), torch.tensor(1e-8).to(answer))
        factor = numbers.factors.get(task, 1.0)
        w = factor * drift**numbers.far / (of.x.T @ (of.q[:, None] * of.x)).norm()  # Eq. 14
        samples.append((of.x, of.u, w * of.q, of.held_out))
        energy = of.q @ (of.x - of.q @ of.x / of.q.sum() if biased else of.x).square().sum(1)
        energy = energy * (energy > CONSTANT * (of.q @ of.x.square().sum(1)))
        tau, gamma = of.weight - base, numbers.gammas[task]
        memory = tau * (gamma * energy / tau.square().sum().clamp_min(1e-300)).sqrt()
        rows.append((memory, memory @ (of.weight - weight).T, w.expand(len(memory))))
        lacking, energies = lacking + w * mismatch, energies + w * energy
        lack, total = lack + w * of.q.sum() * numbers.lacks[task], total + w * of.q.sum()
    samples, rows = ([torch.cat(c) for c in zip(*s, strict=True)] for s in (samples, rows))
    lack = float(lack / total)
    share = share_of_rows(samples, rows, weight, lacking, energies / lack, biased)
    if numbers.vectors_only:
        change = share * step_of_rows(rows) if share else torch.zeros_like(weight)
        return weight + change, bias
    unknown = UNKNOWN * (share + (1 - share) * lack)
    change, shift = step_of(with_rows(samples, rows, share), biased, numbers.ridges, unknown)
    return weight + change, bias + shift if biased else bias


def share_of_rows(samples, rows, weight, lacking, energies, biased: bool) -> float:
    """Share of the rows from weights that counts, by what their own step breaks on the samples."""
    (x, u, p, _), (memory, _, row_targets) = samples, rows
    gram = memory.T @ (row_targets[:, None] * memory)
    if not (gram.trace() > 0 and lacking > 0):
        return 0.0
    step = step_of_rows(rows)
    if biased:
        x, u = (side - p @ side / p.sum() for side in (x, u))
    combinations = sketch(len(weight)).T

    def energy(outputs: Tensor) -> float:
        return float(p @ (outputs @ combinations).square().sum(1))

    broken = max(energy(u - x @ step.T) - energy(u), 0.0)
    e, output_error = broken / float(lacking), broken / energy(x @ weight.T)
    gamma = float(gram.trace() / energies)
    return 1 / (1 + gamma * e * output_error / 8)


def step_of_rows(rows) -> Tensor:
    """The step that the rows from weights ask for by themselves."""
    memory, answers, weights = rows
    gram, cross = (side.T @ (weights[:, None] * memory) for side in (memory, answers))
    return ridge_map(gram, cross, 1e-2)


def with_rows(samples, rows, share: float):
    """Inputs, outputs, weights, shares of the mean, and flags. Rows from weights shift no mean.

    They stand in the table twice: for the fitted samples and for the held-out ones.
    """
    (x, u, p, held_out), (memory, answers, row_targets) = samples, rows
    none, part = torch.zeros_like(row_targets), p[held_out].sum() / p.sum()
    weights = share * (1 - part) * row_targets, share * part * row_targets
    flags = torch.zeros_like(none, dtype=torch.bool), torch.ones_like(none, dtype=torch.bool)
    return (
        torch.cat([x, memory, memory]), torch.cat([u, answers, answers]), torch.cat([p, *weights]),
        torch.cat([p, none, none]), torch.cat([held_out, *flags]),
    )  # fmt: skip


def moments(rows, chosen: Tensor, biased: bool):
    """Means, Gram and cross matrix of some rows."""
    x, u, p, share, _ = (column[chosen] for column in rows)
    total = share.sum()
    x_mean, u_mean = share @ x / total, share @ u / total
    gram, cross = (side.T @ (p[:, None] * x) / total for side in (x, u))
    if biased:
        gram, cross = gram - torch.outer(x_mean, x_mean), cross - torch.outer(u_mean, x_mean)
    return x_mean, u_mean, gram, cross


def ridge_map(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    pull = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.solve(gram + pull, cross.T).T


def held_out_error(rows, ridge: float, biased: bool) -> tuple[float, float]:
    """Error on held-out rows, and the size of what it is the difference of."""
    held_out = rows[-1]
    x_mean, u_mean, gram, cross = moments(rows, ~held_out, biased)
    change = ridge_map(gram, cross, ridge)
    bias = u_mean - change @ x_mean if biased else torch.zeros_like(u_mean)
    x, u, p, share, _ = (column[held_out] for column in rows)
    combinations = sketch(len(u_mean)).T
    target, answer = u @ combinations, (x @ change.T + bias * (share > 0)[:, None]) @ combinations
    error = float(p @ (target - answer).square().sum(1))
    return error, float(p @ (target.abs() + answer.abs()).square().sum(1))


def sketch(m: int) -> Tensor:
    if m <= SKETCHED:
        return torch.eye(m, dtype=torch.float64)
    signs = torch.randint(2, (m, SKETCHED), generator=torch.Generator().manual_seed(0)) * 2 - 1
    return signs.T.double() / 4


def step_of(rows, biased: bool, ridges: Sequence[float], unknown: float) -> tuple[Tensor, Tensor]:
    """Change of weight and bias, with the ridge of least held-out error, or else `unknown`."""
    everything = rows[2] >= 0
    x_mean, u_mean, gram, cross = moments(rows, everything, biased)
    change = torch.zeros_like(cross)
    if varies(rows, everything, biased):
        change = ridge_map(gram, cross, best_ridge(rows, biased, ridges, unknown))
    return change, u_mean - change @ x_mean


def best_ridge(rows, biased: bool, ridges: Sequence[float], unknown: float) -> float:
    if len(ridges) == 1:
        return ridges[0]
    held_out = rows[-1]
    if not ((rows[3][held_out] > 0).any() and varies(rows, ~held_out, biased)):
        return unknown
    errors = {ridge: held_out_error(rows, ridge, biased) for ridge in ridges}
    least = min(errors.values())
    # The largest of ridges with equal errors up to rounding.
    return max(r for r, (e, size) in errors.items() if e <= least[0] + 1e-14 * size)


def varies(rows, chosen: Tensor, biased: bool) -> bool:
    """False for no rows, and with a bias for one row or equal ones."""
    x, _, p, share, _ = (column[chosen] for column in rows)
    square = (p @ x.square()).mean() / share.sum()
    return bool(moments(rows, chosen, biased)[2].diagonal().mean() > CONSTANT * square)
