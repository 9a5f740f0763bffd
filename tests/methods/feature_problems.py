"""Features whose drift is known."""

import torch
from torch import Tensor


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def planted_drift(
    *, samples: int = 256, width: int = 24, rank: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Merged and expert features that differ by `U relu(D f)` of a low rank, what Surgery can say.

    The last `samples` rows are for testing: twice as many are returned.
    """
    merged = normal(seed, 2 * samples, width)
    down = normal(seed + 1, rank, width) / width**0.5
    up = normal(seed + 2, width, rank)
    return merged, merged - torch.relu(merged @ down.T) @ up.T


def distance(left: Tensor, right: Tensor) -> float:
    return (left - right).abs().mean().item()
