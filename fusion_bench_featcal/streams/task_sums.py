"""Sums over the rows of one task: inputs of a group of modules, and drifts after a block."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fusion_bench_featcal.core.finite import read_back
from fusion_bench_featcal.core.float32_products import exact_products
from fusion_bench_featcal.core.linear import Linear, at_least_float32
from fusion_bench_featcal.core.moments import Moments
from fusion_bench_featcal.core.solve import solve_dtype
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.modules.groups import Group, normalised
from fusion_bench_featcal.rules.norms import NormMoments
from fusion_bench_featcal.rules.rule import Rule
from fusion_bench_featcal.streams.batch import Batch, Positions, rows_of


class LinearTaskSums:
    """Moments of the calibrated model's inputs `x` and of paired features `y`.

    `y` is the drift `x_exp - x`. If there are few outputs it is the expert's weight times the
    target's input, `W_i (x + alpha (x_exp - x))`, which costs less than `W_i` times sums of `x x'`.

    Attributes:
        expert: The expert's parameters.
        sums: The sums and, if the rule holds samples out, the same of held-out samples.
    """

    def __init__(self, group: Group, expert: Linear, rule: Rule) -> None:
        """Start with no rows."""
        self.expert, self._group, self._alpha = expert, group, rule.mix_alpha
        width = sum(group.out_features) if group.has_few_outputs else group.in_features
        weight = expert.weight
        self.sums = [
            Moments.zeros(group.in_features, width, weight) for _ in range(1 + rule.holds_out)
        ]

    def add(self, batch: Batch, x: Tensor) -> None:
        """Add the rows of a batch after the expert's features were noted.

        Args:
            batch: The batch.
            x: Input of the group's modules in the calibrated model.
        """
        expert_x = batch.expert_inputs.pop(self._group.name) if self._alpha > 0 else None
        counted = batch.positions.of(self._group.name)
        for samples, rows, expert_rows in paired_features(batch, self._group, x, expert_x):
            pair = weights = None
            if not self._group.convolves:  # patches are no positions
                weights = batch.positions.weights_of(self._group.name, rows)
            if len(self.sums) > 1:
                pair = batch.fitted_and_held_out(samples, counted, rows)
            self.add_rows(rows, expert_rows, pair, weights)

    def add_rows(
        self,
        x: Tensor,
        expert_x: Tensor | None,
        pair: Sequence[Tensor] | None,
        weights: Tensor | None = None,
    ) -> None:
        """Add rows.

        Args:
            x: Those of the calibrated model, `[n, d]`.
            expert_x: Those of the expert, or None if it does not run.
            pair: Numbers of the fitted rows and of the held-out ones, or None if all are fitted.
            weights: Weights of the rows, `[n]`, or None if they are equal.
        """
        features = None if expert_x is None else self._features(x, expert_x)
        if pair is None:
            self.sums[0].add(x, features, weights)
            return
        for sums, chosen in zip(self.sums, pair, strict=True):
            parts = (None if part is None else part[chosen] for part in (features, weights))
            sums.add(x[chosen], *parts)

    def _features(self, x: Tensor, expert_x: Tensor) -> Tensor:
        """Return `y` for rows of the model and of the expert."""
        dtype = self.expert.weight.dtype
        x, expert_x = x.to(dtype), expert_x.to(dtype)
        if not self._group.has_few_outputs:
            return expert_x - x
        with exact_products():  # TF32 rounding would not cancel against the anchor's
            return linear(torch.lerp(x, expert_x, self._alpha), self.expert.weight)

    def finalize(self) -> list[Moments]:
        """Return the completed sums, for which the last rows are multiplied."""
        return [sums.mirrored() for sums in self.sums]


class NormTaskSums:
    """Sums over normalised inputs of one norm.

    Attributes:
        expert: The expert's parameters.
        sums: The sums.
    """

    def __init__(
        self, group: Group, model: nn.Module, expert: nn.Module, dtype: torch.dtype
    ) -> None:
        """Start with no rows."""
        self.expert = group.stack_weights(expert.get_parameter, dtype)
        self._site, self._module = group.sites[0], model.get_submodule(group.name)
        self.sums = [NormMoments(group.in_features, self.expert.weight)]

    def add(self, batch: Batch, x: Tensor) -> None:
        """Add the rows of a batch."""
        z = normalised(self._module, self._site, x)
        self.sums[0].add(rows_of(z, batch.positions.of(self._site.name)))

    def finalize(self) -> list[NormMoments]:
        """Return the sums."""
        return self.sums


class StatisticsTaskSums(NormTaskSums):
    """Sums over inputs of one BatchNorm. Its parameters are not calibrated."""

    def __init__(self, group: Group, model: nn.Module) -> None:
        """Start with no rows."""
        mean = model.get_buffer(f"{group.name}.running_mean")
        empty = mean.new_empty(0, dtype=solve_dtype(mean.device))
        self.expert, self._site = None, group.sites[0]
        self.sums = [NormMoments(group.in_features, empty)]

    def add(self, batch: Batch, x: Tensor) -> None:
        """Add the rows of a batch.

        Raises:
            CalibrationError: If only some positions count, because statistics include all.
        """
        if batch.positions.of(self._site.name) is not None:
            raise CalibrationError("it is a BatchNorm, but some positions are padding")
        self.sums[0].add(x.movedim(1, -1).reshape(-1, x.shape[1]))


TaskSums = LinearTaskSums | NormTaskSums


def empty_task_sums(
    group: Group, model: nn.Module, expert: nn.Module, rule: Rule, dtype: torch.dtype
) -> TaskSums:
    """Return sums over no rows of one task.

    Args:
        group: The modules.
        model: The model that computes their inputs.
        expert: The task's expert.
        rule: The rule that calibrates them.
        dtype: Least precise dtype of the sums.
    """
    if group.kind == "statistics":
        return StatisticsTaskSums(group, model)
    if group.kind == "norm":
        return NormTaskSums(group, model, expert, dtype)
    return LinearTaskSums(group, group.stack_weights(expert.get_parameter, dtype), rule)


def paired_features(
    batch: Batch, group: Group, x: Tensor, y: Tensor | None = None
) -> Iterator[tuple[range, Tensor, Any]]:
    """Yield samples of a batch, and the rows `[n, d]` of a group's inputs that count.

    The rows are those of the model, and of the expert if its inputs are given. Patches of a
    convolution come a few samples at a time.

    Raises:
        CalibrationError: If padding cannot be identified in the inputs.
    """
    patches, counted = group.sites[0].patches, batch.positions.of(group.name)
    if patches is None:
        everyone = range(batch.samples)
        yield everyone, rows_of(x, counted), None if y is None else rows_of(y, counted)
        return
    if counted is not None:
        raise CalibrationError("it is a convolution, whose patches do not fit a padding mask")
    start = 0
    for pieces in patches.pieces([x] if y is None else [x, y]):
        rows, stop = [piece.flatten(0, 1) for piece in pieces], start + len(pieces[0])
        yield range(start, stop), rows[0], rows[1] if len(rows) > 1 else None
        start = stop


United = Callable[[dict[str, Any]], dict[str, Any]]


class DriftLog:
    """Sums of drifts at the current block, by task.

    Attributes:
        sums: Task -> result of `sums_of` and the number of rows, `[4]`.
        experts: Task -> sums of the expert's features, after the last block.
    """

    def __init__(self, *, channels_first: bool = False) -> None:
        """Start with no sums.

        Args:
            channels_first: Whether features of four dimensions are images `[batch, d, h, w]`.
        """
        self.sums: dict[str, Tensor] = {}
        self.experts: dict[str, Moments] = {}
        self._channels_first = channels_first

    def add(
        self, task: str, batch: Batch, hidden: Tensor, expert: Tensor, *, is_last: bool
    ) -> None:
        """Add a batch's features after a block.

        Args:
            task: The task.
            batch: The batch.
            hidden: The model's features.
            expert: The expert's features.
            is_last: Whether it is the last block before the tail.
        """
        with error_context("a block's output", task=task):
            rows = [self._rows(features, batch.positions.valid) for features in (hidden, expert)]
        new = sums_of(*rows).to(solve_dtype(hidden.device))
        new = torch.cat([new, new.new_tensor([rows[0].shape[:-1].numel()])])
        self.sums[task] = self.sums[task].add_(new) if task in self.sums else new
        if is_last:
            flat = rows[1].reshape(-1, rows[1].shape[-1])
            if task not in self.experts:
                self.experts[task] = Moments.zeros(flat.shape[-1], 0, self.sums[task])
            self.experts[task].add(flat)

    def _rows(self, hidden: Tensor, counted: Positions | None) -> Tensor:
        if self._channels_first and hidden.ndim == 4:
            return rows_of(hidden.movedim(1, -1), counted)
        return hidden if counted is None else counted.of(hidden)

    def tensors(self, task: str, device: torch.device) -> list[Tensor]:
        """Return a task's sums, to which sums of other processes may be added in place.

        They are 0 if this process has no samples of the task.
        """
        zeros = torch.zeros(4, dtype=solve_dtype(device), device=device)
        tensors = [self.sums.setdefault(task, zeros)]
        if self.experts:  # after the last block, which all samples run
            width = len(next(iter(self.experts.values())).gram)
            moments = self.experts.setdefault(task, Moments.zeros(width, 0, zeros))
            tensors += moments.mirrored().tensors()
        return tensors

    def records(self, tasks: Sequence[str], gather_dict: United) -> dict[str, dict[str, Any]]:
        """Return each task's metrics after the block, and reset the sums.

        Args:
            tasks: The tasks whose sums are complete in this process.
            gather_dict: Returns the items of all processes.

        Returns:
            Task -> mean L2 drift over rows, root mean square drift relative to the expert's
            features, and number of rows. Behind the last block also the distance, in the variance
            that one direction of the expert's features has, `variance_per_direction`, or None if
            they are equal.
        """
        completed = [task for task in tasks if task in self.experts]
        spreads = {task: variance_per_direction(self.experts[task]) for task in completed}
        numbers = iter(read_back([*map(self.sums.__getitem__, tasks), *spreads.values()]))
        read = {task: [*islice(numbers, 4)] for task in tasks}
        for task in spreads:
            read[task].append(next(numbers))
        self.sums, self.experts = {}, {}
        records: dict[str, dict[str, Any]] = {}
        for task, (norms, squares, expert, rows, *spread) in gather_dict(read).items():
            relative = (squares / expert) ** 0.5 if expert > 0 else None
            records[task] = {"drift": norms / rows, "relative_drift": relative, "rows": int(rows)}
            for variance in spread:
                records[task]["distance"] = squares / rows / variance if variance > 0 else None
        return records


def variance_per_direction(features: Moments) -> Tensor:
    """Return the variance of features in one of the directions in which they vary, a scalar.

    With their covariance C it is `tr C^2 / tr C`: `(tr C)^2 / tr C^2` is the number of such
    directions. It is 0 if all rows are equal.
    """
    means = features.mirrored().means(centred=True)
    variance = means.gram.square().sum() / means.gram.diagonal().sum()
    return torch.where(features.varies(means), variance, 0.0)


def sums_of(features: Tensor, expert: Tensor) -> Tensor:
    """Return sums over rows, `[3]`.

    The entries are: norm of the drift, its square, squares of the expert. The result stays on the
    device.

    Args:
        features: Features of a model, `[..., d]`.
        expert: Features of the expert for the same rows, `[..., d]`.
    """
    features, expert = at_least_float32(features), at_least_float32(expert)
    norms = torch.linalg.vector_norm(features - expert, dim=-1)
    return torch.stack([norms.sum(), (norms * norms).sum(), (expert * expert).sum()])
