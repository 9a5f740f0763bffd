"""An example of a family, which calibrates the last blocks of a CLIP vision tower only.

Run in this folder, because modules and `config` of the current folder are used:

    fusion_bench method=last_blocks modelpool=clip-vit-mini_alphabets2 method.samples_per_task=16
"""

from fusion_bench_featcal.families import CLIP, Call, Family
from fusion_bench_featcal.families.base import captured, hidden_output, run_block


class LastBlocks(Family):
    """The last blocks of a CLIP vision tower."""

    def __init__(self, count: int = 1):
        """Take the options from YAML."""
        self.count = int(count)

    def stages(self, model):
        """Return the names of the blocks in forward order, as one stage."""
        return [CLIP.stages(model)[0][-self.count :]]

    def begin(self, model, inputs, block, ended=None):
        """Run the model up to the first block and return the input of that block."""
        return captured(model, inputs, block)

    def step(self, model, block, call):
        """Run one block and return the input of the next block."""
        return Call(hidden_output(run_block(model, block, call)), call.args, call.kwargs)
