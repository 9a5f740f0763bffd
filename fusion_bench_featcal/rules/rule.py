"""Contract of a rule: which modules are solved in one turn, and from which sums."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fusion_bench_featcal.core.linear import Linear


@dataclass(frozen=True)
class Solved:
    """New parameters of a group, and figures for the log: `facts` are of one rule alone."""

    linear: Linear
    residual: float = 0.0
    condition: float = 1.0
    facts: Mapping[str, Any] = field(default_factory=dict)


class GroupSums(Protocol):
    """Sums over tasks for one group of modules, and their solve."""

    def add(self, task: str, rows: Any, expert: Linear) -> dict[str, Tensor]:
        """Add one task.

        Args:
            task: The task.
            rows: Its moments of the calibrated model's inputs `x` and of the expert's drift
                `x_exp - x`; if the group has few outputs, of `W_i (x + mix_alpha (x_exp - x))`.
                Of a norm the sums over its normalised inputs. They may be changed.
            expert: The expert's parameters.

        Returns:
            Scalars of the task to be checked: `norm` of its Gram matrix, if it has one, and what is
            not finite where its sums overflow.
        """
        ...

    def tensors(self) -> list[Tensor]:
        """Return the sums over tasks, to which those of other processes may be added in place."""
        ...

    def solve(self) -> Solved:
        """Return the calibrated parameters.

        Raises:
            UnsolvedError: If there is no trustworthy solution.
        """
        ...


class Rule(ABC):
    """One way of calibrating a block: base of frozen dataclasses whose fields are its settings.

    A rule that does without the experts' features or the base says so, and saves their reads.

    Attributes:
        mix_alpha: Share alpha of the expert's input in the target's input (Eq. 10). It has no
            default: rules that use the experts' features say it.
        folds: Number of parts in which a task's sums are formed.
        notes_outputs: Whether the expert's outputs are noted in place of inputs where they are few:
            they take less memory while they wait for their turn. `mix_alpha` must be 1 then.
        reads_closing_rows: Whether only positions that the model reads on count in the last block.
        calibrate_bias: Whether biases of linear modules change.
        calibrate_norm: Whether gains and shifts of norms change.
    """

    mix_alpha: float
    folds: int = 1
    notes_outputs: bool = False
    reads_closing_rows: bool = False
    calibrate_bias: bool = False
    calibrate_norm: bool = False

    @property
    def runs_experts(self) -> bool:
        """Return whether the experts' features are used: without them `rows` has no drift."""
        return True

    @property
    def reads_base(self) -> bool:
        """Return whether `sums` gets the base model's parameters where there is a base."""
        return True

    @property
    def needs_base(self) -> bool:
        """Return whether there must be a base model."""
        return False

    @property
    def weighs_trust(self) -> bool:
        """Return whether trust in each task's samples is measured before anything is solved."""
        return False

    @property
    def remedy(self) -> str:
        """Return what to change where a system has no solution."""
        return "Use more samples (method.samples_per_task)"

    def turns(self, groups: Sequence[Any]) -> list[Sequence[Any]]:
        """Divide a block's groups, in the order of their calls, into turns: here one.

        Modules of one turn are solved from one look at the samples.
        """
        return [groups]

    @abstractmethod
    def sums(self, group: Any, merged: Linear, base: Linear | None) -> GroupSums:
        """Return empty sums for one group.

        Args:
            group: The modules. Its `kind` is `linear`, as that of convolutions is, or, if
                `calibrate_norm` is set, `norm`. BatchNorm's statistics are no matter of a rule.
            merged: Their parameters as they are.
            base: As the base model has them; None: there is no base.
        """

    def dtype(self, tasks: int, device: torch.device) -> torch.dtype:
        """Return the least precise dtype of sums over rows."""
        return torch.float32
