"""Patches of a convolution: the input rows of one linear map for each of its groups."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from fusion_bench_featcal.core.moments import MOST_ROWS


@dataclass(frozen=True, kw_only=True)
class Patches:
    """Geometry of a convolution over one or two dimensions.

    With `x` unfolded into rows, a weight `[out, in / groups, *kernel]` is the matrices
    `[out / groups, in / groups * prod(kernel)]` of its groups, one below the other.

    Attributes:
        channels: Input channels.
        groups: Groups of channels.
        kernel: Size of the kernel, one number per dimension, as for all following attributes.
        stride: Steps of the kernel.
        dilation: Steps within the kernel.
        padding: Entries added before and after each dimension.
        mode: Padding mode of `torch.nn.functional.pad`.
    """

    channels: int
    groups: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    mode: str

    @property
    def width(self) -> int:
        """Inputs of one group's linear map."""
        return self.channels // self.groups * prod(self.kernel)

    def rows(self, x: Tensor) -> Float[Tensor, "n positions d"]:
        """Unfold samples.

        Args:
            x: `[n, channels, *dims]`.

        Returns:
            One row for each output position, with the groups' rows side by side: `[n, positions,
            groups * width]`, a view.
        """
        pads = [side for pair in reversed(self.padding) for side in pair]
        if any(pads):
            x = functional.pad(x, pads, mode=self.mode)
        geometry = [self.kernel, self.dilation, self.stride]
        if len(self.kernel) == 1:
            x, geometry = x[:, :, None], [(1, *part) for part in geometry]
        kernel, dilation, stride = geometry
        columns = functional.unfold(x, kernel, dilation=dilation, stride=stride)
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
