"""Inputs are noted without copies where a block leaves them alone, rightly where it does not."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

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
    _, recording = Recorder().record(block, NAMES, lambda: block(x))
    assert recording.of("first")[0].data_ptr() == x.data_ptr()
    assert block.passes == 1


@torch.no_grad()
def test_a_block_that_overwrites_an_input_runs_once_more_and_then_with_copies():
    block, recorder, x = Block(in_place=True), Recorder(), torch.randn(2, 3)
    for passes in (2, 3):
        output, recording = recorder.record(block, NAMES, runner(block, x))
        assert block.passes == passes
        torch.testing.assert_close(recording.of("first")[0], x, rtol=0, atol=0)
        torch.testing.assert_close(output, block.second(recording.of("second")[0]))


@torch.no_grad()
def test_a_pass_whose_output_nobody_needs_ends_with_the_last_input():
    block, recorder, x = Block(in_place=False), Recorder(), torch.randn(2, 3)
    whole = recorder.record(block, NAMES, runner(block, x), needs_output=False)
    cut = recorder.record(block, NAMES, runner(block, x), needs_output=False)
    assert (block.passes, block.ends) == (2, 1)
    assert whole[0] is not None
    assert cut[0] is None
    for name in NAMES:
        torch.testing.assert_close(cut[1].of(name), whole[1].of(name), rtol=0, atol=0)


@torch.no_grad()
def test_outputs_are_noted_before_other_hooks_change_them():
    block, x = Block(in_place=False), torch.randn(2, 3)

    def triple(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return 3 * output

    block.first.register_forward_hook(triple)
    _, recording = Recorder().record(block, NAMES, lambda: block(x), outputs_of=["first"])
    wanted = x @ block.first.weight.T + block.first.bias
    torch.testing.assert_close(recording.outputs["first"][0], wanted)


@torch.no_grad()
def test_inputs_of_inference_mode_have_no_version_and_are_copied():
    block = Block(in_place=False)
    with torch.inference_mode():
        x = torch.randn(2, 3)
    _, recording = Recorder().record(block, NAMES, lambda: block(x))
    assert recording.of("first")[0].data_ptr() != x.data_ptr()
