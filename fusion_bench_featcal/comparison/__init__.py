"""`method=compare`: every merger with every post-merging method, on equal terms."""

from fusion_bench_featcal.comparison.algorithm import ComparisonAlgorithm
from fusion_bench_featcal.comparison.entries import feature_correction as FeatureCorrection
from fusion_bench_featcal.methods.anchor_only import AnchorOnly
from fusion_bench_featcal.methods.featcal import FeatCal
from fusion_bench_featcal.methods.interface import Chain, PostMerging
from fusion_bench_featcal.methods.interface import MethodInputs as CellInputs

__all__ = [
    "AnchorOnly",
    "CellInputs",
    "Chain",
    "ComparisonAlgorithm",
    "FeatCal",
    "FeatureCorrection",
    "PostMerging",
]
