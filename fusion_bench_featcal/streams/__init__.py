"""Batches that pass through the models block by block, and sums over their positions."""

from fusion_bench_featcal.lazy import lazy_names

__getattr__ = lazy_names(
    __name__, {"Batch": ".batch", "Positions": ".batch", "Streams": ".streams"}
)
