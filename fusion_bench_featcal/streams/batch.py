"""A batch of samples on its way through the blocks."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fusion_bench_featcal.streams.rows import CountedRows, Rows

# No module has this name. A block's name is also its module's if the block is a single layer.
OUTPUT = ""


@dataclass
class Batch:
    """Samples that run together.

    Attributes:
        inputs: The model's inputs, or None after the last stage has begun.
        samples: Number of samples.
        start: Number of the task's samples before it.
        copy: Number of the changed copy of the samples that it has, or 0 for the samples.
        held_out: Samples held out to choose ridges, bool `[samples]`, or None.
        cal: Input of the calibrated model's next block.
        exp: Input of the expert's next block, or None if experts do not run.
        rows: Positions that count in the stage.
        noted: The expert's inputs of modules that are not solved yet, and the block's output
            under `OUTPUT`, if it is compared.
    """

    inputs: Any
    samples: int
    start: int = 0
    copy: int = 0
    held_out: Tensor | None = None
    cal: Any = None
    exp: Any = None
    rows: Rows = field(default_factory=Rows)
    noted: dict[str, Tensor] = field(default_factory=dict)
    _places: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def parts(self, samples: range, counted: CountedRows | None, rows: Tensor) -> Any:
        """Return the positions of rows of fitted samples and of held-out ones, computed once.

        Args:
            samples: The samples with the rows, in the batch.
            counted: The positions that count, or None if every sample has equally many rows.
            rows: The rows, `[n, d]`.
        """
        assert self.held_out is not None  # the rule holds samples out
        key = samples, id(counted), len(rows)
        if key not in self._places:
            if counted is None or counted.index is None:
                held_out = self.held_out[samples.start : samples.stop].repeat_interleave(
                    len(rows) // len(samples)
                )
            else:
                held_out = self.held_out[counted.index.cpu() // counted.shape[1:].numel()]
            pair = (~held_out).nonzero().flatten(), held_out.nonzero().flatten()
            self._places[key] = pair[0].to(rows.device), pair[1].to(rows.device)
        return self._places[key]
