"""Sums over the rows of one task for one group of modules."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fusion_bench_featcal.core.float32_products import exact_products
from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.core.patches import Patches
from fusion_bench_featcal.core.solve import solve_dtype
from fusion_bench_featcal.modules.groups import Group, normalised
from fusion_bench_featcal.rules.norms import NormRows
from fusion_bench_featcal.rules.rule import GroupSums, Linear, Rule, Solved
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.rows import rows_of


class LinearRows:
    """Moments of the calibrated model's inputs `x` and of paired features `y`.

    `y` is the drift `x_exp - x`. If there are few outputs it is the expert's weight times the
    target's input, `W_i (x + alpha (x_exp - x))`, which costs less than `W_i` times sums of `x x'`.

    Attributes:
        expert: The expert's parameters.
        sums: The sums.
    """

    def __init__(self, group: Group, expert: nn.Module, rule: Rule, dtype: torch.dtype) -> None:
        """Start with no rows."""
        self.expert = group.linear(expert.get_parameter, dtype)
        self._group, self._rule = group, rule
        self._alpha = rule.mix_alpha if rule.runs_experts else 0.0
        width = sum(group.outputs) if group.has_few_outputs else group.inputs
        like = self.expert.weight
        self.sums = Moments.zeros(rule.folds, group.maps, group.inputs, width, like)

    def add(self, batch: Batch, inputs: list[Tensor]) -> None:
        """Add the rows of a batch after the expert's features were stored.

        Args:
            batch: The batch.
            inputs: Inputs of the group's modules in the calibrated model, one per call.

        Raises:
            CalibrationError: If the expert calls the modules another number of times.
        """
        group, rule = self._group, self._rule
        noted = [None] * len(inputs)
        if rule.runs_experts:
            noted = batch.noted.pop(group.name, [])
        if len(noted) != len(inputs):
            raise CalibrationError(
                f"ran {len(inputs)} times in the calibrated block and {len(noted)} in the expert's"
            )
        are_outputs = rule.notes_outputs and group.has_few_outputs
        for x, y in zip(inputs, noted, strict=True):
            rows = folded_rows(batch, group, x, y, folds=rule.folds, are_outputs=are_outputs)
            for fold, rows_x, rows_y, weights in rows:
                features = None if rows_y is None else self._features(rows_x, rows_y)
                self.sums.add(fold, rows_x, features, weights)

    def _features(self, x: Tensor, noted: Tensor) -> Tensor:
        """Return `y` for rows of `x` and stored features of the expert."""
        dtype = self.expert.weight.dtype
        x, noted = x.to(dtype), noted.to(dtype)
        if not self._group.has_few_outputs:
            return noted - x
        if self._rule.notes_outputs:
            return noted - self.expert.bias[0]
        with exact_products():  # TF32 rounding would not cancel against the anchor's
            return linear(torch.lerp(x, noted, self._alpha), self.expert.weight[0])

    @property
    def count(self) -> Tensor:
        """Return the number of rows, or the sum of their weights, a scalar."""
        return self.sums.count[:, 0].sum()

    def tensors(self) -> list[Tensor]:
        """Return the sums."""
        return self.sums.tensors()

    def finished(self) -> Moments:
        """Return the completed sums."""
        return self.sums.mirrored()


class AffineRows:
    """Sums over normalised inputs of one norm.

    Attributes:
        expert: The expert's parameters.
    """

    def __init__(
        self, group: Group, model: nn.Module, expert: nn.Module, dtype: torch.dtype
    ) -> None:
        """Start with no rows."""
        self.expert = group.linear(expert.get_parameter, dtype)
        self._site, self._module = group.sites[0], model.get_submodule(group.name)
        self._sums = NormRows(group.inputs, self.expert.weight)

    def add(self, batch: Batch, inputs: list[Tensor]) -> None:
        """Add the rows of a batch."""
        counted = batch.rows.of(self._site.name)
        for x in inputs:
            z = normalised(self._module, self._site, x)
            chosen = None if counted is None else counted[0]
            weights = None if chosen is None or chosen.is_table(z) else chosen.weights
            self._sums.add(rows_of(z, chosen), weights)

    @property
    def count(self) -> Tensor:
        """Return the number of rows, or the sum of their weights, a scalar."""
        return self._sums.sums[2, 0]

    def tensors(self) -> list[Tensor]:
        """Return the sums."""
        return self._sums.tensors()

    def finished(self) -> NormRows:
        """Return the sums."""
        return self._sums


class ChannelRows:
    """Sums over the inputs of a BatchNorm in one task."""

    def __init__(self, group: Group, model: nn.Module) -> None:
        """Start with no rows."""
        self._name = group.name
        like = model.get_buffer(f"{group.name}.running_mean")
        wide = solve_dtype(like.device)
        self.expert = Linear(like.new_zeros(1, 1, 0), like.new_zeros(1, 0))
        self._sums = like.new_zeros(3, group.inputs, dtype=wide)

    def add(self, batch: Batch, inputs: list[Tensor]) -> None:
        """Add a batch.

        Raises:
            CalibrationError: If only some positions count, because statistics include all.
        """
        if batch.rows.of(self._name) is not None:
            raise CalibrationError("is BatchNorm, and some positions are padding")
        for x in inputs:
            rows = x.movedim(1, -1).reshape(-1, x.shape[1]).to(self._sums.dtype)
            self._sums += torch.stack(
                [rows.sum(0), rows.square().sum(0), torch.full_like(rows[0], len(rows))]
            )

    @property
    def count(self) -> Tensor:
        """Return the number of rows, a scalar."""
        return self._sums[2, 0]

    def tensors(self) -> list[Tensor]:
        """Return the sums."""
        return [self._sums]

    def finished(self) -> Tensor:
        """Return means and mean squares by channel, `[2, d]`."""
        return self._sums[:2] / self._sums[2]


class StatisticsSums:
    """Running statistics of a BatchNorm for a mixture in which all tasks have equal weight.

    With `m_i` and `s_i` task i's mean and mean square, over N tasks, `mean = sum m_i / N` and
    `variance = sum s_i / N - mean^2`.
    """

    def __init__(self, group: Group, model: nn.Module) -> None:
        """Start with no task."""
        like = model.get_buffer(f"{group.name}.running_mean")
        self._sums = like.new_zeros(3, group.inputs, dtype=solve_dtype(like.device))

    def tensors(self) -> list[Tensor]:
        """Return the sums over tasks."""
        return [self._sums]

    def add(self, task: str, rows: Tensor, expert: Linear) -> dict[str, Tensor]:
        """Add a task's means and mean squares."""
        self._sums += torch.cat([rows, torch.ones_like(rows[:1])])
        return {}

    def solve(self) -> Solved:
        """Return the variance as the gain and the mean as the shift."""
        mean, square = self._sums[:2] / self._sums[2]
        variance = (square - mean.square()).clamp_min(0)
        return Solved(Linear(variance[None, None], mean[None]))


TaskRows = LinearRows | AffineRows | ChannelRows


def empty_rows(
    group: Group, model: nn.Module, expert: nn.Module, rule: Rule, dtype: torch.dtype
) -> TaskRows:
    """Return sums over no rows of one task.

    Args:
        group: The modules.
        model: The model that computes their inputs.
        expert: The task's expert.
        rule: The rule that calibrates them.
        dtype: Least precise dtype of the sums.
    """
    if group.kind == "batch_norm":
        return ChannelRows(group, model)
    if group.kind == "norm":
        return AffineRows(group, model, expert, dtype)
    return LinearRows(group, expert, rule, dtype)


def empty_sums(
    group: Group,
    model: nn.Module,
    base: Callable[[str], Tensor] | None,
    rule: Rule,
    dtype: torch.dtype,
) -> GroupSums:
    """Return sums over no task.

    Args:
        group: The modules.
        model: The model that contains them.
        base: Returns a parameter of the base model by name, or None without a base.
        rule: The rule that calibrates them.
        dtype: Least precise dtype of the sums.
    """
    if group.kind == "batch_norm":
        return StatisticsSums(group, model)
    merged = group.linear(model.get_parameter, dtype)
    return rule.sums(group, merged, None if base is None else group.linear(base, dtype))


def sums_of(group: Group, model: nn.Module, rule: Rule, dtype: torch.dtype) -> int:
    """Return the bytes of a group's sums over tasks and over one task's rows.

    Args:
        group: The modules.
        model: A model with these modules, on the meta device.
        rule: The rule that calibrates them.
        dtype: Least precise dtype of the sums.
    """
    rows = empty_rows(group, model, model, rule, dtype)
    sums = empty_sums(group, model, model.get_parameter, rule, dtype)
    return sum({id(t): t.nbytes for t in [*sums.tensors(), *rows.tensors()]}.values())


def folded_rows(
    batch: Batch,
    group: Group,
    x: Tensor,
    y: Tensor | None = None,
    *,
    folds: int = 1,
    are_outputs: bool = False,
) -> Iterator[tuple[int, Tensor, Tensor | None, Tensor | None]]:
    """Divide the rows of one batch by fold: sample `i` of a task is in fold `i mod F`.

    Args:
        batch: The batch.
        group: The modules.
        x: Inputs of the modules.
        y: Further features of the same samples.
        folds: Number of folds `F`.
        are_outputs: Whether `y` are outputs of the modules rather than inputs.

    Yields:
        A fold, its rows `[n, d]` of `x` and of `y`, and their weights, None if all are 1.

    Raises:
        CalibrationError: If padding or folds cannot be identified in the inputs.
    """
    patches, counted = group.sites[0].patches, batch.rows.of(group.name)
    samples = batch.rows.samples
    if patches is not None and counted is not None:
        raise CalibrationError("is a convolution, whose patches no mask of positions fits")
    if folds > 1 and counted is not None and counted[0].is_table(x):
        raise CalibrationError(
            "receives a table of relative positions, which method=featcal/plus does not support"
        )
    for number in range(folds):
        of_x, of_y = (
            part if part is None or folds == 1 else by_sample(part, samples)[number::folds]
            for part in (x, y)
        )
        assert of_x is not None
        if not len(of_x):
            continue
        fold = (batch.start + number) % folds
        if patches is not None:
            for rows_x, rows_y in _unfolded(of_x, of_y, patches, are_outputs):
                yield fold, rows_x, rows_y, None
            continue
        chosen = None if counted is None else counted[number + 1 if folds > 1 else 0]
        weights = None if chosen is None or chosen.is_table(of_x) else chosen.weights
        yield fold, rows_of(of_x, chosen), None if of_y is None else rows_of(of_y, chosen), weights


def by_sample(rows: Tensor, samples: int) -> Tensor:
    """Return flattened rows `[samples * n, d]` as `[samples, n, d]`, other rows unchanged."""
    is_flat = rows.ndim == 2 and len(rows) != samples and len(rows) % samples == 0
    return rows.unflatten(0, (samples, -1)) if is_flat else rows


def _unfolded(
    x: Tensor, y: Tensor | None, patches: Patches, are_outputs: bool
) -> Iterator[tuple[Tensor, Any]]:
    """Unfold a convolution's inputs, a few samples at a time."""
    if y is None or not are_outputs:
        for pieces in patches.pieces([x] if y is None else [x, y]):
            rows = [piece.flatten(0, 1) for piece in pieces]
            yield rows[0], rows[1] if len(rows) > 1 else None
        return
    done = 0
    for (piece,) in patches.pieces([x]):
        of_y = y[done : done + len(piece)]
        yield piece.flatten(0, 1), of_y.flatten(2).mT.flatten(0, 1)
        done += len(piece)
