"""A merged model that is computed while it is read: task arithmetic, or an average of experts."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fusion_bench_featcal.core.finite import all_finite
from fusion_bench_featcal.experts.expert import LazyModel
from fusion_bench_featcal.experts.source import SourceView
from fusion_bench_featcal.files.json_files import digest_json

ENTRIES = 2**22
"""Largest number of entries of a tensor that are merged at once, in float32."""


class MergedOnRead(SourceView):
    """Weights of a merger, computed when a tensor is read.

    Task arithmetic is `W_base + scale sum_i (W_i - W_base)`, an average is `mean_i W_i`. Sums are
    in float32, with only some rows of each model in memory at once.
    """

    def __init__(
        self,
        reference: LazyModel,
        base: LazyModel,
        experts: Sequence[LazyModel],
        scale: float | None,
    ) -> None:
        """Refer to the models.

        Args:
            reference: The model with the names, shapes and dtypes of the merged one. Tensors of
                integers are taken from it, and tensors that another model lacks.
            base: The base.
            experts: The experts.
            scale: Scale of the sum of task vectors, or None for the experts' average.
        """
        super().__init__(reference.source)
        self._reference, self._base, self._experts, self._scale = reference, base, experts, scale
        models = base, *experts
        self._names = {
            key: name
            for name, key in reversed(reference.keys.items())
            if reference.dtype(name).is_floating_point and all(name in m.keys for m in models)
        }

    @property
    def digest(self) -> str:
        """Digest of the models and the scale."""
        models = self._reference, self._base, *self._experts
        return digest_json([self._scale, *(model.source.digest for model in models)])

    def tensor(self, name: str) -> Tensor:
        """Return one merged tensor."""
        model_name = self._names.get(name)
        if model_name is None:
            return super().tensor(name)
        merged = torch.empty(self.shape(name), dtype=self._reference.dtype(model_name))
        rows = merged.reshape(-1) if merged.ndim == 0 else merged
        step = max(1, ENTRIES // max(1, math.prod(rows.shape[1:])))
        for start in range(0, len(rows), step):
            self._merge(model_name, start, rows[start : start + step])
        if not all_finite(merged):
            for model in (self._base, *self._experts):
                model.stored(model_name)  # raises if this model has the NaN or infinity
        return merged

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return some rows of one merged tensor, and read only these."""
        model_name, shape = self._names.get(name), self.shape(name)
        if model_name is None or not shape:
            return super().rows(name, start, stop)
        rows = range(shape[0])[start:stop]
        merged = torch.empty((len(rows), *shape[1:]), dtype=self._reference.dtype(model_name))
        self._merge(model_name, start, merged)
        return merged

    def _merge(self, name: str, start: int, out: Tensor) -> None:
        """Merge some rows of a tensor into `out`."""

        def read(model: LazyModel) -> Tensor:
            rows = model.rows(name, start, start + len(out))
            return rows.to(out.dtype).float().reshape(out.shape)

        if self._scale is None:
            out.copy_(torch.stack([read(expert) for expert in self._experts]).mean(dim=0))
            return
        base = read(self._base)
        out.copy_(base + self._scale * sum(read(expert) - base for expert in self._experts))
