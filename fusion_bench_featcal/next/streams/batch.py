"""A batch of samples on its way through the blocks, and the rows of it that count."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fusion_bench_featcal.engine.modules import matches
from fusion_bench_featcal.engine.rows import CountedRows, rows_of
from fusion_bench_featcal.next.modules.groups import Group

Counted = tuple[CountedRows, ...]
"""Positions that count: all of a batch, and, with several folds, those of each fold's samples."""


@dataclass(frozen=True)
class Rows:
    """Positions that count in a stage.

    Attributes:
        valid: Those of the stage's hidden features; None: all.
        other: Those of modules that receive other rows, by the end of their names.
        compared: Those of the stage's final features that are read; None: all.
    """

    valid: Counted | None = None
    other: Mapping[str, Counted | None] = field(default_factory=dict)
    compared: CountedRows | None = None

    @property
    def counted(self) -> CountedRows | None:
        """Return the positions of the stage's hidden features that count; None: all."""
        return None if self.valid is None else self.valid[0]

    def of(self, module: str) -> Counted | None:
        """Return the positions that count in a module's input; None: all."""
        return next((rows for end, rows in self.other.items() if matches(module, end)), self.valid)


@dataclass
class Batch:
    """Samples that run together.

    Attributes:
        inputs: The model's inputs; None once the last stage has begun.
        samples: Number of samples; 0 for changed copies of others.
        start: Number of the task's samples before it.
        is_held_out: Whether it takes no part in the sums.
        cal: Input of the calibrated model's next block.
        exp: Input of the expert's next block; None where experts do not run.
        merged: Input of the merged model's next block, of held-out batches.
        rows: Positions that count in the stage.
        noted: The expert's features at modules that are yet to be solved, one per call: inputs, or
            outputs if the rule notes these.
    """

    inputs: Any
    samples: int
    start: int = 0
    is_held_out: bool = False
    cal: Any = None
    exp: Any = None
    merged: Any = None
    rows: Rows = field(default_factory=Rows)
    noted: dict[str, list[Tensor]] = field(default_factory=dict)


def counted_by_fold(mask: Tensor, folds: int, *, has_tables: bool) -> Counted:
    """Return the positions that count by a mask `[batch, positions]`, divided by fold.

    Raises:
        CalibrationError: If an entry is negative or not finite, or a sample has no position.
    """
    counted = CountedRows.of_mask(mask, has_tables=has_tables)
    parts = range(folds if folds > 1 else 0)
    return (counted, *(CountedRows.of_weights(mask[part::folds]) for part in parts))


def folded_rows(
    x: Tensor,
    y: Tensor | None,
    group: Group,
    counted: Counted | None,
    *,
    start: int,
    folds: int,
) -> Iterator[tuple[int, Tensor, Tensor | None, Tensor | None]]:
    """Divide the rows of one batch by fold: sample `i` of a task is in fold `i mod F`.

    Args:
        x: Inputs of a group.
        y: Further features of the same samples: inputs, or outputs if these were noted.
        group: The group.
        counted: Positions that count; None: all.
        start: Number of the first sample.
        folds: Number of folds `F`.

    Yields:
        A fold, its rows `[n, d]` of `x` and of `y`, and their weights (None: all 1).
    """
    for part in range(folds):
        every = slice(part, None, folds)
        of_x, of_y = x if folds == 1 else x[every], y if y is None or folds == 1 else y[every]
        if not len(of_x):
            continue
        fold = (start + part) % folds
        if group.sites[0].patches is not None:
            for rows_x, rows_y in _patches(of_x, of_y, group):
                yield fold, rows_x, rows_y, None
            continue
        chosen = None if counted is None else counted[part + 1 if folds > 1 else 0]
        weights = None if chosen is None or chosen.is_table(of_x) else chosen.weights
        yield fold, rows_of(of_x, chosen), None if of_y is None else rows_of(of_y, chosen), weights


def _patches(x: Tensor, y: Tensor | None, group: Group) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Unfold a convolution's inputs, some samples at a time."""
    patches = group.sites[0].patches
    assert patches is not None
    if y is None or y.shape == x.shape:
        for pieces in patches.pieces([x] if y is None else [x, y]):
            rows = [piece.flatten(0, 1) for piece in pieces]
            yield rows[0], rows[1] if len(rows) > 1 else None
        return
    done = 0
    for (piece,) in patches.pieces([x]):
        of_y = y[done : done + len(piece)]
        yield piece.flatten(0, 1), of_y.flatten(2).mT.flatten(0, 1)
        done += len(piece)
