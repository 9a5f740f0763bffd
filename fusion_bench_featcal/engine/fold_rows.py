"""Rows of a batch's features by fold: a sample's rows are all in one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion_bench_featcal.engine.rows import CountedRows
from fusion_bench_featcal.engine.samples import Batch

FOLDS = 4
"""Number of folds that samples are dealt out to."""


@dataclass(frozen=True)
class FoldRows:
    """Rows of a batch that count, by fold.

    Attributes:
        samples: Number of samples in the batch.
        offsets: Number of each fold's first sample in the batch; further ones follow in steps of
            the number of folds.
        counted: The rows that count; None: all.
        indices: Positions of each fold's rows among those that count; empty where all count.
    """

    samples: int
    offsets: tuple[int, ...]
    counted: CountedRows | None
    indices: tuple[Tensor, ...]

    @classmethod
    def of(cls, batch: Batch, counted: CountedRows | None, folds: int) -> "FoldRows":
        """Deal a batch's samples out to folds in turn, as they are numbered in their task.

        The host looks at a mask once for each batch of a run.
        """
        if id(counted) not in batch.folds:
            batch.folds[id(counted)] = cls._found(batch, counted, folds)
        return batch.folds[id(counted)]

    @classmethod
    def _found(cls, batch: Batch, counted: CountedRows | None, folds: int) -> "FoldRows":
        offsets = tuple((k - batch.start) % folds for k in range(folds))
        if counted is None or (counted.index is None and counted.weights is None):
            return cls(batch.samples, offsets, None, ())
        rows = counted.index
        if rows is None:
            rows = torch.arange(counted.count, device=counted.mask().device)
        positions = counted.shape.numel() // batch.samples
        fold = (rows // positions + batch.start) % folds
        indices = tuple((fold == k).nonzero().flatten() for k in range(folds))
        return cls(batch.samples, offsets, counted, indices)

    def select(self, features: Tensor, fold: int) -> Tensor:
        """One fold's rows of features, `[n, d]`, or `[samples, rows, d]`, a view, where all count.

        Args:
            features: `[..., d]`: as many rows of each sample, one sample's after the other's.
            fold: The fold.

        Raises:
            ValueError: If it cannot be told whose the rows are.
        """
        if self.counted is not None:
            return self.counted.of(features).index_select(0, self.indices[fold])
        rows = features.numel() // features.shape[-1]
        if rows % self.samples:
            raise ValueError(f"{rows} rows are not of {self.samples} samples alike")
        by_sample = features.reshape(self.samples, -1, features.shape[-1])
        return self.of_samples(by_sample, fold)

    def of_samples(self, features: Tensor, fold: int) -> Tensor:
        """Select the values of one fold's samples from `[samples, ...]`."""
        return features[self.offsets[fold] :: len(self.offsets)]

    def weights(self, fold: int) -> Tensor | None:
        """Weights of one fold's rows; None: all weigh 1."""
        if self.counted is None or self.counted.weights is None:
            return None
        return self.counted.weights.index_select(0, self.indices[fold])
