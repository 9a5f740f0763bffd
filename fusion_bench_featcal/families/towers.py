"""Models whose text decoder receives the features of towers for images or sounds."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from fusion_bench_featcal.families.base import Masks
from fusion_bench_featcal.families.stack import Stack


class Towers(Stack):
    """Blocks of towers, linear modules between these and the decoder, then the decoder's blocks.

    Samples without images or sounds begin with the decoder.
    """

    name = "towers"

    def __init__(self, lists: Sequence[Sequence[str]]) -> None:
        """Set the names of blocks and modules, one list per stage. The last one is the decoder."""
        super().__init__()
        self.lists, self.optional = [[*blocks] for blocks in lists], len(lists) - 1

    def stages(self, model: nn.Module) -> list[list[str]]:
        """Return the lists."""
        return self.lists

    def masks(self, model: nn.Module, inputs: Any, stage: int, decoder_rows: str) -> Masks:
        """Return the decoder's masks. All positions of images and sounds count."""
        return {} if stage < self.optional else super().masks(model, inputs, stage, decoder_rows)
