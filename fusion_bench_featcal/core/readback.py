"""The one way in which the host looks at what a device has computed."""

from collections.abc import Sequence

import torch
from torch import Tensor


def read_back(values: Sequence[Tensor]) -> list[float]:
    """Copy numbers to the host, all at once: on a GPU it waits, once, for what computes them.

    Args:
        values: Scalars or vectors, of one device and any dtypes.

    Returns:
        Their entries in order.
    """
    if not values:
        return []
    wide = torch.float32 if values[0].device.type == "mps" else torch.float64
    return torch.cat([value.reshape(-1).to(wide) for value in values]).tolist()
