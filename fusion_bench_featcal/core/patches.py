"""Patches of a convolution: the input rows of its linear map."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from fusion_bench_featcal.core.moments import MOST_ROWS


@dataclass(frozen=True, kw_only=True)
class Patches:
    """Geometry of a convolution over two dimensions.

    With `x` unfolded into rows, a weight `[out, in, *kernel]` is a matrix
    `[out, in * prod(kernel)]`.

    Attributes:
        kernel: Size of the kernel, one number per dimension, as for all following attributes.
        stride: Steps of the kernel.
        dilation: Steps within the kernel.
        padding: Entries added before and after each dimension.
        mode: Padding mode of `torch.nn.functional.pad`.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    mode: str

    def rows(self, x: Tensor) -> Float[Tensor, "n positions d"]:
        """Unfold samples.

        Args:
            x: `[n, channels, *dims]`.

        Returns:
            One row for each output position, `[n, positions, d]`, a view.
        """
        pads = [side for pair in reversed(self.padding) for side in pair]
        if any(pads):
            x = functional.pad(x, pads, mode=self.mode)
        columns = functional.unfold(x, self.kernel, self.dilation, stride=self.stride)
        return columns.transpose(1, 2)

    def positions(self, x: Tensor) -> int:
        """Number of positions of the output for inputs `[n, channels, *dims]`."""
        sizes = zip(x.shape[2:], self.kernel, self.stride, self.dilation, self.padding, strict=True)
        return prod((n + sum(p) - d * (k - 1) - 1) // s + 1 for n, k, s, d, p in sizes)

    def pieces(self, features: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Unfold features a few samples at a time: patches need `prod(kernel)` times more memory.

        Args:
            features: Features of the same samples, `[n, channels, *dims]` each.

        Yields:
            Rows of each, as returned by `rows`.
        """
        samples = max(1, MOST_ROWS // max(self.positions(features[0]), 1))
        for pieces in zip(*(x.split(samples) for x in features), strict=True):
            yield [self.rows(piece) for piece in pieces]
