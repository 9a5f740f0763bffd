"""Distance between the features of model and experts, block by block (Eq. 2)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.core.finite import read_back
from fusion_bench_featcal.core.linear import at_least_float32
from fusion_bench_featcal.core.solve import solve_dtype
from fusion_bench_featcal.errors.place import at
from fusion_bench_featcal.streams.batch import Batch, Positions, rows_of

Gather = Callable[[Any], list[Any]]


class DriftLog:
    """Sums of drifts at the current block, by task.

    Attributes:
        sums: Task -> result of `sums_of`, `[3]`.
        rows: Task -> number of rows.
    """

    def __init__(self, *, channels_first: bool = False) -> None:
        """Start with no sums.

        Args:
            channels_first: Whether features of four dimensions are images `[batch, d, h, w]`.
        """
        self.sums: dict[str, Tensor] = {}
        self.rows: dict[str, int] = {}
        self._channels_first = channels_first

    def add(self, task: str, batch: Batch, hidden: Tensor, expert: Tensor) -> None:
        """Add a batch's features behind a block.

        Args:
            task: The task.
            batch: The batch.
            hidden: The model's features.
            expert: The expert's features.
        """
        with at("a block's output", task=task):
            rows = [self._rows(features, batch.positions.valid) for features in (hidden, expert)]
        new, wide = sums_of(*rows), solve_dtype(hidden.device)
        self.sums[task] = self.sums[task].add_(new) if task in self.sums else new.to(wide)
        self.rows[task] = self.rows.get(task, 0) + rows[0].shape[:-1].numel()

    def _rows(self, hidden: Tensor, counted: Positions | None) -> Tensor:
        if self._channels_first and hidden.ndim == 4:
            return rows_of(hidden.movedim(1, -1), counted)
        return hidden if counted is None else counted.of(hidden)

    def records(self, gather: Gather) -> dict[str, dict[str, Any]]:
        """Return each task's figures behind the block, and reset the sums.

        Args:
            gather: Returns the values of all processes.

        Returns:
            Task -> mean L2 drift over rows, root mean square drift relative to the expert's
            features, and number of rows.
        """
        numbers = iter(read_back(list(self.sums.values())))
        read = {task: [next(numbers) for _ in range(3)] + [self.rows[task]] for task in self.sums}
        self.sums, self.rows = {}, {}
        records: dict[str, dict[str, Any]] = {}
        for of_process in gather(read):
            for task, (norms, squares, expert, rows) in of_process.items():
                relative = (squares / expert) ** 0.5 if expert > 0 else None
                records[task] = {"drift": norms / rows, "relative_drift": relative}
                records[task]["rows"] = rows
        return records


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
