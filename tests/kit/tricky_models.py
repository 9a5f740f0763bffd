"""Networks whose blocks a careless engine gets wrong. Inputs are `[samples, 4]` tensors."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tiny_models import (
    ResidualBlock,
    ResidualNet,
    Stack,
    Suite,
    listed,
    samples_by_task,
    suite_of,
)
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
attention = partial(nn.MultiheadAttention, 4, 2, batch_first=True)
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
# Maps that receive short-lived views, whose addresses the next one may reuse.
views = two_maps(lambda b, x: x + (b.first(x.flip(-1)) * b.second(x.roll(1, -1))).tanh())
# Names the argument when it calls its maps.
keyword_calls = two_maps(lambda b, x: x + b.second(input=b.first(input=x).tanh()))
chain = two_maps(lambda b, x: x + b.second(b.first(x).tanh()))
# Maps that share an input of four and have two outputs together.
few_outputs = block_of(
    lambda b, x: x + (b.first(x).tanh() - 2 * b.second(x).tanh()),
    first=one_output,
    second=one_output,
)
plain = block_of(lambda b, x: x + b.only(x), only=partial(nn.Linear, 4, 4, bias=False))
biased = block_of(lambda b, x: x + b.only(x), only=linear)
# The weights of q, k and v are one parameter.
fused_attention = block_of(
    lambda b, x: x + b.only(b.attention(*[x[:, None]] * 3)[0][:, 0]),
    attention=attention,
    only=linear,
)
# A norm with gain but no shift, and a matrix of position features as an embedding.
gainful = block_of(
    lambda b, x: x + b.only(b.norm(x + b.position.weight)),
    norm=partial(nn.LayerNorm, 4, bias=False),
    position=partial(nn.Embedding, 1, 4),
    only=linear,
)


def tied() -> nn.Module:
    """Two maps that are one parameter."""
    block: Any = chain()
    block.second.weight = block.first.weight
    return block


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


class PlusFirst(ResidualBlock):
    """Adds a second input."""

    def forward(self, hidden: Tensor, first: Tensor | None = None) -> Tensor:
        return super().forward(hidden) + (0 if first is None else 0.1 * first)


class Remembering(ResidualNet):
    """Later blocks receive the output of the first one."""

    Block = PlusFirst

    def forward(self, x: Tensor) -> Tensor:
        hidden = first = self.layers[0](self.embed(x))
        for layer in list(self.layers)[1:]:
            hidden = layer(hidden, first)
        return self.head(hidden)


class PlusLast(ResidualBlock):
    """Adds the output of the block before it, out of a mapping that all blocks share."""

    def forward(self, hidden: Tensor, shared: Any = None) -> Tensor:
        before = shared.get("before", 0)
        shared["before"] = super().forward(hidden)
        return shared["before"] + 0.1 * before


class Sharing(ResidualNet):
    """Blocks pass a mapping on, into which they write."""

    Block = PlusLast

    def forward(self, x: Tensor) -> Tensor:
        hidden, shared = self.embed(x), {}
        for layer in self.layers:
            hidden = layer(hidden, shared)
        return self.head(hidden)


def net_suite(model: nn.Module) -> Suite:
    """Suite of a ResidualNet, in float64, of which `auto` finds the family."""
    return suite_of(model, samples_by_task(2, (4, 5), 4), ["layers.0", "layers.1", "layers.2"], 1)
