"""Interface of a rule: which modules are solved together, and the sums that they need."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fusion_bench_featcal.core.linear import Linear
from fusion_bench_featcal.errors.words import option

EPS = 1e-8
"""Stabiliser of the paper's system, and smallest norm of a Gram matrix (Eqs. 14, 17)."""


@dataclass(frozen=True)
class Solved:
    """New parameters of a group, and values for the log. `facts` are specific to one rule."""

    linear: Linear
    residual: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)


class GroupSums(Protocol):
    """Sums over tasks for one group of modules, and their solve."""

    def add(self, task: str, expert: Linear, rows: Any, held_out: Any = None) -> None:
        """Add one task.

        Args:
            task: The task.
            expert: The expert's parameters.
            rows: Its moments of the calibrated model's inputs `x` and of the expert's drift `x_exp
                - x`. If the group has few outputs, moments of `W_i (x + mix_alpha (x_exp - x))` in
                place of the drift. For a norm, sums over its normalised inputs. They may be
                changed.
            held_out: The same of held-out samples, which are not in `rows`, or None.
        """
        ...

    def tensors(self) -> list[Tensor]:
        """Return the sums over tasks. Sums of other processes may be added to them in place."""
        ...

    def solve(self) -> Solved:
        """Return the calibrated parameters.

        Raises:
            UnsolvedError: If the solution cannot be trusted.
        """
        ...


def check_number(name: str, value: Any, least: float, most: float = math.inf) -> None:
    """Refuse a number of a rule that is not finite, or outside bounds.

    Raises:
        ValueError: Naming it.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and least <= value <= most):
        bounds = "" if math.isinf(least) else f" >= {least:g}"
        bounds += "" if math.isinf(most) else f" and at most {most:g}"
        raise ValueError(f"{name} must be a finite number{bounds}, got {value!r}")


class Rule(ABC):
    """Base class of rules: frozen dataclasses whose fields are the settings of a rule.

    A rule that does not need the experts' features or the base model sets the attributes below,
    and their weights are not read.

    Attributes:
        mix_alpha: Fraction alpha of the expert's input in the target's input (Eq. 10). With 0,
            the default, experts do not run and `rows` contain no drift.
        holds_out: Whether one sample in four is held out and summed separately.
        counts_read_positions_only: Whether the last block counts only the positions that the
            head reads.
        calibrate_bias: Whether biases of linear modules change.
        calibrate_norm: Whether gains and shifts of norms change.
        weighs_trust: Whether the calibration measures how well the samples agree with the
            experts, and sets `gammas` from it. This requires a base model.
        estimates_statistics: Whether running statistics of BatchNorms are estimated on the samples.
        features: Module inputs that are summed: those of the `calibrated` model, of the `expert`
            on its own features, or of the expert on the features of the `merged` blocks before.
        balance: Exponent of each task's distance from its expert in its weight. 0 disables it.
        augment: Default of the setting `augment`.
        decoder_rows: Default of the setting `decoder_rows`.
    """

    mix_alpha: float = 0.0
    holds_out: bool = False
    counts_read_positions_only: bool = False
    calibrate_bias: bool = False
    calibrate_norm: bool = False
    weighs_trust: bool = False
    estimates_statistics: bool = True
    features: str = "calibrated"
    balance: float = 0.0
    augment: str = "none"
    decoder_rows: str = "all"

    @property
    def runs_experts(self) -> bool:
        """Return whether the experts' features are used."""
        return self.mix_alpha > 0

    @property
    def reads_base(self) -> bool:
        """Return whether `sums` receives the base model's parameters if there is a base."""
        return True

    @property
    def needs_base(self) -> bool:
        """Return whether a base model is required."""
        return False

    @property
    def remedy(self) -> str:
        """Return advice for a system without a solution."""
        return f"Raise {option('samples_per_task')}"

    def dtype_warning(self, features: torch.dtype) -> str | None:
        """Return a warning about features of a dtype, or None."""
        return None

    def turns(self, groups: Sequence[Any]) -> list[Sequence[Any]]:
        """Divide a block's groups, in the order of their calls, into turns. The default is one.

        All groups of a turn are solved from one pass over the samples.
        """
        return [groups]

    @abstractmethod
    def sums(self, group: Any, merged: Linear, base: Linear | None) -> GroupSums:
        """Return empty sums for one group.

        Args:
            group: The modules. Its `kind` is `linear`, which includes convolutions, or `norm` if
                `calibrate_norm` is set. Statistics of BatchNorm do not go through rules.
            merged: Their current parameters.
            base: The base model's parameters, or None without a base.
        """

    def dtype(self, tasks: int, device: torch.device) -> torch.dtype:
        """Return the least precise dtype of sums over rows."""
        return torch.float32
