"""Inputs of modules are noted without copies; a block that overwrites them is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.engine.recording import Recorder

NAMES = ["first", "second"]


class Block(nn.Module):
    """Two linear modules; with `in_place` the first one's input is overwritten after its use."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.in_place = in_place
        self.passes = 0
        self.ends = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        hidden = self.first(x)
        if self.in_place:
            x.add_(hidden)
        output = self.second(x + hidden)
        self.ends += 1
        return output


def runner(block: Block, x: Tensor) -> Callable[[], Tensor]:
    return lambda: block(x.clone())


@torch.no_grad()
def test_inputs_are_not_copied_where_the_block_leaves_them():
    block, x = Block(in_place=False), torch.randn(2, 3)
    recording = Recorder().record(block, NAMES, lambda: block(x))
    assert recording.of("first")[0].data_ptr() == x.data_ptr()
    assert block.passes == 1


@torch.no_grad()
def test_block_that_overwrites_an_input_is_refused():
    block = Block(in_place=True)
    with pytest.raises(CalibrationError, match=r"module first: .*method\.modules=\['!first'\]"):
        Recorder().record(block, NAMES, runner(block, torch.randn(2, 3)))


@torch.no_grad()
def test_a_pass_whose_output_nobody_needs_ends_with_the_last_input():
    block, recorder, x = Block(in_place=False), Recorder(), torch.randn(2, 3)
    whole = recorder.record(block, NAMES, runner(block, x), needs_output=False)
    cut = recorder.record(block, NAMES, runner(block, x), needs_output=False)
    assert (block.passes, block.ends) == (2, 1)
    assert whole.output is not None
    assert cut.output is None
    for name in NAMES:
        torch.testing.assert_close(cut.of(name), whole.of(name), rtol=0, atol=0)
