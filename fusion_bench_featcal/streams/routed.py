"""Rows of one task that enter a mixture, and the routed experts that they are sent to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.streams.batch import Batch, rows_of
from fusion_bench_featcal.streams.storage import tree_map


@dataclass(frozen=True)
class RoutedRows:
    """Rows of counted positions that enter a mixture: of a batch, or of all batches of a task.

    Attributes:
        x: Rows in the calibrated model, `[n, d]`.
        slots: Numbers of the routed experts that it sends them to, `[n, k]`.
        expert_x: Rows in the expert, `[n, d]`, or None if experts do not run.
        held_out: Whether rows are held out to choose ridges, bool `[n]`, or None.
        weights: Weights of the rows, `[n]`, or None if they are equal.
    """

    x: Tensor
    slots: Tensor
    expert_x: Tensor | None
    held_out: Tensor | None
    weights: Tensor | None

    @classmethod
    def from_batch(
        cls, batch: Batch, mixture: str, x: Tensor, slots: Tensor, expert_x: Tensor | None
    ) -> "RoutedRows":
        """Return the rows of a batch, of whose positions some count. All are `[positions, ...]`."""
        counted, held_out = batch.positions.of(mixture), None
        rows = rows_of(x, counted)
        if batch.held_out is not None:
            _, numbers = batch.fitted_and_held_out(range(batch.samples), counted, rows)
            held_out = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
            held_out[numbers] = True
        expert_rows = None if expert_x is None else rows_of(expert_x, counted)
        weights = batch.positions.weights_of(mixture, rows)
        return cls(rows, rows_of(slots, counted), expert_rows, held_out, weights)

    @classmethod
    def joined(cls, batches: Sequence["RoutedRows"]) -> "RoutedRows":
        """Return the rows of several batches, one after the other."""

        def join(name: str) -> Any:
            tensors = [getattr(batch, name) for batch in batches]
            return None if tensors[0] is None else torch.cat(tensors)

        return cls(*map(join, cls.__match_args__))

    def by_slot(self, count: int) -> Sequence[Tensor]:
        """Return the numbers of the rows that are sent to each of so many routed experts."""
        chosen = self.slots.flatten()
        rows = chosen.argsort(stable=True) // self.slots.shape[1]
        # Tokens that are sent nowhere have the number after the last one.
        sizes = chosen.bincount(minlength=count + 1).tolist()
        return rows.split(sizes)[:count]

    def selected(self, numbers: Tensor, device: torch.device) -> "RoutedRows":
        """Return some rows, on a device."""
        return tree_map(self, Tensor, lambda tensor: tensor[numbers].to(device))

    @property
    def fitted_and_held_out(self) -> tuple[Tensor, Tensor] | None:
        """Numbers of the fitted rows and of the held-out ones, or None if none are held out."""
        if self.held_out is None:
            return None
        return (~self.held_out).nonzero().flatten(), self.held_out.nonzero().flatten()
