"""Sources of weights, and experts with one block at a time in memory."""

from fusion_bench_featcal.experts.expert import (
    ExpertModel,
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
    "ExpertModel",
    "ExpertSource",
    "InMemoryExpert",
    "SourceView",
    "hollow_copy",
    "names_under",
    "put_tensor",
    "source_of",
]
