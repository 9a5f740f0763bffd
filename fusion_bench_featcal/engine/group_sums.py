"""Sums over the rows of all tasks for modules that are solved together, and their solve."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.cholesky import UnsolvedError, solve_dtype
from fusion_bench_featcal.core.finite import not_finite
from fusion_bench_featcal.core.kfold import (
    INFINITE,
    Change,
    InputSums,
    Means,
    TargetSums,
    anchor,
    choose_lambdas,
    probes_of,
    solve_fixed,
    solve_stages,
)
from fusion_bench_featcal.core.moments import outputs_are_few
from fusion_bench_featcal.core.products import (
    add_lower_gram,
    add_product,
    columns_of,
    mirror_lower,
    times_transposed,
)
from fusion_bench_featcal.engine.checks import DeferredCheck
from fusion_bench_featcal.engine.fold_rows import FOLDS, FoldRows
from fusion_bench_featcal.engine.module_groups import Group
from fusion_bench_featcal.engine.problem import Problem
from fusion_bench_featcal.engine.task_sums import not_finite_features
from fusion_bench_featcal.settings import CalibrationError

ROWS_AT_ONCE = 1024
"""Rows of a fold wait until there are so many: products of few rows are slow."""


@dataclass(frozen=True)
class Features:
    """Inputs of a group of modules in one batch, and their distance from the expert.

    Attributes:
        inputs: The modules' inputs in the calibrated model, one a call.
        drifts: Where the modules write to the hidden features: the expert's, behind the module,
            less the model's without the module's output; else how far the inputs are from the
            expert's; one a call.
        rows: The rows that count, by fold.
    """

    inputs: list[Tensor]
    drifts: list[Tensor]
    rows: FoldRows

    def pieces(self, group: Group, fold: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One fold's rows of inputs and drifts, a convolution's patches some at a time."""
        patches = group.sites[0].patches
        for x, drift in zip(self.inputs, self.drifts, strict=True):
            if patches is None:
                yield self.rows.select(x, fold), self.rows.select(drift, fold)
                continue
            own, further = (self.rows.of_samples(part, fold) for part in (x, drift))
            if not group.writes:
                yield from ((a, b) for a, b in patches.pieces([own, further]))
                continue
            outputs, start = further.flatten(2).mT, 0
            for (rows,) in patches.pieces([own]):
                yield rows, outputs[start : start + len(rows)]
                start += len(rows)


def stacked(module: nn.Module, group: Group) -> tuple[Tensor, Tensor]:
    """Weights of a group's modules, `[m, d]`, and biases, `[m]` (0 where there are none)."""
    get = module.get_parameter
    weights = [site.oriented(get(site.weight_name)).detach() for site in group.sites]
    biases = [
        get(site.bias_name).detach() if site.has_bias else weight.new_zeros(len(weight))
        for site, weight in zip(group.sites, weights, strict=True)
    ]
    return group.own(torch.cat(weights)), group.own(torch.cat(biases))


class GroupSums:
    """Sums of one group over the rows of all tasks, and its solve.

    Second moments and, for held-out errors, sketches of the targets are kept by fold; the targets'
    own moments once. Every task's rows go straight into these sums, already weighted: memory does
    not depend on the number of tasks.

    Attributes:
        group: The modules.
        checks: Checks that must pass before the sums are used.
    """

    def __init__(self, problem: Problem, block: str, group: Group) -> None:
        """Start with no rows.

        Args:
            problem: The problem, whose model has the modules as they are before their change.
            block: The block.
            group: The modules.
        """
        self.group, self._problem, self._block = group, problem, block
        self.weight, self.bias = stacked(problem.model, group)
        dtype = torch.promote_types(self.weight.dtype, problem.row_dtype)
        self.weight, self.bias = self.weight.to(dtype), self.bias.to(dtype)
        outputs, width = self.weight.shape
        self.kfold = problem.settings.ridge == "kfold"
        folds, zeros = FOLDS if self.kfold else 1, self.weight.new_zeros
        self.probes = probes_of(outputs, self.weight)
        sketched = outputs if self.probes is None else len(self.probes)
        sketched *= 2 * self.kfold  # own targets, then further ones; none where nothing is held out
        self.inputs = InputSums(
            gram=zeros(folds, width, width), x=zeros(folds, width), weight=zeros(folds)
        )
        self.sketches = TargetSums(moment=zeros(folds, sketched, width), u=zeros(folds, sketched))
        self.own = TargetSums(moment=zeros(outputs, width), u=zeros(outputs))
        self.own_square = zeros(())
        # Relative to the own targets, or, where the modules write, the full targets.
        self.further = TargetSums(moment=zeros(outputs, width), u=zeros(outputs))
        self.checks: list[DeferredCheck] = []

    def tensors(self) -> list[Tensor]:
        """The sums, to which those of other rows may be added in place."""
        parts = [self.inputs, self.sketches, self.own, self.further]
        return [self.own_square, *(tensor for part in parts for tensor in vars(part).values())]

    def project(self, outputs: Tensor) -> Tensor:
        """Combinations of outputs, `[m, ...]`, of which held-out errors are taken."""
        return outputs if self.probes is None else self.probes @ outputs

    def refuse_not_finite(self, task: str) -> None:
        """Note, without looking yet, whether a task has brought NaN or infinity."""
        error = not_finite_features(
            f"task {task}, block {self._block}, module {self.group.first}", task
        )
        total = self.inputs.gram.sum() + self.further.moment.sum() + self.further.u.sum()
        total = total + self.own_square
        self.checks.append(DeferredCheck(not_finite(total), error))

    def solve(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """New parameters by name, and a log record for each module.

        Raises:
            CalibrationError: If a system has no trustworthy solution.
        """
        change, noted = self.change()
        record = {"block": self._block, "residual": change.residual, "condition": change.condition}
        updates = self.updated(change)
        return updates, [{"module": site.name, **record, **noted} for site in self.group.sites]

    def change(self) -> tuple[Change, dict[str, Any]]:
        """The modules' change, and what the log shall tell of it; errors as of `solve`."""
        wide = solve_dtype(self.weight.device)
        for gram in self.inputs.gram:
            mirror_lower(gram)
        if self.group.writes:
            self._subtract_outputs()
        total = InputSums(
            gram=self.inputs.gram.sum(0, dtype=wide),
            x=self.inputs.x.sum(0, dtype=wide),
            weight=self.inputs.weight.sum(dtype=wide),
        )
        try:
            return self._changed(total)
        except UnsolvedError as error:
            raise CalibrationError(
                f"block {self._block}, module {self.group.first}: {error}. Raise "
                f"method.samples_per_task (now {self._problem.settings.samples_per_task})"
                + ("" if self.kfold else " or method.ridge_lambda")
            ) from error

    def _subtract_outputs(self) -> None:
        """Take off the full targets what the modules give now, which follows from their inputs."""
        inputs, weight, bias = self.inputs, self.weight, self.bias
        moment, u = _outputs(weight, bias, inputs.gram.sum(0), inputs.x.sum(0), inputs.weight.sum())
        self.further.moment.sub_(moment)
        self.further.u.sub_(u)
        if self.kfold:
            sketches, start = self.sketches, self.sketches.u.shape[1] // 2
            weight, bias = self.project(weight), self.project(bias)
            sums = zip(inputs.gram, inputs.x, inputs.weight, strict=True)
            for fold, (gram, x, total) in enumerate(sums):
                moment, u = _outputs(weight, bias, gram, x, total)
                sketches.moment[fold, start:].sub_(moment)
                sketches.u[fold, start:].sub_(u)

    def _changed(self, total: InputSums) -> tuple[Change, dict[str, Any]]:
        wide, means = total.gram.dtype, Means(total, biased=self.group.biased)
        own = TargetSums(moment=self.own.moment.to(wide), u=self.own.u.to(wide))
        full = TargetSums(moment=self.further.moment.to(wide), u=self.further.u.to(wide))
        if not self.group.writes:
            full = TargetSums(moment=full.moment + own.moment, u=full.u + own.u)
        change, noted = (
            self._by_held_out_error(total, means, own, full)
            if self.kfold
            else (self._by_fixed_lambda(means, own, full), {})
        )
        return change, noted | {"writes": self.group.writes}

    def _by_held_out_error(
        self, total: InputSums, means: Means, own: TargetSums, full: TargetSums
    ) -> tuple[Change, dict[str, Any]]:
        settings, targets = self._problem.settings, self._sketched_targets()
        first, second = choose_lambdas(
            self.inputs, total, targets, biased=self.group.biased, stages=settings.stages
        )
        first *= settings.first_ridge_scale
        finite = [None if ridge == INFINITE else ridge for ridge in (first, second)]
        noted: dict[str, Any] = {"lambdas": finite}
        towards = self._step(means.gram.dtype)
        if towards is not None:
            square, tasks = self.own_square.to(towards.dtype), len(self._problem.tasks)
            towards, share = anchor(means, own, square, towards, tasks, settings.anchor_rho)
            noted["step_share"] = float(share)
        return solve_stages(means, own, full, (first, second), towards), noted

    def _by_fixed_lambda(self, means: Means, own: TargetSums, full: TargetSums) -> Change:
        settings = self._problem.settings
        target = TargetSums(
            moment=own.moment.lerp(full.moment, settings.mix_alpha),
            u=own.u.lerp(full.u, settings.mix_alpha),
        )
        ridge = settings.ridge_lambda / len(self._problem.tasks)
        ridge = ridge * torch.linalg.matrix_norm(means.gram) + settings.eps
        step = self._step(means.gram.dtype)
        towards = None if step is None else step * (settings.anchor_rho - 1)
        return solve_fixed(means, target, ridge, towards)

    def _sketched_targets(self) -> dict[str, TargetSums]:
        moments, us = self.sketches.moment.chunk(2, dim=1), self.sketches.u.chunk(2, dim=1)
        own, full = (TargetSums(moment=m, u=u) for m, u in zip(moments, us, strict=True))
        if not self.group.writes:
            full = TargetSums(moment=own.moment + full.moment, u=own.u + full.u)
        return {"own": own, "full": full}

    def _step(self, dtype: torch.dtype) -> Tensor | None:
        """The modules' step from the base; None where the anchor is what they are."""
        base = self._problem.base
        if base is None or not self._problem.settings.needs_base:
            return None
        starts = [site.oriented(base.tensor(site.weight_name)) for site in self.group.sites]
        return self.weight.to(dtype) - self.group.own(torch.cat(starts)).to(dtype)

    def updated(self, change: Change) -> dict[str, Tensor]:
        """New parameters by name; what does not change keeps its bits."""
        get, wide = self._problem.model.get_parameter, change.step.dtype
        updates: dict[str, Tensor] = {}
        sizes = [len(site.oriented(get(site.weight_name))) for site in self.group.sites]
        steps, shifts = change.step.split(sizes), change.shift.split(sizes)
        for site, step, shift in zip(self.group.sites, steps, shifts, strict=True):
            weight = site.oriented(get(site.weight_name)).to(wide) + step
            updates[site.weight_name] = site.stored(weight)
            if self.group.biased:
                updates[site.bias_name] = get(site.bias_name).to(wide) + shift
        return updates


def _outputs(
    weight: Tensor, bias: Tensor, gram: Tensor, x: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums of outputs `W x + b`: with x, `[m, d]`, and their own, `[m]`."""
    return times_transposed(weight, gram).addr_(bias, x), weight @ x + bias * total


def _rows_of(parts: Sequence[Tensor]) -> Tensor:
    """Rows of several features `[..., d]` in one, `[n, d]`; copied once where they are alike."""
    if any(part.shape[1:] != parts[0].shape[1:] for part in parts):
        parts = [part.flatten(0, -2) for part in parts]
    return torch.cat(list(parts)).flatten(0, -2)


class TaskRows:
    """Adds one task's rows to the sums of a group.

    Attributes:
        sums: The sums.
    """

    def __init__(self, sums: GroupSums, task: str, expert: nn.Module, weight: float) -> None:
        """Begin a task.

        Args:
            sums: The sums.
            task: The task.
            expert: Its expert, with the group's parameters.
            weight: The task's weight.
        """
        self.sums, self._task, self._weight = sums, task, weight
        like, inputs = sums.weight, sums.inputs
        expert_weight, expert_bias = (part.to(like.dtype) for part in stacked(expert, sums.group))
        self._step, self._shift = expert_weight - like, expert_bias - sums.bias
        # The drift of inputs reaches outputs through the expert's weight, that of outputs is there.
        self._reach = None if sums.group.writes else expert_weight
        self._before = inputs.gram.sum(0), inputs.x.clone(), inputs.weight.clone()
        outputs, width = like.shape
        self._drift = like.new_zeros(len(inputs.x), outputs if sums.group.writes else width)
        self._cross: Tensor | None = None
        if not sums.group.writes and not outputs_are_few(outputs, width):
            self._cross = like.new_zeros(width, width)
        self._waiting: list[list[tuple[Tensor, Tensor, Tensor | None]]] = [[] for _ in inputs.x]
        self._rows = [0 for _ in inputs.x]  # that wait
        self._sketched_step = sums.project(self._step) if sums.kfold else self._step
        self._sketched_reach = (
            sums.probes if self._reach is None or not sums.kfold else sums.project(self._reach)
        )

    def add(self, features: Features) -> None:
        """Add a batch's rows."""
        for fold in range(len(self._waiting)):
            for x, drift in features.pieces(self.sums.group, fold):
                self.put(fold, x, drift, features.rows.weights(fold))

    def put(self, fold: int, x: Tensor, drift: Tensor, weights: Tensor | None = None) -> None:
        """Add rows of one fold, `[..., d]` each."""
        if len(x):
            self._waiting[fold].append((x, drift, weights))
            self._rows[fold] += x.shape[:-1].numel()
        if self._rows[fold] >= ROWS_AT_ONCE:
            self._absorb(fold)

    def _absorb(self, fold: int) -> None:
        """Add the rows of one fold that wait."""
        if not self._waiting[fold]:
            return
        sums, inputs, weight = self.sums, self.sums.inputs, self._weight
        dtype = sums.weight.dtype
        inner, drifts, parts = zip(*self._waiting[fold], strict=True)
        x, drift = _rows_of(inner).to(dtype), _rows_of(drifts).to(dtype)
        weights = None if parts[0] is None else torch.cat(parts).to(dtype)
        self._waiting[fold].clear()
        self._rows[fold] = 0
        inputs.weight[fold] += weight * (len(x) if weights is None else weights.sum())
        for total, rows in ((inputs.x[fold], x), (self._drift[fold], drift)):
            total.add_(rows.sum(0) if weights is None else weights @ rows, alpha=weight)
        if weights is not None:  # roots on both sides: a gram stays one, however it is rounded
            roots = weights.sqrt()[:, None]
            x, drift = x * roots, drift * roots
        columns = columns_of(x)
        add_lower_gram(inputs.gram[fold], columns, weight)
        if sums.kfold:
            add_product(sums.sketches.moment[fold], self._sketched(x, drift), columns, weight)
        if self._cross is not None:
            add_product(self._cross, columns_of(drift), columns, weight)
            return
        if self._reach is not None:
            drift = times_transposed(drift, self._reach)
        add_product(sums.further.moment, columns_of(drift), columns, weight)

    def _sketched(self, x: Tensor, drift: Tensor) -> Tensor:
        """Columns of the two targets' sketches, but for what does not depend on the rows."""
        own, reach = times_transposed(x, self._sketched_step), self._sketched_reach
        reached = drift if reach is None else times_transposed(drift, reach)
        return columns_of(torch.cat([own, reached], 1))

    @property
    def has_cross(self) -> bool:
        """Return whether products of inputs and their drift are kept until the task's end."""
        return self._cross is not None

    def flush(self) -> None:
        """Add the rows that wait."""
        for fold in range(len(self._waiting)):
            self._absorb(fold)

    def close(self) -> None:
        """End the task: what its weights would give follows from its second moments."""
        self.flush()
        sums, inputs = self.sums, self.sums.inputs
        gram, x, weight = self._before
        gram = mirror_lower(inputs.gram.sum(0).sub_(gram))
        x, weight = inputs.x - x, inputs.weight - weight
        moment, u = _outputs(self._step, self._shift, gram, x.sum(0), weight.sum())
        sums.own.moment.add_(moment)
        sums.own.u.add_(u)
        sums.own_square.add_((moment * self._step).sum() + self._shift @ u)
        drift = self._drift if self._reach is None else self._drift @ self._reach.T
        sums.further.u.add_(drift.sum(0))
        if self._cross is not None and self._reach is not None:
            sums.further.moment.addmm_(self._reach, self._cross)
        if sums.kfold:
            own = x @ self._step.T + weight[:, None] * self._shift
            both = torch.cat([sums.project(own.T), sums.project(drift.T)])
            sums.sketches.u.add_(both.T)
            shift = sums.project(self._shift)
            sums.sketches.moment[:, : len(shift)] += shift[:, None] * x[:, None]
        sums.refuse_not_finite(self._task)
