"""What a device has computed and the host must look at: asked for all at once, once a block."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fusion_bench_featcal.core.readback import read_back
from fusion_bench_featcal.settings import CalibrationError


class Doubt(NamedTuple):
    """A scalar that ends the run, with an error, unless it is 0."""

    sign: Tensor
    error: CalibrationError


def refuse_doubtful(doubts: Sequence[Doubt], further: Sequence[Tensor] = ()) -> list[float]:
    """Look at all doubts at once, and at other numbers with them.

    Args:
        doubts: The doubts, in the order in which they count.
        further: Scalars of the same device.

    Returns:
        The further numbers.

    Raises:
        CalibrationError: The first doubt's that is founded.
    """
    values = read_back([*(doubt.sign for doubt in doubts), *further])
    for doubt, value in zip(doubts, values, strict=False):
        if value != 0:
            raise doubt.error
    return values[len(doubts) :]
