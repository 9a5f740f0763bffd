"""The mathematics of FeatCal: tensors in, tensors out."""

from fusion_bench_featcal.core.cholesky import UnsolvedError
from fusion_bench_featcal.core.drift import drift_norm_sum
from fusion_bench_featcal.core.folded import FoldedLinear
from fusion_bench_featcal.core.folded_norm import FoldedNorm
from fusion_bench_featcal.core.moments import (
    LinearMoments,
    NormMoments,
    frobenius_norm,
    linear_moments,
    norm_moments,
    normalised_input,
    task_weight,
)
from fusion_bench_featcal.core.solve import (
    LinearSolution,
    extrapolate_anchor,
    solve_bias,
    solve_linear,
    solve_norm,
)

__all__ = [
    "FoldedLinear",
    "FoldedNorm",
    "LinearMoments",
    "LinearSolution",
    "NormMoments",
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
