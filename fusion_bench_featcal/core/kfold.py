"""Ridge regressions whose lambdas are chosen by held-out error, from sums that are kept by fold.

Modules that share an input `x` shall change by a map `E`, which is predicted from `x`. There are
two kinds of targets, both relative to what the modules give now:

- `own`: what an expert's own weights would give on `x`;
- `full`: what the modules should give, from the expert's features.

With `G` the second moments of `x`, `C0` and `C1` those of the targets with `x` (about the means,
where a bias takes these up), and `s = trace(G) / d`:

    E0 = (C0 + l1 s D) (G + l1 s I)^-1      towards the experts' weights; `D`: the anchor
    E  = (C1 + l2 s E0) (G + l2 s I)^-1     then towards what of the full targets `x` predicts

Held-out error chooses the lambdas as if `D` were 0. It looks at one module alone, where a step that
is too short costs little; over all modules of a model, steps that are too short add up, while their
noise does not. `D` makes up for that (`anchor`).

For held-out errors each fold's training system is factorised for each lambda that is tried; these
are found by going downhill from the middle of the grid. The inverses for two lambdas commute, so
that `E0` of one and `E` of another need no factor of both:
`E = C1 A2^-1 + l2 / (l2 - l1) (C0 A1^-1 - C0 A2^-1)`. An eigendecomposition would serve all lambdas
at once, but takes longer than all the factorisations (`benchmarks/kfold_grid.py`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.cholesky import (
    PROBES,
    SINGLE_LAMBDA,
    Factor,
    check_residual,
    factor_of,
    random_signs,
    solve_by_lapack,
    solve_factorised,
    trusted_condition,
)
from fusion_bench_featcal.core.finite import read_back

INFINITE = float("inf")

GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Lambdas, relative to the mean eigenvalue of the inputs' second moments."""

START = 2
"""Number of the lambda from which the search for the least held-out error begins."""

WITHOUT_FOLDS = {1: (INFINITE, 1.0), 2: (1.0, INFINITE)}
"""`l1` and `l2` by number of stages, where samples are too few to leave any out."""


def probes_of(outputs: int, like: Tensor) -> Float[Tensor, "r m"] | None:
    """Combinations of outputs by random signs, for held-out errors; None: the outputs themselves.

    Args:
        outputs: `m`.
        like: A tensor of the dtype and device asked for.
    """
    if outputs <= PROBES:
        return None
    return (random_signs(outputs, like.dtype, like.device).T / PROBES**0.5).contiguous()


@dataclass(frozen=True, kw_only=True)
class InputSums:
    """Weighted sums over rows of inputs `x`; with a leading dimension, of several folds.

    Attributes:
        gram: `sum p x x'`, `[..., d, d]`.
        x: `sum p x`, `[..., d]`.
        weight: `sum p`, `[...]`.
    """

    gram: Float[Tensor, "*k d d"]
    x: Float[Tensor, "*k d"]
    weight: Float[Tensor, "*k"]


@dataclass(frozen=True, kw_only=True)
class TargetSums:
    """Weighted sums over rows of targets `u`; with a leading dimension, of several folds.

    Attributes:
        moment: `sum p u x'`, `[..., m, d]`.
        u: `sum p u`, `[..., m]`.
    """

    moment: Float[Tensor, "*k m d"]
    u: Float[Tensor, "*k m"]


class Means:
    """Means over some rows, about the inputs' mean where there is a bias to take it up.

    Attributes:
        gram: `G`, `[d, d]`.
        x: Mean input, `[d]`.
        scale: `s`, the mean eigenvalue of `G`.
        variation: `s` relative to the inputs' mean square; 1 where there is no bias.
    """

    def __init__(self, sums: InputSums, *, biased: bool) -> None:
        """Divide by the weight.

        Args:
            sums: Sums of inputs, in the solve's dtype.
            biased: Whether the modules have a bias to be set.
        """
        self._biased, self._weight = biased, sums.weight
        self.gram, self.x = sums.gram / sums.weight, sums.x / sums.weight
        mean_square = self.gram.diagonal().mean()
        if biased:
            self.gram.addr_(self.x, self.x, alpha=-1)
        self.scale = self.gram.diagonal().mean()
        self.variation = self.scale / mean_square

    def of(self, target: TargetSums) -> tuple[Tensor, Tensor]:
        """Mean `u x'`, `[m, d]`, about the means where there is a bias; and mean `u`, `[m]`."""
        moment, u = target.moment / self._weight, target.u / self._weight
        return (moment.addr_(u, self.x, alpha=-1) if self._biased else moment), u

    def square_of(self, square: Tensor, mean: Tensor) -> Tensor:
        """Mean `u'u` of targets, about the mean where there is a bias.

        Args:
            square: Sum of `p u'u`.
            mean: Mean `u`, `[m]`.
        """
        square = square / self._weight
        return square - mean.square().sum() if self._biased else square

    def system(self, ridge: float | Tensor) -> Float[Tensor, "d d"]:
        """`G` with something added to its diagonal."""
        system = self.gram.clone()
        system.diagonal().add_(ridge)
        return system


def choose_lambdas(
    folds: InputSums,
    total: InputSums,
    targets: Mapping[str, TargetSums],
    *,
    biased: bool,
    stages: int,
) -> tuple[float, float]:
    """Choose the lambdas with the least error on folds that are left out.

    Args:
        folds: Sums of each fold, `[k, ...]`.
        total: Their total, in the solve's dtype.
        targets: Sums of the targets `own` and `full`, or of combinations of them, of each fold.
        biased: Whether the modules have a bias to be set.
        stages: 1: only the full targets are looked at; 2: both.

    Returns:
        `l1` (infinite: `E0` is 0) and `l2` (infinite: `E` is `E0`); `WITHOUT_FOLDS` where all rows
        are in one fold.
    """
    filled = [k for k, weight in enumerate(folds.weight.tolist()) if weight > 0]
    if len(filled) < 2:
        return WITHOUT_FOLDS[stages]
    trials = [_Trial(folds, total, targets, k, biased=biased) for k in filled]
    first = INFINITE
    if stages == 2:
        start = _downhill(START, len(GRID), lambda n: [trial.own_error(n) for trial in trials])
        first = GRID[start]
    else:
        start = START
    second = _downhill(
        start, len(GRID) + 1, lambda n: [trial.full_error(first, n) for trial in trials]
    )
    return first, (*GRID, INFINITE)[second]


def _downhill(start: int, count: int, errors: Callable[[int], Sequence[Tensor]]) -> int:
    """Number of a candidate whose neighbours have no less error, on the way down from a start.

    Errors over lambda have one minimum but for noise, so that few candidates have to be tried.

    Args:
        start: Number of the candidate to start from.
        count: Number of candidates.
        errors: Gives a candidate's error on each fold.
    """

    @cache
    def total(number: int) -> float:
        error = float(torch.stack(list(errors(number))).sum())
        return error if math.isfinite(error) else INFINITE

    def is_better(other: int, number: int) -> bool:
        # Where a system could not be factorised, a larger lambda may do.
        blocked = total(number) == INFINITE and other > number
        return blocked or total(other) < total(number)

    for step in (1, -1):
        number = start
        while 0 <= number + step < count and is_better(number + step, number):
            number += step
        if number != start:
            return number
    return start


class _Trial:
    """Solutions for lambdas from all folds but one, and their errors on that one."""

    def __init__(
        self,
        folds: InputSums,
        total: InputSums,
        targets: Mapping[str, TargetSums],
        left: int,
        *,
        biased: bool,
    ) -> None:
        """Form the right sides, and the training system in the folds' precision."""
        wide = total.gram.dtype
        self._biased, self._total, self._gram = biased, total, folds.gram[left]
        self._x, self._weight = folds.x[left].to(wide), folds.weight[left].to(wide)
        train = self._training()
        self._train_x, self._scale = train.x, train.scale
        self._train_gram = train.gram.to(self._gram.dtype)
        self._test, moments, self._train_u = {}, [], {}
        for kind, sums in targets.items():
            test = TargetSums(moment=sums.moment[left].to(wide), u=sums.u[left].to(wide))
            others = TargetSums(
                moment=sums.moment.to(wide).sum(0) - test.moment, u=sums.u.to(wide).sum(0) - test.u
            )
            moment, self._train_u[kind] = train.of(others)
            moments.append(moment)
            self._test[kind] = test
        self._right, self._count = torch.cat(moments), len(moments[0])
        self._solved: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def _training(self) -> Means:
        """Means over the rows of all other folds."""
        total = self._total
        rest = InputSums(
            gram=total.gram - self._gram, x=total.x - self._x, weight=total.weight - self._weight
        )
        return Means(rest, biased=self._biased)

    def own_error(self, number: int) -> Tensor:
        """Error of the own targets for an `l1`."""
        return self._error(self._solution(number)[0], "own")

    def full_error(self, first: float, number: int) -> Tensor:
        """Error of the full targets for an `l2`; behind the grid's last one is infinity."""
        start = None if first == INFINITE else self._solution(GRID.index(first))[0]
        if number == len(GRID):
            step = torch.zeros_like(self._right[: self._count]) if start is None else start
        else:
            own, step, twice = self._solution(number)
            second = GRID[number]
            if second == first:
                step = step + twice
            elif start is not None:
                step = step + second / (second - first) * (start - own)
        return self._error(step, "full")

    def _solution(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """`E0`, `C1 A^-1`, and `l s E0 A^-1` for a lambda of the grid, each `[r, d]`."""
        if number not in self._solved:
            wide, count, ridge = self._right.dtype, self._count, GRID[number] * self._scale
            narrow = self._train_gram.dtype == wide or GRID[number] >= SINGLE_LAMBDA
            system = self._train_gram.clone() if narrow else self._training().gram
            system.diagonal().add_(ridge)
            dtype = system.dtype
            lower, failed = torch.linalg.cholesky_ex(system)
            # Without a factor the error shall be infinite.
            usable = torch.where(failed == 0, 1.0, torch.nan).to(wide)
            solved = solve_by_lapack(self._right.to(dtype), lower)
            twice = solve_by_lapack(solved[:count], lower).to(wide) * ridge
            own, alone = (part.to(wide) * usable for part in solved.split(count))
            self._solved[number] = own, alone, twice
        return self._solved[number]

    def _error(self, step: Float[Tensor, "r d"], kind: str) -> Float[Tensor, ""]:
        """Squared error of `E x + beta` over the rows left out, but for a constant."""
        test = self._test[kind]
        reached = (step.to(self._gram.dtype) @ self._gram).to(step.dtype)
        error = ((reached - 2 * test.moment) * step).sum()
        if not self._biased:
            return error
        beta = self._train_u[kind] - step @ self._train_x
        ahead = step @ self._x - test.u
        return error + 2 * (beta * ahead).sum() + self._weight * beta.square().sum()


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of modules that share an input.

    Attributes:
        step: `E`, `[m, d]`.
        shift: Change of the bias, where there is one: mean target - `E` mean input, `[m]`.
        residual: Largest relative residual of the systems that were solved; 0 if none was.
        condition: Largest estimate of their condition numbers; 1 if none was solved.
    """

    step: Float[Tensor, "m d"]
    shift: Float[Tensor, " m"]
    residual: float
    condition: float


LEAST_VARIATION = 1e-6
"""Less than this share of a mean square is float32 rounding: inputs that vary so little about their
mean are one input."""

BEYOND = 2.0
"""Steps that are missing, added by the anchor at rho = 2: where ridge and data weigh equally, the
step is then full."""


def anchor(
    means: Means,
    own: TargetSums,
    square: Tensor,
    step: Float[Tensor, "m d"],
    tasks: int,
    rho: float,
) -> tuple[Float[Tensor, "m d"], Tensor]:
    """Return `D`, what a ridge pulls towards less the modules' weights, and `g`.

    With `S` the step from the base to the weights and `v = u0 + S x` what an expert's weights add
    to the base's outputs for its own task's inputs `x`, `g = mean v'S x / mean v'v` is the share of
    the experts' steps that `S` keeps (about the means, where a bias takes these up). Then
    `D = 2 (rho - 1) (1 / g - 1) S`, with `1 / g` at most the number of tasks, and `D = 0` where
    `g` is not positive or no expert differs from the base.

    Args:
        means: Means of the inputs over all rows.
        own: Sums of the own targets `u0`.
        square: Sum of `p u0'u0`.
        step: `S`.
        tasks: Number of tasks.
        rho: 1: `D` is 0; 2: twice the missing step.
    """
    moment, mean = means.of(own)
    pulled, kept = (moment * step).sum(), (step @ means.gram * step).sum()
    square = means.square_of(square, mean)
    experts = square + 2 * pulled + kept
    none = torch.zeros_like(experts)
    moved = experts > LEAST_VARIATION * square  # less is rounding: the experts equal the base
    share = torch.where(moved, (pulled + kept) / experts, none)
    missing = torch.where(share > 0, (1 / share).clamp(max=tasks) - 1, none)
    return step * (BEYOND * (rho - 1) * missing), share


def solve_stages(
    means: Means,
    own: TargetSums,
    full: TargetSums,
    lambdas: tuple[float, float],
    towards: Float[Tensor, "m d"] | None = None,
) -> Change:
    """Solve for the change of modules, given the lambdas.

    Args:
        means: Means of their inputs over all rows.
        own: Sums of the own targets over all rows.
        full: Sums of the full targets.
        lambdas: `l1` and `l2`.
        towards: `D`, the anchor less what the modules are; None: 0.

    Raises:
        UnsolvedError: If a system has no trustworthy solution.
    """
    (own_moment, _), (moment, mean) = means.of(own), means.of(full)
    first, second = lambdas
    step, solved = torch.zeros_like(moment), []
    if float(means.variation) >= LEAST_VARIATION:  # else there is nothing to predict from
        if first != INFINITE:
            ridge = first * means.scale
            if towards is not None:
                own_moment += towards * ridge
            step = _solved(means, own_moment, ridge, solved)
        if second != INFINITE:
            ridge = second * means.scale
            step = _solved(means, moment.add_(step * ridge), ridge, solved)
    return _checked(step, mean - step @ means.x, solved)


def solve_fixed(
    means: Means, target: TargetSums, ridge: float | Tensor, towards: Float[Tensor, "m d"] | None
) -> Change:
    """Solve for the change of modules with one ridge: `E = (C + r E_anc) (G + r I)^-1`.

    Args:
        means: Means of their inputs over all rows.
        target: Sums of the targets.
        ridge: `r`.
        towards: `E_anc`, the anchor less what the modules are; None: 0.

    Raises:
        UnsolvedError: If the system has no trustworthy solution.
    """
    (moment, mean), solved = means.of(target), []
    if towards is not None:
        moment += towards * ridge
    step = _solved(means, moment, ridge, solved)
    return _checked(step, mean - step @ means.x, solved)


def _solved(means: Means, right: Tensor, ridge: float | Tensor, solved: list[Tensor]) -> Tensor:
    """Solve a system and note what tells its worth, at which the host looks later."""
    system = means.system(ridge)
    factor = factor_of(system)
    weight, residual = solve_factorised(factor.lower, system, right)
    solved += [factor.signs, residual]
    return weight


def _checked(step: Tensor, shift: Tensor, solved: list[Tensor]) -> Change:
    residuals, conditions = [0.0], [1.0]
    values = read_back(solved)
    while values:
        signs, residual, values = (
            values[: Factor.SIGNS],
            values[Factor.SIGNS],
            values[Factor.SIGNS + 1 :],
        )
        # Directions that rounding would decide were left to the held-out errors.
        conditions.append(trusted_condition(signs, size=len(shift), floor=0.0, rounding=0.0))
        check_residual(residual, step.dtype)
        residuals.append(residual)
    return Change(step=step, shift=shift, residual=max(residuals), condition=max(conditions))
