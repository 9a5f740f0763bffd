"""Inputs of modules are noted without copies."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fusion_bench_featcal.engine.recording import Recorder

NAMES = ["first", "second"]


class Block(nn.Module):
    """Two linear modules, and counts of passes that began and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.passes = 0
        self.ends = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        hidden = self.first(x)
        output = self.second(x + hidden)
        self.ends += 1
        return output


def runner(block: Block, x: Tensor) -> Callable[[], Tensor]:
    return lambda: block(x.clone())


@torch.no_grad()
def test_inputs_are_not_copied_where_the_block_leaves_them():
    block, x = Block(), torch.randn(2, 3)
    recording = Recorder().record(block, NAMES, lambda: block(x))
    assert recording.of("first")[0].data_ptr() == x.data_ptr()
    assert block.passes == 1


@torch.no_grad()
def test_a_pass_whose_output_nobody_needs_ends_with_the_last_input():
    block, recorder, x = Block(), Recorder(), torch.randn(2, 3)
    whole = recorder.record(block, NAMES, runner(block, x), needs_output=False)
    cut = recorder.record(block, NAMES, runner(block, x), needs_output=False)
    assert (block.passes, block.ends) == (2, 1)
    assert whole.output is not None
    assert cut.output is None
    for name in NAMES:
        torch.testing.assert_close(cut.of(name), whole.of(name), rtol=0, atol=0)
