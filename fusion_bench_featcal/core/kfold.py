"""Ridge regressions whose lambdas are chosen by held-out error, from sums that are kept by fold.

Modules that share an input `x` shall change by a map `E`, which is predicted from `x`. There are
two kinds of targets, both relative to what the modules give now:

- `own`: what an expert's own weights would give on `x`;
- `full`: what the modules should give, from the expert's features.

With `G` the second moments of `x`, `C0` and `C1` those of the targets with `x` (about the means,
where a bias takes these up), and `s = trace(G) / d`:

    E0 = C0 (G + l1 s I)^-1                 towards the experts' weights
    E  = (C1 + l2 s E0) (G + l2 s I)^-1     then towards what of the full targets `x` predicts

For held-out errors each fold's training system is factorised once for each lambda. The inverses for
two lambdas commute, so that `E0` of one and `E` of another need no factor of both:
`E = C1 A2^-1 + l2 / (l2 - l1) (C0 A1^-1 - C0 A2^-1)`. An eigendecomposition would serve all lambdas
at once, but takes longer than the seven factorisations: as long as 16 of them at a width of 768.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fusion_bench_featcal.core.cholesky import (
    SINGLE_LAMBDA,
    Factor,
    check_residual,
    factor_of,
    solve_by_lapack,
    solve_factorised,
    trusted_condition,
)
from fusion_bench_featcal.core.finite import read_back

INFINITE = float("inf")

GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Lambdas, relative to the mean eigenvalue of the inputs' second moments."""

WITHOUT_FOLDS = {1: (INFINITE, 1.0), 2: (1.0, INFINITE)}
"""`l1` and `l2` by number of stages, where samples are too few to leave any out."""

MOST_PROBES = 16
"""Held-out errors look at so many combinations of the modules' outputs at most."""


def probes_of(outputs: int, like: Tensor) -> Float[Tensor, "r m"] | None:
    """Combinations of outputs by random signs, for held-out errors; None: the outputs themselves.

    Args:
        outputs: `m`.
        like: A tensor of the dtype and device asked for.
    """
    if outputs <= MOST_PROBES:
        return None
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (MOST_PROBES, outputs), generator=generator).mul_(2).sub_(1)
    return signs.to(like) / MOST_PROBES**0.5


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

    def to(self, dtype: torch.dtype) -> "Means":
        """The same, with `G` in another dtype."""
        other = copy(self)
        other.gram = self.gram.to(dtype)
        return other

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
        first = GRID[_least([trial.own_errors() for trial in trials])]
    second = _least([trial.full_errors(first) for trial in trials])
    return first, (*GRID, INFINITE)[second]


def _least(errors: Sequence[Tensor]) -> int:
    """The first candidate with the least error over all trials."""
    total = torch.stack(list(errors)).sum(0)
    sums = torch.where(torch.isfinite(total), total, INFINITE).tolist()
    return min(range(len(sums)), key=sums.__getitem__)


class _Trial:
    """Solutions for every lambda from all folds but one, and their errors on that one."""

    def __init__(
        self,
        folds: InputSums,
        total: InputSums,
        targets: Mapping[str, TargetSums],
        left: int,
        *,
        biased: bool,
    ) -> None:
        """Solve; of the training system only what it solves is kept."""
        wide = total.gram.dtype
        self._biased, self._gram = biased, folds.gram[left]
        self._x, self._weight = folds.x[left].to(wide), folds.weight[left].to(wide)
        rest = InputSums(
            gram=total.gram - self._gram, x=total.x - self._x, weight=total.weight - self._weight
        )
        train = Means(rest, biased=biased)
        self._train_x = train.x
        self._test, moments, self._train_u = {}, [], {}
        for kind, sums in targets.items():
            test = TargetSums(moment=sums.moment[left].to(wide), u=sums.u[left].to(wide))
            others = TargetSums(
                moment=sums.moment.to(wide).sum(0) - test.moment, u=sums.u.to(wide).sum(0) - test.u
            )
            moment, self._train_u[kind] = train.of(others)
            moments.append(moment)
            self._test[kind] = test
        right, count = torch.cat(moments), len(moments[0])
        systems = {wide: train, folds.gram.dtype: train.to(folds.gram.dtype)}
        own, alone, twice = [], [], []
        for factor in GRID:
            dtype = folds.gram.dtype if factor >= SINGLE_LAMBDA else wide
            ridge = factor * train.scale
            lower, failed = torch.linalg.cholesky_ex(systems[dtype].system(ridge))
            # Without a factor the error shall be infinite.
            usable = torch.where(failed == 0, 1.0, torch.nan).to(wide)
            solved = solve_by_lapack(right.to(dtype), lower)
            own.append(solved[:count].to(wide) * usable)
            alone.append(solved[count:].to(wide) * usable)
            twice.append(solve_by_lapack(solved[:count], lower).to(wide) * ridge)
        # By lambda: `E0`, `C1 A^-1`, and `l s E0 A^-1`, each `[r, d]`.
        self._own, self._alone, self._twice = map(torch.stack, (own, alone, twice))

    def own_errors(self) -> Tensor:
        """Errors of the own targets for every `l1`."""
        return self._errors(self._own, "own")

    def full_errors(self, first: float) -> Tensor:
        """Errors of the full targets for every `l2`."""
        if first == INFINITE:
            start, steps = torch.zeros_like(self._own[0]), list(self._alone)
        else:
            start = self._own[GRID.index(first)]
            steps = [
                alone + (twice if second == first else second / (second - first) * (start - own))
                for second, own, alone, twice in zip(
                    GRID, self._own, self._alone, self._twice, strict=True
                )
            ]
        return self._errors(torch.stack([*steps, start]), "full")

    def _errors(self, steps: Float[Tensor, "l r d"], kind: str) -> Float[Tensor, " l"]:
        """Squared error of each `E x + beta` over the rows left out, but for a constant."""
        test = self._test[kind]
        reached = steps.flatten(0, 1) @ self._gram.to(steps.dtype)
        errors = ((reached.view_as(steps) - 2 * test.moment) * steps).sum((1, 2))
        if not self._biased:
            return errors
        beta = self._train_u[kind] - steps @ self._train_x
        ahead = steps @ self._x - test.u
        return errors + 2 * (beta * ahead).sum(1) + self._weight * beta.square().sum(1)


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
"""Inputs that vary less about their mean, in mean squares, are one input and float32 rounding."""


def solve_stages(
    means: Means, own: TargetSums, full: TargetSums, lambdas: tuple[float, float]
) -> Change:
    """Solve for the change of modules, given the lambdas.

    Args:
        means: Means of their inputs over all rows.
        own: Sums of the own targets over all rows.
        full: Sums of the full targets.
        lambdas: `l1` and `l2`.

    Raises:
        UnsolvedError: If a system has no trustworthy solution.
    """
    (own_moment, _), (moment, mean) = means.of(own), means.of(full)
    first, second = lambdas
    step, solved = torch.zeros_like(moment), []
    if float(means.variation) >= LEAST_VARIATION:  # else there is nothing to predict from
        if first != INFINITE:
            step = _solved(means, own_moment, first * means.scale, solved)
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
