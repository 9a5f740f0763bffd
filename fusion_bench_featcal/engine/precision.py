"""In which precision matrices are multiplied, whatever the caller allows elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

FLOAT32, TF32, BFLOAT16 = "float32", "tf32", "bfloat16"

_ADDS_IN_FLOAT32 = torch.__version__ >= "2.8" and torch.version.hip is None

_sums: ContextVar[str] = ContextVar("sums", default=FLOAT32)


@contextmanager
def exact_products() -> Iterator[None]:
    """Context without TF32 or bfloat16 short cuts in float32 matrix products."""
    with _allowing("highest"):
        yield


@contextmanager
def summing_in(precision: str, device: torch.device) -> Iterator[None]:
    """Context in which sums over rows multiply float32 numbers as `sums_precision` asks.

    Products are always added up in float32.

    Args:
        precision: `float32`; `tf32`, which only GPUs have; or `bfloat16`: rows are rounded.
        device: Where sums are formed.
    """
    token = _sums.set(precision)
    try:
        with _allowing("high" if precision == TF32 and device.type == "cuda" else "highest"):
            yield
    finally:
        _sums.reset(token)


@contextmanager
def _allowing(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def rounded(rows: Tensor) -> Tensor:
    """Rows as sums multiply them in this context.

    In bfloat16 on an NVIDIA GPU, whose products then add up in float32 (torch 2.8 and newer);
    elsewhere with bfloat16's values in float32, which gives the same.
    """
    if _sums.get() != BFLOAT16 or rows.dtype != torch.float32:
        return rows
    short = rows.bfloat16()
    return short if rows.is_cuda and _ADDS_IN_FLOAT32 else short.float()
