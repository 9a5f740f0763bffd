"""Sources of weights: models in memory, safetensors files, LoRA adapters, and hollow experts."""

from fusion_bench_featcal.experts.expert_model import (
    ExpertModel,
    ExpertSource,
    InMemoryExpert,
    hollow_copy,
    known_bytes,
    names_under,
    source_of,
)

__all__ = [
    "ExpertModel",
    "ExpertSource",
    "InMemoryExpert",
    "hollow_copy",
    "known_bytes",
    "names_under",
    "source_of",
]
