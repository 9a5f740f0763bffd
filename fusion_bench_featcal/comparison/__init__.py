"""`method=compare`: every merger with every post-merging method, on equal terms."""

from fusion_bench_featcal.comparison.algorithm import ComparisonAlgorithm
from fusion_bench_featcal.comparison.baseline_methods import AnchorOnly, FeatureCorrection
from fusion_bench_featcal.comparison.methods import CellInputs, Chain, FeatCal, PostMerging

__all__ = [
    "AnchorOnly",
    "CellInputs",
    "Chain",
    "ComparisonAlgorithm",
    "FeatCal",
    "FeatureCorrection",
    "PostMerging",
]
