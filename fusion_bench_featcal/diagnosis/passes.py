"""Passes of test items through a model and an expert side by side, block by block."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.diagnosis.drift import split_drift
from fusion_bench_featcal.families.base import call_block, capture_call, hidden_output
from fusion_bench_featcal.methods.final_features import final_rows
from fusion_bench_featcal.modules.models import gives_images
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.inputs import check_finite_inputs, to_device
from fusion_bench_featcal.streams.rows import CountedRows, rows_of
from fusion_bench_featcal.streams.runner import Runner
from fusion_bench_featcal.streams.samples import naming_task

POSITIONS = ("all", "read")
"""Positions at which features are compared: all that count, or those whose final features are
read (CLIP's class token, positions of a text that predict a target)."""


@dataclass(frozen=True)
class Passes:
    """A model beside the experts.

    Attributes:
        model: The model.
        runner: Runs blocks of models.
        settings: `decoder_rows` is used.
        positions: One of `POSITIONS`.
    """

    model: nn.Module
    runner: Runner
    settings: FeatCalSettings
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
        for number, batch in enumerate(batches):
            with naming_task(task), torch.no_grad():
                blocks = self._blocks(task, number, expert, batch)
                parts.append(torch.stack(list(blocks)).cpu())
        return torch.cat(parts, dim=1)

    def _blocks(self, task: str, number: int, expert: nn.Module, batch: Batch) -> Iterator[Tensor]:
        model, runner = self.model, self.runner
        inputs = to_device(batch.inputs, runner.device)
        calls: tuple[Any, Any] = (None, None)
        for index, stage in enumerate(runner.stages):
            counted = runner.rows(inputs, index, 1).counted
            if index == 0 and counted is None:
                check_finite_inputs(inputs, task, number)
            cal = runner.begin(model, inputs, index, calls[0])
            exp = runner.begin(expert, inputs, index, calls[1])
            if self.positions == "read" and index == len(runner.stages) - 1:
                counted = self._read(inputs, cal)
            for block in stage:
                crossed = self._crossed(block, expert, exp)
                hidden, cal = runner.step(model, block, cal)
                target, exp = runner.step(expert, block, exp)
                images = gives_images(model.get_submodule(block)) and hidden.ndim == 4
                rows = [
                    rows_of(part.movedim(1, -1) if images else part, counted)
                    for part in (hidden, target, crossed)
                ]
                yield item_means(split_drift(*rows), batch.samples, counted)
            calls = cal, exp

    def _read(self, inputs: Any, call: Any) -> CountedRows | None:
        """Return the positions of the last stage whose final features are read; None: all."""
        hidden, read = getattr(call, "hidden", None), None
        if isinstance(hidden, Tensor):
            read = self.runner.family.closing_rows(self.model, hidden)
        if read is not None:
            return CountedRows.of_weights(read)
        return final_rows(self.model, self.runner.family, self.settings, inputs)

    def _crossed(self, block: str, expert: nn.Module, call: Any) -> Tensor:
        """Return the output of the model's block on the expert's input."""
        runner = self.runner
        if not runner.family.whole_model:
            return runner.step(self.model, block, call)[0]
        with runner.autocast():  # a step would run the block on the model's features
            received = capture_call(expert, call, block)
            return hidden_output(call_block(self.model, block, received))


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
