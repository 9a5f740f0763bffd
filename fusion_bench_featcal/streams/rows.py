"""Positions of a batch that count, computed once and used at every block."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.modules.sites import matches
from fusion_bench_featcal.plurals import counted as counted_as


@dataclass(frozen=True)
class CountedRows:
    """Positions that count, if not all do. The mask is transferred to the host once.

    Attributes:
        shape: Shape of the mask, `[batch, positions]`.
        index: Positions that count in the flattened mask, or None for all.
    """

    shape: torch.Size
    index: Tensor | None = None

    @classmethod
    def of_mask(cls, mask: Tensor) -> "CountedRows":
        """Return the positions above 0 of a mask `[batch, positions]`.

        Raises:
            CalibrationError: If a sample has no counted position.
        """
        empty = (mask.flatten(1) > 0).any(1).logical_not().nonzero().flatten().tolist()
        if empty:  # it would feed noise to others, through attention
            raise CalibrationError(
                f"no position of {len(empty)} of {counted_as(len(mask), 'sample')} of a batch "
                f"counts (rows {empty[:5]}): they are all padding, or have no target (labels all "
                "-100). Check the data (modelpool.train_datasets, method.max_length), or set "
                "method.decoder_rows=all where targets are missing"
            )
        flat = mask.reshape(-1)
        index = (flat > 0).nonzero().flatten()
        return cls(mask.shape, None if len(index) == len(flat) else index)

    def of(self, features: Tensor) -> Tensor:
        """Return the rows of features `[..., d]` that count, `[n, d]`.

        Raises:
            CalibrationError: If the features have other positions than the mask.
        """
        if features.shape[:-1] not in (self.shape, (self.shape.numel(),)):
            raise CalibrationError(
                f"receives rows {tuple(features.shape[:-1])}, but padding is known for "
                f"{tuple(self.shape)}"
            )
        flat = features.reshape(-1, features.shape[-1])
        return flat if self.index is None else flat.index_select(0, self.index)


@dataclass(frozen=True)
class Rows:
    """Counted positions of a stage.

    Attributes:
        valid: Positions in the stage's hidden features, or None for all.
        other: Positions in modules with other inputs, by the end of their names.
    """

    valid: CountedRows | None = None
    other: Mapping[str, CountedRows | None] = field(default_factory=dict)

    def of(self, module: str) -> CountedRows | None:
        """Return the counted positions of a module's input, or None for all."""
        return next((rows for end, rows in self.other.items() if matches(module, end)), self.valid)


def rows_of(features: Tensor, counted: CountedRows | None) -> Tensor:
    """Return features `[..., d]` as rows `[n, d]`: counted ones, or all if there is no mask."""
    return features.reshape(-1, features.shape[-1]) if counted is None else counted.of(features)
