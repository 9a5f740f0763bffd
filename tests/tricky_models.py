"""Networks whose blocks do what a careless engine gets wrong. Inputs are `[samples, 4]` tensors."""

from collections.abc import Callable, Sequence

import torch
from tiny_models import Suite, batched, normal, replayed
from torch import Tensor, nn


class Stack(nn.Module):
    """Blocks between two linear maps that are not calibrated."""

    def __init__(self, make_block: Callable[[], nn.Module], depth: int = 2, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.layers = nn.ModuleList(make_block() for _ in range(depth))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class TwoMaps(nn.Module):
    """Base of the blocks below: two linear maps of the same width."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)


class InPlaceResidual(TwoMaps):
    """Writes into its own input and into what its modules received."""

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.first(hidden).tanh_()
        update = self.second(inner)
        inner.zero_()
        hidden += update
        return hidden


class SameTensorChanged(TwoMaps):
    """Both maps receive one tensor object, but its contents change between them."""

    def forward(self, hidden: Tensor) -> Tensor:
        shared = hidden.clone()
        left = self.first(shared)
        shared.mul_(hidden.flip(-1))
        return hidden + (left * self.second(shared)).tanh()


class UsedTwice(TwoMaps):
    """Runs one map twice a pass: its rows are those of both calls."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.second(self.first(hidden) * self.first(hidden.cos())).tanh()


class SharesSometimes(TwoMaps):
    """Both maps receive one tensor in large batches, and equal copies of it in small ones."""

    def forward(self, hidden: Tensor) -> Tensor:
        other = hidden if len(hidden) > 2 else hidden.clone()
        return hidden + (self.first(hidden) * self.second(other)).tanh()


class Views(TwoMaps):
    """Maps that receive short-lived views, whose addresses the next one may reuse."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + (self.first(hidden.flip(-1)) * self.second(hidden.roll(1, -1))).tanh()


class KeywordCalls(TwoMaps):
    """Names the argument when it calls its maps."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.second(input=self.first(input=hidden).tanh())


class Plain(nn.Module):
    """One linear map without bias and without a norm before it: zero in, zero out."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(4, 4, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.only(hidden)


class Attention(nn.Module):
    """torch's attention, whose q, k and v weights are one fused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.only = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed, _ = self.attention(hidden[:, None], hidden[:, None], hidden[:, None])
        return hidden + self.only(mixed[:, 0])


class Mixture(nn.Module):
    """Experts of a mixture, stacked in one parameter `[experts, 4, 4]`."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(4, 4)
        self.experts = nn.ParameterDict({"stacked": nn.Parameter(torch.randn(3, 4, 4))})

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = torch.einsum("nd,edf->nf", hidden, self.experts["stacked"])
        return hidden + self.only(mixed)


class Convolution(nn.Module):
    """A two-dimensional convolution beside a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv2d(1, 1, 1)
        self.only = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.only(self.filter(hidden[:, None, None])[:, 0, 0])


class Tied(nn.Module):
    """Two maps that are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.second(self.first(hidden).tanh())


class Gainful(nn.Module):
    """A norm with gain but no shift, and a matrix of position features as an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, bias=False)
        self.place = nn.Embedding(1, 4)
        self.only = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.only(self.norm(hidden + self.place.weight))


def stack_suite(
    make_block: Callable[[], nn.Module],
    *,
    tasks: int = 2,
    sizes: Sequence[int] = (5, 3),
    seed: int = 0,
) -> Suite:
    """Suite of such blocks, in float64."""
    torch.manual_seed(seed)
    inputs: dict[str, list] = {
        f"task_{index}": batched((index + 1) * normal(seed + index, sum(sizes), 4) + index, sizes)
        for index in range(tasks)
    }
    return replayed(Stack(make_block), inputs, ["layers.0", "layers.1"], seed)
