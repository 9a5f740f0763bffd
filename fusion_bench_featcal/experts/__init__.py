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
from fusion_bench_featcal.lazy import lazy_names

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

__getattr__ = lazy_names(
    __name__,
    {
        "LoraExpert": ".lora",
        "MergedOnRead": ".merging",
        "OtherAdapterError": ".lora",
        "SafetensorsExpert": ".safetensors_files",
        "check_same_function": ".model_config",
        "granted": ".budget",
        "merged_by_peft": ".lora",
        "notes_on_experts": ".likeness",
    },
)
