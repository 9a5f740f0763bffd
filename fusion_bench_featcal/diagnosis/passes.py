"""Passes of test items through a model and an expert side by side, block by block."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.drift import split_drift
from fusion_bench_featcal.engine.held_out import compared_rows
from fusion_bench_featcal.engine.problem import Problem
from fusion_bench_featcal.engine.rows import CountedRows, rows_of
from fusion_bench_featcal.engine.samples import (
    Batch,
    check_finite_inputs,
    find_rows,
    naming_task,
    to_device,
)
from fusion_bench_featcal.engine.visits import IMAGE_DIMS
from fusion_bench_featcal.families.base import call_block, capture_call, hidden_output

POSITIONS = ("all", "read")
"""Positions at which features are compared: all that count, or those whose final features are
read (CLIP's class token, positions of a text that predict a target)."""


@dataclass(frozen=True)
class Passes:
    """A model beside the experts.

    Attributes:
        problem: The model, the experts and how they are cut into blocks.
        positions: One of `POSITIONS`.
    """

    problem: Problem
    positions: str = "all"

    def drift(self, task: str, expert: nn.Module, batches: Iterable[Batch]) -> Tensor:
        """Means of `split_drift` over each item's positions, at every block's output.

        Args:
            task: The task, for messages.
            expert: Its expert, with all its weights.
            batches: The items.

        Returns:
            `[blocks, items, 9]` on the CPU, columns as `DriftParts`.
        """
        parts = []
        for batch in batches:
            with naming_task(task), torch.no_grad():
                parts.append(torch.stack(list(self._blocks(task, expert, batch))).cpu())
        return torch.cat(parts, dim=1)

    def _blocks(self, task: str, expert: nn.Module, batch: Batch) -> Iterator[Tensor]:
        problem = self.problem
        inputs = to_device(batch.inputs, problem.device)
        ends: tuple[Any, Any] = (None, None)
        for index, stage in enumerate(problem.stages):
            valid, _ = find_rows(problem, inputs, index)
            if index == 0 and valid is None:
                check_finite_inputs(inputs, task, batch.index)
            cal = problem.begin(problem.model, index, inputs, ends[0])
            exp = problem.begin(expert, index, inputs, ends[1])
            if self.positions == "read":
                valid = compared_rows(problem, index, inputs, replace(batch, cal=cal, valid=valid))
            for block in stage:
                crossed = self._crossed(block, expert, exp)
                hidden, cal = problem.step(problem.model, block, cal)
                wanted, exp = problem.step(expert, block, exp)
                images = problem.gives_images(block) and hidden.ndim == IMAGE_DIMS
                rows = [
                    rows_of(part.movedim(1, -1) if images else part, valid)
                    for part in (hidden, wanted, crossed)
                ]
                yield item_means(split_drift(*rows), batch.samples, valid)
            ends = (cal, exp) if problem.family.hands_on else (None, None)

    def _crossed(self, block: str, expert: nn.Module, call: Any) -> Tensor:
        """The model's block on the expert's input."""
        problem = self.problem
        if not problem.family.whole_model:
            return problem.step(problem.model, block, call)[0]
        with problem.autocast():  # a step would give the block the model's own features
            received = capture_call(expert, call, block)
            return hidden_output(call_block(problem.model, block, received))


def item_means(values: Tensor, items: int, counted: CountedRows | None) -> Tensor:
    """Means over each item's rows.

    Args:
        values: `[rows, k]`, of the rows that count, item by item.
        items: Number of items.
        counted: The rows that count; None: equally many of each item.

    Returns:
        `[items, k]`, in float64.
    """
    values = values.double()
    if counted is None or counted.index is None:
        return values.reshape(items, -1, values.shape[1]).mean(1)
    owner = counted.index // counted.shape[1:].numel()
    weights = torch.ones_like(values[:, :1])
    if counted.weights is not None:
        weights = counted.weights[:, None].to(values)
    sums = values.new_zeros(items, values.shape[1]).index_add_(0, owner, weights * values)
    return sums / values.new_zeros(items, 1).index_add_(0, owner, weights)
