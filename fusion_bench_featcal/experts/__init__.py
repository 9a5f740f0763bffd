"""Sources of weights: models in memory, safetensors files, LoRA adapters, and hollow experts."""

from fusion_bench_featcal.experts.expert_model import ExpertModel, hollow_copy, names_under
from fusion_bench_featcal.experts.source import (
    ExpertSource,
    InMemoryExpert,
    SourceView,
    known_bytes,
    source_of,
)

__all__ = [
    "ExpertModel",
    "ExpertSource",
    "InMemoryExpert",
    "SourceView",
    "hollow_copy",
    "known_bytes",
    "names_under",
    "source_of",
]
