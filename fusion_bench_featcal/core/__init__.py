"""The mathematics of FeatCal: tensors in, tensors out."""

from fusion_bench_featcal.core.cholesky import UnsolvedError
from fusion_bench_featcal.core.drift import drift_norm_sum
from fusion_bench_featcal.core.moments import (
    LinearMoments,
    LinearSums,
    NormMoments,
    frobenius_norm,
    linear_moments,
    norm_moments,
    normalised_input,
    task_weight,
)
from fusion_bench_featcal.core.solve import (
    LinearSolution,
    LinearSystem,
    NormSystem,
    extrapolate_anchor,
    solve_bias,
    solve_linear,
    solve_norm,
)

__all__ = [
    "LinearMoments",
    "LinearSolution",
    "LinearSums",
    "LinearSystem",
    "NormMoments",
    "NormSystem",
    "UnsolvedError",
    "drift_norm_sum",
    "extrapolate_anchor",
    "frobenius_norm",
    "linear_moments",
    "norm_moments",
    "normalised_input",
    "solve_bias",
    "solve_linear",
    "solve_norm",
    "task_weight",
]
