"""Merged models that are computed while they are read: task arithmetic, an average, or ASWUDI."""

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from fusion_bench_featcal.core.finite import all_finite
from fusion_bench_featcal.core.solve import solve_dtype
from fusion_bench_featcal.core.swudi import merge_task_vectors
from fusion_bench_featcal.experts.expert import LazyModel
from fusion_bench_featcal.experts.source import SourceView
from fusion_bench_featcal.families import Family, stages_of
from fusion_bench_featcal.files.json_files import digest_json
from fusion_bench_featcal.modules.block_modules import find_all_modules
from fusion_bench_featcal.modules.sites import Site

ENTRIES = 2**22
"""Largest number of entries of a tensor that are merged at once, in float32."""
LOW_RANK = 0.035
"""Share of directions of task vectors below which ASWUDI harms experts. Experts that were tuned
whole have at least 0.068 on the bundled suites, and LoRA experts at most 0.016, also after rounding
to bfloat16 (benchmarks/results/without_samples.md)."""
SAMPLED_MATRICES = 8


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


class SwudiOnRead(MergedOnRead):
    """The experts' average, with each matrix of the blocks merged by ASWUDI when it is read.

    Only one matrix of the base and of one expert is in memory at a time, in float64. Routed experts
    are merged one by one.
    """

    def __init__(
        self,
        reference: LazyModel,
        base: LazyModel,
        experts: Sequence[LazyModel],
        family: Family,
        device: torch.device,
    ) -> None:
        """Refer to the models.

        Args:
            reference: As for `MergedOnRead`.
            base: The base.
            experts: The experts.
            family: The family of the models, which knows their blocks.
            device: Device of the computation.
        """
        super().__init__(reference, base, experts, None)
        structure, self._device = reference.structure, device
        blocks = find_all_modules(structure, stages_of(family, structure), calibrate_norm=False)
        sites = [site for modules in blocks.values() for site in modules.all_sites]
        self._sites = {
            reference.keys[site.weight_name]: site
            for site in sites
            if site.kind == "linear" and site.patches is None  # BatchNorms undo a scale
        }

    @property
    def digest(self) -> str:
        """Digest of the models and the method."""
        return digest_json(["swudi", super().digest])

    def tensor(self, name: str) -> Tensor:
        """Return one merged tensor."""
        site = self._sites.get(name)
        if site is None:
            return super().tensor(name)
        return self.rows(name, 0, self.shape(name)[0]) if site.is_stacked else self._merged(site)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return some rows of one merged tensor. A matrix is merged as a whole."""
        site = self._sites.get(name)
        if site is None:
            return super().rows(name, start, stop)
        if not site.is_stacked:
            return self._merged(site)[start:stop]
        slots = range(self.shape(name)[0])[start:stop]
        return torch.stack([self._merged(site, slot) for slot in slots])

    def directions(self, expert: LazyModel) -> float:
        """Return the share of singular directions with 90 % of the energy of task vectors.

        This is the median over some matrices, evenly spread over the model, that differ from the
        base's. LoRA experts have few directions.
        """
        shares = []
        sites = [site for site in self._sites.values() if not site.is_stacked]
        for site in sites[:: max(1, len(sites) // SAMPLED_MATRICES)][:SAMPLED_MATRICES]:
            vector = self._read(expert, site) - self._read(self._base, site)
            energies = torch.linalg.svdvals(vector).square()
            if energies.any():
                missing = energies.cumsum(0) < 0.9 * energies.sum()
                shares.append((int(missing.sum()) + 1) / len(energies))
        return statistics.median(shares) if shares else 1.0

    def _merged(self, site: Site, slot: int | None = None) -> Tensor:
        """Merge one matrix, or that of one routed expert."""
        base = self._read(self._base, site, slot)
        task_vectors = (self._read(expert, site, slot) - base for expert in self._experts)
        merged = base + merge_task_vectors(task_vectors)
        dtype = self._reference.dtype(site.weight_name)
        return site.stored(merged).to("cpu", dtype).contiguous()

    def _read(self, model: LazyModel, site: Site, slot: int | None = None) -> Tensor:
        name = site.weight_name
        if slot is None:
            weight = model.stored(name)
        elif not all_finite(weight := model.rows(name, slot, slot + 1)[0]):
            model.stored(name)  # raises
        weight = weight.to(self._reference.dtype(name))
        return site.oriented(weight).to(self._device, solve_dtype(self._device))
