"""Precision of the sums over rows, and of what is formed from them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from fusion_bench_featcal.core.cholesky import SINGLE_LAMBDA, solve_dtype
from fusion_bench_featcal.core.float32_products import EXACT, multiplying_in
from fusion_bench_featcal.core.moments import MOMENT_DTYPE
from fusion_bench_featcal.settings import FeatCalSettings

AUTO, FLOAT32, FLOAT64, TF32, BFLOAT16 = "auto", "float32", "float64", "tf32", "bfloat16"

MAX_ROUNDING = 1e-3
"""Largest accepted float32 rounding of the normal equations, relative to lambda."""

_ADDS_IN_FLOAT32 = torch.__version__ >= "2.8" and torch.version.hip is None

_sums: ContextVar[str] = ContextVar("sums", default=FLOAT32)


def fold_dtype(settings: FeatCalSettings, tasks: int, device: torch.device) -> torch.dtype:
    """Least precise dtype of the products that follow the sums over rows.

    Their float32 rounding is at most that of `tasks` Gram matrices of Frobenius norm 1, and reaches
    the update divided by lambda.

    Args:
        settings: `ridge_lambda` and `sums_precision` are used.
        tasks: Number of tasks.
        device: Device of the calibration; where it has no float64 (MPS), float32 is returned.
    """
    rounding = torch.finfo(torch.float32).eps * tasks
    is_small = settings.ridge_lambda < max(SINGLE_LAMBDA, rounding / MAX_ROUNDING)
    wide = is_small or settings.sums_precision == FLOAT64
    return solve_dtype(device) if wide else MOMENT_DTYPE


def row_dtype(settings: FeatCalSettings, tasks: int, device: torch.device) -> torch.dtype:
    """Least precise dtype of the sums over rows; arguments as for `fold_dtype`."""
    if settings.sums_precision in (AUTO, FLOAT64):
        return fold_dtype(settings, tasks, device)
    return MOMENT_DTYPE


def coarse_sums_warning(settings: FeatCalSettings, tasks: int, device: torch.device) -> str:
    """Warning about sums that are less precise than lambda needs; empty if they are not."""
    needed = fold_dtype(settings.replace(sums_precision=AUTO), tasks, torch.device("cpu"))
    if row_dtype(settings, tasks, device) == needed or needed == MOMENT_DTYPE:
        return ""
    which = f"method.sums_precision={settings.sums_precision}"
    if settings.sums_precision == AUTO:
        which = f"{device.type}, which has no float64,"
    return (
        f"{which} is too coarse for method.ridge_lambda = {settings.ridge_lambda:g}: rounding of "
        "the sums moves the update by about 1 % (float32) or up to 24 % (bfloat16). Set "
        "method.sums_precision=auto on a CPU or CUDA device, or raise method.ridge_lambda to "
        f"{SINGLE_LAMBDA:g}"
    )


@contextmanager
def summing_in(precision: str, device: torch.device) -> Iterator[None]:
    """Context in which sums over rows multiply float32 numbers as `sums_precision` asks.

    Products are always added up in float32 or better.

    Args:
        precision: `tf32`, which only GPUs have; `bfloat16`: rows are rounded; else exact.
        device: Device of the sums.
    """
    token = _sums.set(precision)
    try:
        with multiplying_in(TF32 if precision == TF32 and device.type == "cuda" else EXACT):
            yield
    finally:
        _sums.reset(token)


def rounded(rows: Tensor) -> Tensor:
    """Rows as sums multiply them in this context.

    In bfloat16 on an NVIDIA GPU, whose products then add up in float32 (torch 2.8 and newer);
    elsewhere with bfloat16's values in float32, which gives the same.
    """
    if _sums.get() != BFLOAT16 or rows.dtype != torch.float32:
        return rows
    short = rows.bfloat16()
    return short if rows.is_cuda and _ADDS_IN_FLOAT32 else short.float()
