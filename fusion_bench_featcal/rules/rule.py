"""Contract of a rule: which modules are solved in one turn, and from which sums."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fusion_bench_featcal.core.linear import Linear


@dataclass(frozen=True)
class Solved:
    """New parameters of a group, and figures for the log.

    Attributes:
        linear: The parameters.
        residual: Relative residual of the normal equations.
        condition: Their condition number, estimated.
        facts: Further figures of the rule, such as the ridge that was chosen.
    """

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
                `x_exp - x`, behind the expert's weight if the group compares outputs. Of a norm the
                sums over its normalised inputs.
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


class Rule(Protocol):
    """One way of calibrating a block. Its fields are its settings.

    Attributes:
        folds: Number of parts in which a task's sums are formed.
        runs_experts: Whether the experts' features are used.
        notes_outputs: Whether the expert's outputs are noted in place of inputs where they are few:
            they take less memory while they wait for their turn.
        reads_base: Whether the base model's parameters are used where there is one.
        needs_base: Whether there must be one.
        weighs_trust: Whether trust in each task's samples is measured before anything is solved.
        reads_closing_rows: Whether only positions that the model reads on count in the last block.
        calibrate_bias: Whether biases of linear modules change.
        calibrate_norm: Whether gains and shifts of norms change.
        remedy: What to change where a system has no solution.
    """

    folds: int
    notes_outputs: bool
    reads_closing_rows: bool
    calibrate_bias: bool
    calibrate_norm: bool

    @property
    def runs_experts(self) -> bool:
        """As the attribute."""
        ...

    @property
    def reads_base(self) -> bool:
        """As the attribute."""
        ...

    @property
    def needs_base(self) -> bool:
        """As the attribute."""
        ...

    @property
    def weighs_trust(self) -> bool:
        """As the attribute."""
        ...

    @property
    def remedy(self) -> str:
        """As the attribute."""
        ...

    def turns(self, groups: Sequence[Any]) -> list[Sequence[Any]]:
        """Divide a block's groups, in the order of their calls, into turns.

        Modules of one turn are solved from one look at the samples.
        """
        ...

    def sums(self, group: Any, merged: Linear, base: Linear | None) -> GroupSums:
        """Return empty sums for one group.

        Args:
            group: The modules.
            merged: Their parameters as they are.
            base: As the base model has them; None: there is no base.
        """
        ...

    def dtype(self, tasks: int, device: torch.device) -> torch.dtype:
        """Return the least precise dtype of sums over rows."""
        ...
