"""`method=compare`: mergers and post-merging methods on equal terms."""

from fusion_bench_featcal.lab.compare.algorithm import ComparisonAlgorithm

__all__ = ["ComparisonAlgorithm"]
