"""Common part of rules that merge experts block by block."""

from collections.abc import Sequence
from typing import Any

import torch


class MergingRule:
    """Base of rules whose sums are over the inputs of each expert's modules.

    Attributes:
        features: Features that an expert's block receives: the `expert`'s, or those of the `merged`
            blocks before it.
        outside: Whether layers outside the blocks are solved, too.
    """

    features: str = "expert"
    outside: bool = False
    calibrate_bias: bool = False
    calibrate_norm: bool = False
    folds: int = 1
    runs_experts: bool = False
    notes_outputs: bool = False
    reads_closing_rows: bool = False
    reads_base: bool = False
    needs_base: bool = False
    weighs_trust: bool = False
    remedy: str = "Use more samples (method.samples_per_task)"

    def turns(self, groups: Sequence[Any]) -> list[Sequence[Any]]:
        """Solve all modules from one look at the samples."""
        return [groups]

    def dtype(self, tasks: int, device: torch.device) -> torch.dtype:
        """Return float32: what rounding hides counts as unseen."""
        return torch.float32

    def start_scale(self, tasks: int) -> float:
        """Return the factor of the experts' mean step from the base in the model to start from."""
        return 1.0
