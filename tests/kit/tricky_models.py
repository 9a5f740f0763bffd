"""Networks whose blocks a careless engine gets wrong. Inputs are `[samples, 4]` tensors."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tiny_models import Stack, Suite, listed, samples_by_task
from torch import Tensor, nn

MakeBlock = Callable[[], nn.Module]


class Block(nn.Module):
    """Modules, and a function of them and the hidden features."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.run = run
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.run(self, hidden)


def block_of(run: Callable[[Any, Tensor], Tensor], **makers: MakeBlock) -> MakeBlock:
    """Maker of blocks of the named modules that run a function."""
    return lambda: Block(run, {name: make() for name, make in makers.items()})


linear, one_output = partial(nn.Linear, 4, 4), partial(nn.Linear, 4, 1)
two_maps: Any = partial(block_of, first=linear, second=linear)


def _in_place(block: Any, hidden: Tensor) -> Tensor:
    inner = block.first(hidden).tanh_()
    update = block.second(inner)
    inner.zero_()
    hidden += update
    return hidden


# Writes into its own input and into the inputs of its modules.
in_place_residual = two_maps(_in_place)
# Runs one map twice a pass, so that its rows are those of both calls.
used_twice = two_maps(lambda b, x: x + b.second(b.first(x) * b.first(x.cos())).tanh())
# Both maps receive one tensor in large batches, and equal copies of it in small ones.
shares_sometimes = two_maps(
    lambda b, x: x + (b.first(x) * b.second(x if len(x) > 2 else x.clone())).tanh()
)
# Maps that receive short-lived views, whose addresses the next one may reuse, one by keyword.
views = two_maps(lambda b, x: x + (b.first(x.flip(-1)) * b.second(input=x.roll(1, -1))).tanh())
# Maps that share an input of four and have two outputs together.
few_outputs = block_of(
    lambda b, x: x + (b.first(x).tanh() - 2 * b.second(x).tanh()),
    first=one_output,
    second=one_output,
)
plain = block_of(lambda b, x: x + b.only(x), only=partial(nn.Linear, 4, 4, bias=False))
biased = block_of(lambda b, x: x + b.only(x), only=linear)


def stack_suite(
    make_block: MakeBlock, *, tasks: int = 2, sizes: Sequence[int] = (5, 3), seed: int = 0
) -> Suite:
    """Suite of such blocks, in float64."""
    torch.manual_seed(seed)
    inputs: Any = samples_by_task(tasks, sizes, 4, seed=seed)
    return listed(Stack(make_block, 2, 4), inputs, ["layers.0", "layers.1"], seed)


class Masked(nn.Module):
    """One block, and a mask that it does not look at."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block])

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.layers[0](x)


class Between(Stack):
    """Changes the features between its blocks, which no family knows."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = 2 * layer(hidden)
        return self.head(hidden)
