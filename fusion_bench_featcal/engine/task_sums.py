"""One task's statistics over one block, summed batch by batch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core import NormMoments, normalised_input
from fusion_bench_featcal.core.finite import not_finite
from fusion_bench_featcal.core.moments import MOMENT_DTYPE, sum_normalised
from fusion_bench_featcal.engine.doubts import Doubt, refuse_doubtful
from fusion_bench_featcal.engine.linear_sums import LinearSums, outputs_are_few, rows_are_many
from fusion_bench_featcal.engine.modules import Site, matches
from fusion_bench_featcal.engine.recording import Recording
from fusion_bench_featcal.engine.rows import CountedRows, rows_of
from fusion_bench_featcal.engine.spares import Spares
from fusion_bench_featcal.settings import CalibrationError

NO_OTHER_ROWS: Mapping[str, CountedRows | None] = {}
DEMO_TOKEN_WEIGHT = 0.01
"""Weight of all tokens but the first under `token_weights: demo_last_block`."""


@dataclass
class TaskSums:
    """One task's sums over one block, batch by batch.

    Linear modules that receive the same tensors share one statistic; which ones do is found by the
    tensors' identity, for any architecture.

    Attributes:
        block: The block's name, for messages.
        task: The task's name, for messages.
        sites: The block's calibrated modules.
        demo_weights: Whether tokens but the first weigh `DEMO_TOKEN_WEIGHT`, except in k and v.
        mix_alpha: alpha (Eq. 10); at 0 expert features are not looked at.
        expert: The expert, with the block's parameters loaded; None: no cross moment is spared.
        batches: Number of batches that will come: outputs of the expert are worth using where rows
            are many.
        spares: Memory for the sums; None: it is made.
        dtype: Least precise dtype of the sums.
        mean_dtype: Least precise dtype of the linear modules' means.
        linear: Sums by group of modules (their names).
        norm: Sums by LayerNorm.
    """

    block: str
    task: str
    sites: Sequence[Site]
    demo_weights: bool
    mix_alpha: float = 0.0
    expert: nn.Module | None = None
    batches: int = 1
    spares: Spares | None = None
    dtype: torch.dtype = MOMENT_DTYPE
    mean_dtype: torch.dtype = MOMENT_DTYPE
    linear: dict[tuple[str, ...], LinearSums] = field(default_factory=dict)
    norm: dict[str, NormMoments] = field(default_factory=dict)

    def add(
        self,
        model: nn.Module,
        cal: Recording,
        exp: Recording | None,
        valid: CountedRows | None,
        other: Mapping[str, CountedRows | None] = NO_OTHER_ROWS,
    ) -> None:
        """Add one batch.

        Args:
            model: The calibrated model, for the LayerNorms' epsilon.
            cal: Inputs of the calibrated block's modules.
            exp: Inputs of the expert block's; None where expert features are not used.
            valid: The positions that count; None: all do.
            other: The same for modules that receive other rows than the block's hidden features,
                by the end of their names.

        Raises:
            CalibrationError: If a module did not run, or padding cannot be told in its input.
        """
        exp = exp if self.mix_alpha > 0 else None
        groups: dict[Any, list[Site]] = {}
        for site in self.sites:
            inputs = tuple(cal.calls.get(site.name, ()))
            expert_inputs = inputs if exp is None else tuple(exp.calls.get(site.name, ()))
            if not inputs or len(inputs) != len(expert_inputs):
                raise CalibrationError(
                    f"task {self.task}, block {self.block}: module {site.name} ran {len(inputs)} "
                    f"times in the calibrated block and {len(expert_inputs)} in the expert's. "
                    f"Exclude it: method.modules=['!{site.name}']"
                )
            if site.kind == "norm":
                self._add_norm(model, site, cal, _counted_in(site, valid, other))
            else:
                mask = _counted_in(site, valid, other)
                key = (inputs, expert_inputs, self._weighs_tokens(site), id(mask))
                groups.setdefault(key, []).append(site)
        sharing = [tuple(site.name for site in members) for members in groups.values()]
        # Modules share a statistic only while every batch of the task lets them.
        linear: dict[tuple[str, ...], LinearSums] = {}
        for names, known, _ in common_parts(self.linear or sharing, sharing):
            site = next(site for site in self.sites if site.name == names[0])
            sums = self.linear.get(known)
            if sums is None:
                sums = self._empty(names, cal, exp)
            elif names != known:
                sums = sums.restricted(names)
            self._add_linear(sums, site, cal, exp, _counted_in(site, valid, other))
            linear[names] = sums
        self.linear = linear

    def _empty(self, names: Sequence[str], cal: Recording, exp: Recording | None) -> LinearSums:
        """Sums for modules that share their input."""
        sites = {site.name: site for site in self.sites}
        weights = None
        if self.expert is not None and self.mix_alpha > 0:
            get = self.expert.get_parameter
            weights = {n: sites[n].oriented(get(sites[n].weight_name)).detach() for n in names}
            weights = weights if outputs_are_few(weights.values()) else None
        inputs = cal.of(names[0])
        rows = sum(x.shape[:-1].numel() for x in inputs) * self.batches
        from_outputs = (
            weights is not None
            and exp is not None
            and rows_are_many(rows, inputs[0])
            and all(self._gives_products(sites[n], exp, inputs[0]) for n in names)
        )
        return LinearSums(
            inputs[0],
            mix_alpha=self.mix_alpha,
            expert_weights=weights,
            from_outputs=from_outputs,
            spares=self.spares,
            dtype=self.dtype,
            mean_dtype=self.mean_dtype,
        )

    def _gives_products(self, site: Site, exp: Recording, x_cal: Tensor) -> bool:
        """Tell whether the recorded outputs are weight times inputs, no coarser than the sums."""
        outputs = exp.outputs.get(site.name, [])
        return (
            self.expert is not None
            and type(self.expert.get_submodule(site.name)) is nn.Linear
            and len(outputs) == len(exp.calls[site.name])
            and all(output.dtype == self._sum_dtype(x_cal) for output in outputs)
        )

    def _sum_dtype(self, x: Tensor) -> torch.dtype:
        return torch.promote_types(x.dtype, self.dtype)

    def _add_linear(
        self,
        sums: LinearSums,
        site: Site,
        cal: Recording,
        exp: Recording | None,
        valid: CountedRows | None,
    ) -> None:
        """Add all calls of a module in one batch."""
        inputs = cal.of(site.name)
        expert_inputs = [None] * len(inputs) if exp is None else exp.of(site.name)
        for call, (x_cal, x_exp) in enumerate(zip(inputs, expert_inputs, strict=True)):
            weights = self._row_weights(site, x_cal, valid)
            products = (self._product(name, exp, call) for name in sums.takes_outputs_of)
            outputs = [rows_of(product, valid) for product in products]
            expert_rows = None if x_exp is None else rows_of(x_exp, valid)
            sums.add(rows_of(x_cal, valid), expert_rows, weights, outputs)

    def _product(self, name: str, exp: Recording | None, call: int) -> Tensor:
        """What the expert's weight made of a call's input: its output without the bias."""
        assert exp is not None and self.expert is not None  # else no outputs are taken
        output = exp.outputs[name][call]
        bias: Any = self.expert.get_submodule(name).bias
        return output if bias is None else output - bias

    def _add_norm(
        self, model: nn.Module, site: Site, cal: Recording, valid: CountedRows | None
    ) -> None:
        norm: Any = model.get_submodule(site.name)
        parts = []
        for x in cal.of(site.name):
            weights = self._row_weights(site, x, valid)
            rows = rows_of(x, valid).to(self._sum_dtype(x))
            parts.append(sum_normalised(normalised_input(rows, norm.eps), weights))
        known = [self.norm[site.name]] if site.name in self.norm else []
        self.norm[site.name] = reduce(add, known + parts)

    def _weighs_tokens(self, site: Site) -> bool:
        return self.demo_weights and not site.name.endswith(("k_proj", "v_proj"))

    def _row_weights(self, site: Site, x: Tensor, valid: CountedRows | None) -> Tensor | None:
        """Weight of each row that counts of a module's input, or None where all weigh 1."""
        if valid is not None and valid.shape != x.shape[:-1]:
            raise CalibrationError(
                f"task {self.task}, block {self.block}: module {site.name} receives rows "
                f"{tuple(x.shape[:-1])}, but padding is known for {tuple(valid.shape)}. Exclude "
                f"it: method.modules=['!{site.name}']"
            )
        dtype = self._sum_dtype(x)
        known = None if valid is None or valid.weights is None else valid.weights.to(dtype)
        if not self._weighs_tokens(site):
            return known
        if x.ndim != 3:
            raise CalibrationError(
                f"block {self.block}: module {site.name} receives {tuple(x.shape)}, not [batch, "
                "tokens, d]: method.token_weights=demo_last_block does not fit; use uniform"
            )
        weights = torch.full(x.shape[:-1], DEMO_TOKEN_WEIGHT, device=x.device, dtype=dtype)
        weights[:, 0].fill_(1)
        weights = weights.reshape(-1) if valid is None else valid.of_flat(weights.reshape(-1))
        return weights if known is None else weights * known

    def restrict(self, parts: Iterable[tuple[str, ...]]) -> None:
        """Let fewer modules share their sums: groups of them, each within one that there is."""
        known = {name: names for names in self.linear for name in names}
        self.linear = {
            part: self.linear[known[part[0]]]
            if part == known[part[0]]
            else self.linear[known[part[0]]].restricted(part)
            for part in parts
        }

    def tensors(self) -> list[Tensor]:
        """The sums, to which those of further rows may be added in place, in a fixed order."""
        linear = [tensor for sums in self.linear.values() for tensor in sums.tensors()]
        norm = [t for m in self.norm.values() for t in (m.sum_z, m.sum_z_sq, m.weight)]
        return linear + norm

    def close(self) -> None:
        """Multiply the rows that still wait."""
        for sums in self.linear.values():
            sums.close()

    def doubts(self) -> list[Doubt]:
        """What the host has to look at before these sums may be used."""
        self.close()
        found = [
            Doubt(sums.weight == 0, self._all_padding())
            for sums in (*self.linear.values(), *self.norm.values())
        ]
        found += [
            Doubt(sums.not_finite(), self._not_finite(names[0]))
            for names, sums in self.linear.items()
        ]
        found += [
            Doubt(not_finite(moments.sum_z_sq), self._not_finite(name))
            for name, moments in self.norm.items()
        ]
        return found

    def check(self) -> None:
        """Refuse sums over nothing, and sums with NaN or infinity.

        Raises:
            CalibrationError: Naming task, block and module.
        """
        refuse_doubtful(self.doubts())

    def _all_padding(self) -> CalibrationError:
        return CalibrationError(
            f"task {self.task}, block {self.block}: no position counts, all is padding; "
            f"check the masks of its data (modelpool.train_datasets.{self.task})"
        )

    def _not_finite(self, module: str) -> CalibrationError:
        return CalibrationError(
            f"task {self.task}, block {self.block}, module {module}: inputs are NaN or infinite, "
            f"or their sums overflow, while weights and samples are finite: a forward pass "
            f"overflows. Compute in a wider precision (fabric.precision=32-true, or wider "
            f"modelpool.models), or check modelpool.models.{self.task} and "
            f"modelpool.train_datasets.{self.task} for extreme values"
        )


def _counted_in(
    site: Site, valid: CountedRows | None, other: Mapping[str, CountedRows | None]
) -> CountedRows | None:
    """Which of a module's rows count."""
    return next((mask for end, mask in other.items() if matches(site.name, end)), valid)


def common_parts(
    left: Iterable[tuple[str, ...]], right: Iterable[tuple[str, ...]]
) -> list[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]]:
    """The coarsest groups that respect two groupings of the same names.

    Args:
        left: Disjoint groups of names.
        right: Other disjoint groups of the same names.

    Returns:
        Each non-empty intersection, with the group of `left` and of `right` that it came from.
    """
    parts = [(tuple(n for n in a if n in b), a, b) for a in left for b in right]
    return [part for part in parts if part[0]]
