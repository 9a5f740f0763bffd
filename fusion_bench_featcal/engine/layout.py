"""Memory layout of a tensor, so that it can be laid out alike elsewhere."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Layout of a tensor in memory.

    Attributes:
        sizes: Its shape, with repetitions (expanded dimensions).
        order: Its dimensions by falling stride.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]

    def unpacked(self, data: Tensor) -> Tensor:
        """Entries as `packed` gave them, laid out as the tensor was."""
        back = [self.order.index(dimension) for dimension in range(len(self.order))]
        return data.permute(back).expand(self.sizes)


def packed(tensor: Tensor) -> tuple[Tensor, Layout]:
    """A tensor's entries once each, contiguous, and how they lay.

    Nothing is copied where they lie side by side.
    """
    once = tensor.detach()
    for dimension in range(tensor.ndim):
        if tensor.stride(dimension) == 0:
            once = once.narrow(dimension, 0, 1)
    order = tuple(sorted(range(tensor.ndim), key=lambda d: -once.stride(d)))
    return once.permute(order).contiguous(), Layout(tuple(tensor.shape), order)
