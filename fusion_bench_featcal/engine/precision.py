"""Precision of the sums over rows, and of what is formed from them."""

import torch

from fusion_bench_featcal.core.cholesky import SINGLE_LAMBDA, solve_dtype
from fusion_bench_featcal.core.moments import MOMENT_DTYPE
from fusion_bench_featcal.settings import FeatCalSettings

AUTO, FLOAT64 = "auto", "float64"

MAX_ROUNDING = 1e-3
"""Largest accepted float32 rounding of the normal equations, relative to lambda."""


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
