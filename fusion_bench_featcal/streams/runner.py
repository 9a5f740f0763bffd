"""Runs models of one family stage by stage and block by block."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.families import Family
from fusion_bench_featcal.streams.rows import CountedRows, Rows


@dataclass(frozen=True)
class Runner:
    """Runs models of one family, on one device and in one precision.

    Attributes:
        family: The family.
        stages: Names of the blocks in forward order, one list per stage.
        device: Device of the models.
        autocast: Returns the context for forward passes.
        decoder_rows: Counted positions of a decoder, as for `Family.row_weights`.
    """

    family: Family
    stages: Sequence[Sequence[str]]
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]]
    decoder_rows: str

    def begin(self, model: nn.Module, inputs: Any, stage: int, ended: Any) -> Any:
        """Run a model up to a stage's first block and return the inputs of that block.

        Args:
            model: The model.
            inputs: A batch of its inputs.
            stage: Number of the stage.
            ended: Inputs of a block after the end of the previous stage.
        """
        follows = stage > 0 and self.family.hands_on
        ending = (self.family.ending(model, ended),) if follows else ()
        with self.autocast():
            return self.family.begin(model, inputs, self.stages[stage][0], *ending)

    def step(self, model: nn.Module, block: str, call: Any) -> tuple[Tensor, Any]:
        """Run one block and return its hidden output and the inputs of the next block."""
        with self.autocast():
            return self.family.step(model, block, call)

    def rows(self, inputs: Any, stage: int) -> Rows:
        """Return the counted positions of a stage, computed once."""
        counted: dict[int, tuple[Tensor, CountedRows]] = {}

        def of_mask(mask: Tensor | None) -> CountedRows | None:
            if mask is None:
                return None
            if id(mask) not in counted:  # modules with one mask share their sums
                counted[id(mask)] = mask, CountedRows.of_mask(mask)
            return counted[id(mask)][1]

        valid = of_mask(self.family.row_weights(inputs, stage, self.decoder_rows))
        of_others = self.family.other_rows(inputs, stage)
        return Rows(valid, {end: of_mask(mask) for end, mask in of_others.items()})
