"""`method=compare` and `method=study/<name>`: mergers and post-merging methods on equal terms."""

from fusion_bench_featcal.lab.compare.algorithm import ComparisonAlgorithm
from fusion_bench_featcal.lab.compare.entries import feature_correction as FeatureCorrection
from fusion_bench_featcal.lab.compare.study import StudyAlgorithm
from fusion_bench_featcal.lab.rivals.anchor_only import AnchorOnly
from fusion_bench_featcal.lab.rivals.featcal import FeatCal
from fusion_bench_featcal.lab.rivals.interface import Chain, PostMerging
from fusion_bench_featcal.method_inputs import MethodInputs as CellInputs

__all__ = [
    "AnchorOnly",
    "CellInputs",
    "Chain",
    "ComparisonAlgorithm",
    "FeatCal",
    "FeatureCorrection",
    "PostMerging",
    "StudyAlgorithm",
]
