"""`method=compare`: mergers and post-merging methods on equal terms."""

from fusion_bench_featcal.lab.compare.algorithm import ComparisonAlgorithm
from fusion_bench_featcal.lab.rivals.interface import PostMerging
from fusion_bench_featcal.method_inputs import MethodInputs

__all__ = ["ComparisonAlgorithm", "MethodInputs", "PostMerging"]
