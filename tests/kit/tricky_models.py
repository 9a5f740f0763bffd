"""Networks whose blocks do what a careless engine gets wrong. Inputs are `[samples, 4]` tensors."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from tiny_models import ResidualBlock, ResidualNet, Suite, batched, normal, replayed, suite_of
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


def block_of(**makers: MakeBlock) -> Callable[[Callable[[Any, Tensor], Tensor]], MakeBlock]:
    """Turn a function into a maker of blocks of the named modules."""

    def maker(run: Callable[[Any, Tensor], Tensor]) -> MakeBlock:
        return wraps(run)(lambda: Block(run, {name: make() for name, make in makers.items()}))

    return maker


linear = partial(nn.Linear, 4, 4)
two_maps = block_of(first=linear, second=linear)


@two_maps
def in_place_residual(block: Any, hidden: Tensor) -> Tensor:
    """Writes into its own input and into what its modules received."""
    inner = block.first(hidden).tanh_()
    update = block.second(inner)
    inner.zero_()
    hidden += update
    return hidden


@two_maps
def used_twice(block: Any, hidden: Tensor) -> Tensor:
    """Runs one map twice a pass: its rows are those of both calls."""
    return hidden + block.second(block.first(hidden) * block.first(hidden.cos())).tanh()


@two_maps
def shares_sometimes(block: Any, hidden: Tensor) -> Tensor:
    """Both maps receive one tensor in large batches, and equal copies of it in small ones."""
    other = hidden if len(hidden) > 2 else hidden.clone()
    return hidden + (block.first(hidden) * block.second(other)).tanh()


@two_maps
def views(block: Any, hidden: Tensor) -> Tensor:
    """Maps that receive short-lived views, whose addresses the next one may reuse."""
    return hidden + (block.first(hidden.flip(-1)) * block.second(hidden.roll(1, -1))).tanh()


@two_maps
def keyword_calls(block: Any, hidden: Tensor) -> Tensor:
    """Names the argument when it calls its maps."""
    return hidden + block.second(input=block.first(input=hidden).tanh())


@two_maps
def chain(block: Any, hidden: Tensor) -> Tensor:
    return hidden + block.second(block.first(hidden).tanh())


def tied() -> nn.Module:
    """Two maps that are one parameter."""
    block: Any = chain()
    block.second.weight = block.first.weight
    return block


def through_only(block: Any, hidden: Tensor) -> Tensor:
    return hidden + block.only(hidden)


@block_of(first=partial(nn.Linear, 4, 1), second=partial(nn.Linear, 4, 1))
def few_outputs(block: Any, hidden: Tensor) -> Tensor:
    """Maps that share an input of four and have two outputs together."""
    return hidden + (block.first(hidden).tanh() - 2 * block.second(hidden).tanh())


plain = block_of(only=partial(nn.Linear, 4, 4, bias=False))(through_only)  # zero in, zero out
biased = block_of(only=linear)(through_only)
idle = block_of(only=linear, spare=linear)(through_only)


@block_of(attention=partial(nn.MultiheadAttention, 4, 2, batch_first=True), only=linear)
def fused_attention(block: Any, hidden: Tensor) -> Tensor:
    """The weights of q, k and v are one parameter."""
    mixed, _ = block.attention(hidden[:, None], hidden[:, None], hidden[:, None])
    return hidden + block.only(mixed[:, 0])


@block_of(norm=partial(nn.LayerNorm, 4, bias=False), place=partial(nn.Embedding, 1, 4), only=linear)
def gainful(block: Any, hidden: Tensor) -> Tensor:
    """A norm with gain but no shift, and a matrix of position features as an embedding."""
    return hidden + block.only(block.norm(hidden + block.place.weight))


class Stack(nn.Module):
    """Two blocks between two linear maps that are not calibrated."""

    def __init__(self, make_block: MakeBlock) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(make_block() for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def stack_suite(
    make_block: MakeBlock, *, tasks: int = 2, sizes: Sequence[int] = (5, 3), seed: int = 0
) -> Suite:
    """Suite of such blocks, in float64."""
    torch.manual_seed(seed)
    inputs: dict[str, list] = {
        f"task_{index}": batched((index + 1) * normal(seed + index, sum(sizes), 4) + index, sizes)
        for index in range(tasks)
    }
    return replayed(Stack(make_block), inputs, ["layers.0", "layers.1"], seed)


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


class Backwards(ResidualNet):
    """Blocks run from the last to the first."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in reversed(self.layers):
            hidden = layer(hidden)
        return self.head(hidden)


def net_suite(model: nn.Module) -> Suite:
    """Suite of a ResidualNet, in float64, of which `auto` finds the family."""
    inputs: dict[str, list] = {t: batched(normal(n, 9, 4), (4, 5)) for n, t in enumerate("ab")}
    return suite_of(model, inputs, ["layers.0", "layers.1", "layers.2"], 1)
