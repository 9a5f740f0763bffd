"""Result of a calibration: the model, its log, and a count of reads."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fusion_bench_featcal.errors.plurals import pluralize
from fusion_bench_featcal.run.finished import FinishedBlocks
from fusion_bench_featcal.run.log import CalibrationLog


@dataclass(frozen=True, repr=False)
class CalibrationResult:
    """A calibrated model and its history.

    Attributes:
        model: The calibrated model, with class, dtype and device of the merged one. With
            `merged_weights` only its structure.
        log: Records of every block.
        reads: Count of the bytes read (see docs/reference/files.md).
        weights: The calibrated weights in `checkpoint_dir`, which every read checks for damage, or
            None without a folder.
    """

    model: nn.Module
    log: CalibrationLog
    reads: dict[str, Any] = field(default_factory=dict)
    weights: FinishedBlocks | None = None

    def __str__(self) -> str:
        """Return blocks, seconds, and each task's drift from its expert before the head."""
        blocks = pluralize(len(self.log.select("block")), "block")
        text = f"calibrated {blocks} in {self.log.seconds:.1f} s"
        drifts = ", ".join(f"{t} {drift:.3g}" for t, drift in self.log.final_drift.items())
        drift_text = "drift before the head, relative to the experts' features"
        return f"{text}; {drift_text}: {drifts}" if drifts else text

    __repr__ = __str__  # a notebook shows it, and would print the whole model
