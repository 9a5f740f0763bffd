"""Sources of weights, and experts with one block at a time in memory."""

from fusion_bench_featcal.experts.expert import (
    LazyModel,
    hollow_copy,
    names_under,
    put_tensor,
)
from fusion_bench_featcal.experts.source import (
    ExpertSource,
    InMemoryExpert,
    SourceView,
    source_of,
)

__all__ = [
    "ExpertSource",
    "InMemoryExpert",
    "LazyModel",
    "SourceView",
    "hollow_copy",
    "names_under",
    "put_tensor",
    "source_of",
]
