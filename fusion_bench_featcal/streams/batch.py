"""A batch of samples on its way through the blocks."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fusion_bench_featcal.streams.rows import Rows

# No module has this name. A block's name is also its module's if the block is a single layer.
OUTPUT = ""


@dataclass
class Batch:
    """Samples that run together.

    inputs: The model's inputs, or None after the last stage has begun.
    samples: Number of samples, or 0 for changed copies of other samples.
    start: Number of the task's samples before it.
    is_held_out: Whether it is excluded from the sums.
        cal: Input of the calibrated model's next block.
        exp: Input of the expert's next block, or None if experts do not run.
        merged: Input of the merged model's next block, for held-out batches.
        rows: Positions that count in the stage.
        noted: The expert's features at modules that are not solved yet, one per call: inputs, or
            outputs if the rule stores them. The block's output is under `OUTPUT`, if it is
            compared.
    """

    inputs: Any
    samples: int
    start: int = 0
    is_held_out: bool = False
    cal: Any = None
    exp: Any = None
    merged: Any = None
    rows: Rows = field(default_factory=Rows)
    noted: dict[str, list[Tensor]] = field(default_factory=dict)
