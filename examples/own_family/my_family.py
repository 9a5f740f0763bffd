"""An example of a family, which calibrates the last blocks of a CLIP vision tower only.

Run in this folder, because modules and `config` of the current folder are used:

    fusion_bench method=last_blocks modelpool=clip-vit-mini_alphabets2 method.samples_per_task=16
"""

from fusion_bench_featcal.families import CLIP, BlockCall, Family
from fusion_bench_featcal.families.base import call_block, capture_call, hidden_output


class LastBlocks(Family):
    """The last blocks of a CLIP vision tower."""

    name = "last_blocks"
    compared = True  # on the first samples, with the model's own forward pass

    def __init__(self, count: int = 1):
        """Take the options from YAML."""
        self.count = int(count)

    def __repr__(self) -> str:
        """Return the name with its options, which a resumed run compares."""
        return f"LastBlocks({self.count})"

    def stages(self, model):
        """Return the names of the blocks in forward order, as one stage."""
        return [CLIP.stages(model)[0][-self.count :]]

    def begin(self, model, inputs, first_block, *ending):
        """Run the model up to the first block and return the inputs of that block."""
        return capture_call(model, inputs, first_block)

    def step(self, model, block, call):
        """Run one block and return its features and the inputs of the next block."""
        hidden = hidden_output(call_block(model, block, call))
        return hidden, BlockCall(hidden, call.args, call.kwargs)
