"""One task's statistics over one block, summed batch by batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core import NormMoments
from fusion_bench_featcal.core.finite import not_finite
from fusion_bench_featcal.core.grouped import GroupedSums
from fusion_bench_featcal.core.moments import (
    MOMENT_DTYPE,
    LinearSums,
    normalised_channels,
    normalised_input,
    sum_normalised,
)
from fusion_bench_featcal.engine.checks import DeferredCheck, run_checks
from fusion_bench_featcal.engine.modules import Site, matches
from fusion_bench_featcal.engine.recording import Recording
from fusion_bench_featcal.engine.rows import CountedRows, pieces_of, rows_of
from fusion_bench_featcal.settings import CalibrationError

NO_OTHER_ROWS: Mapping[str, CountedRows | None] = {}
DEMO_TOKEN_WEIGHT = 0.01
"""Weight of all tokens but the first under `token_weights: demo_last_block`."""


@dataclass
class TaskSums:
    """One task's sums over one block, batch by batch.

    Linear modules that receive the same tensors share one statistic; which ones do is found by the
    tensors' identity, for any architecture; a task's batches must agree.

    Attributes:
        block: The block's name, for messages.
        task: The task's name, for messages.
        sites: The block's calibrated modules.
        demo_weights: Whether tokens but the first weigh `DEMO_TOKEN_WEIGHT`, except in k and v.
        mix_alpha: alpha (Eq. 10); at 0 expert features are not looked at.
        expert: The expert, with the block's parameters loaded; None: no cross moment is spared.
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
    dtype: torch.dtype = MOMENT_DTYPE
    mean_dtype: torch.dtype = MOMENT_DTYPE
    linear: dict[tuple[str, ...], LinearSums | GroupedSums] = field(default_factory=dict)
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
            CalibrationError: If a module did not run, padding cannot be told in its input, or
                modules share their input in some batches only.
        """
        exp = exp if self.mix_alpha > 0 else None
        groups: dict[Any, list[Site]] = {}
        for site in self.sites:
            inputs = tuple(cal.calls.get(site.name, ()))
            expert_inputs = inputs if exp is None else tuple(exp.calls.get(site.name, ()))
            if not inputs or len(inputs) != len(expert_inputs):
                raise self.error(
                    f"module {site.name} ran {len(inputs)} times in the calibrated block and "
                    f"{len(expert_inputs)} in the expert's. Exclude it: "
                    f"method.modules=['!{site.name}']"
                )
            mask = _counted(site, cal, valid, other)
            if site.kind == "norm":
                self._add_norm(model, site, cal, mask)
            else:
                form = site.patches if site.groups == 1 else site.name
                key = (inputs, expert_inputs, self._weighs_tokens(site), id(mask), form)
                groups.setdefault(key, []).append(site)
        for members in groups.values():
            sums = self._sums_of(members, cal)
            inputs = cal.of(members[0].name)
            expert_inputs = [None] * len(inputs) if exp is None else exp.of(members[0].name)
            mask = _counted(members[0], cal, valid, other)
            for x_cal, x_exp in zip(inputs, expert_inputs, strict=True):
                weights = self._row_weights(members[0], x_cal, mask)
                for cal_rows, exp_rows in pieces_of((x_cal, x_exp), mask, members[0].patches):
                    assert cal_rows is not None
                    sums.add(cal_rows, exp_rows, weights)

    def _sums_of(self, members: Sequence[Site], cal: Recording) -> LinearSums | GroupedSums:
        """The sums of modules that received the same tensors in a batch."""
        names = tuple(site.name for site in members)
        if names not in self.linear:
            grouped = {name for group in self.linear for name in group}
            if grouped & set(names):
                raise self.error(
                    f"modules {', '.join(names)} receive one tensor in some batches and several in "
                    "others, which is not supported. Exclude them: "
                    f"method.modules=['!{names[0]}', ...]"
                )
            self.linear[names] = self._new_sums(members, cal.of(names[0])[0])
        return self.linear[names]

    def _new_sums(self, members: Sequence[Site], x: Tensor) -> LinearSums | GroupedSums:
        """Sums for modules that receive `x`, empty."""
        dtypes = {"dtype": self.dtype, "mean_dtype": self.mean_dtype}
        patches, groups = members[0].patches, members[0].groups
        if patches is not None:
            x = x.new_empty(0, groups * patches.width)
        if groups > 1:
            return GroupedSums(x, groups, mix_alpha=self.mix_alpha, **dtypes)
        weights = None
        if self.expert is not None:
            get = self.expert.get_parameter
            weights = {s.name: s.oriented(get(s.weight_name)).detach() for s in members}
        return LinearSums(x, mix_alpha=self.mix_alpha, expert_weights=weights, **dtypes)

    def _sum_dtype(self, x: Tensor) -> torch.dtype:
        return torch.promote_types(x.dtype, self.dtype)

    def _add_norm(
        self, model: nn.Module, site: Site, cal: Recording, valid: CountedRows | None
    ) -> None:
        norm: Any = model.get_submodule(site.name)
        sums = []
        for x in cal.of(site.name):
            if isinstance(norm, nn.GroupNorm):
                x = normalised_channels(x, norm.num_groups, norm.eps)
            if site.channels_first:
                x = x.movedim(1, -1)
            weights = self._row_weights(site, x, valid)
            z = rows_of(x, valid).to(self._sum_dtype(x))
            z = z if isinstance(norm, nn.GroupNorm) else normalised_input(z, norm.eps)
            sums.append(sum_normalised(z, weights))
        before = [self.norm[site.name]] if site.name in self.norm else []
        self.norm[site.name] = reduce(add, before + sums)

    def _weighs_tokens(self, site: Site) -> bool:
        return self.demo_weights and not site.name.endswith(("k_proj", "v_proj"))

    def _row_weights(self, site: Site, x: Tensor, valid: CountedRows | None) -> Tensor | None:
        """Weight of each row that counts of a module's input, or None where all weigh 1."""
        if site.patches is not None and (valid is not None or self._weighs_tokens(site)):
            raise self.error(
                f"module {site.name} is a convolution, whose patches no mask of positions and no "
                "method.token_weights=demo_last_block fits. Exclude it: "
                f"method.modules=['!{site.name}']"
            )
        if valid is not None and valid.is_table(x):
            return None
        if valid is not None and not valid.fits(x):
            raise self.error(
                f"module {site.name} receives rows {tuple(x.shape[:-1])}, but padding is known for "
                f"{tuple(valid.shape)}. Exclude it: method.modules=['!{site.name}']"
            )
        dtype = self._sum_dtype(x)
        by_mask = None if valid is None or valid.weights is None else valid.weights.to(dtype)
        if not self._weighs_tokens(site):
            return by_mask
        if x.ndim != 3:
            raise self.error(
                f"module {site.name} receives {tuple(x.shape)}, not [batch, tokens, d]: "
                "method.token_weights=demo_last_block does not fit; use uniform"
            )
        weights = torch.full(x.shape[:-1], DEMO_TOKEN_WEIGHT, device=x.device, dtype=dtype)
        weights[:, 0].fill_(1)
        weights = weights.reshape(-1) if valid is None else valid.of_flat(weights.reshape(-1))
        return weights if by_mask is None else weights * by_mask

    def tensors(self) -> list[Tensor]:
        """The sums, to which those of further rows may be added in place, in a fixed order."""
        linear = [tensor for sums in self.linear.values() for tensor in sums.tensors()]
        norm = [t for m in self.norm.values() for t in (m.sum_z, m.sum_z_sq, m.weight)]
        return linear + norm

    def deferred_checks(self) -> list[DeferredCheck]:
        """Checks that must pass before these sums are used."""
        routed = {site.name for site in self.sites if site.routed}
        linear = [sums for names, sums in self.linear.items() if names[0] not in routed]
        checks = [
            DeferredCheck(sums.weight == 0, self._all_padding())
            for sums in (*linear, *self.norm.values())
        ]
        checks += [
            DeferredCheck(sums.not_finite(), self._not_finite(names[0]))
            for names, sums in self.linear.items()
        ]
        checks += [
            DeferredCheck(not_finite(moments.sum_z_sq), self._not_finite(name))
            for name, moments in self.norm.items()
        ]
        return checks

    def check(self) -> None:
        """Refuse sums over nothing, and sums with NaN or infinity.

        Raises:
            CalibrationError: Naming task, block and module.
        """
        run_checks(self.deferred_checks())

    def error(self, text: str, module: str = "") -> CalibrationError:
        """An error that names task, block and, if given, module."""
        place = f"task {self.task}, block {self.block}" + (f", module {module}" if module else "")
        return CalibrationError(f"{place}: {text}")

    def _all_padding(self) -> CalibrationError:
        return self.error(
            "no position counts, all is padding; check the masks of its data "
            f"(modelpool.train_datasets.{self.task})"
        )

    def _not_finite(self, module: str) -> CalibrationError:
        place = f"task {self.task}, block {self.block}, module {module}"
        return not_finite_features(place, self.task)


def not_finite_features(place: str, task: str) -> CalibrationError:
    """The error for features that overflow.

    Args:
        place: Task, block and module.
        task: The task.
    """
    return CalibrationError(
        f"{place}: inputs are NaN or infinite, or their sums overflow, while weights and "
        "samples are finite: a forward pass overflows. Compute in a wider precision "
        "(fabric.precision=32-true, or wider modelpool.models), or check "
        f"modelpool.models.{task} and modelpool.train_datasets.{task} for extreme values"
    )


def _counted(
    site: Site,
    cal: Recording,
    valid: CountedRows | None,
    other: Mapping[str, CountedRows | None],
) -> CountedRows | None:
    return cal.routed[site.name] if site.routed else counted_in(site, valid, other)


def counted_in(
    site: Site, valid: CountedRows | None, other: Mapping[str, CountedRows | None]
) -> CountedRows | None:
    """The rows of a module's input that count; None: all."""
    return next((mask for end, mask in other.items() if matches(site.name, end)), valid)
