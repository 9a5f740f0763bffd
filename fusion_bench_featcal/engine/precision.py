"""Matrix products of the statistics: in full precision whatever the caller allows elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_products() -> Iterator[None]:
    """Context without TF32 or bfloat16 short cuts in float32 matrix products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
