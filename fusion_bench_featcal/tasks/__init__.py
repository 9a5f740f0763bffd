"""Tasks defined in YAML: their data, class names, prompts and metrics.

Names are imported on first use, because `load_images` does not need FusionBench.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion_bench_featcal.data.derived_images import NoiseImages, corrupted, mixed
    from fusion_bench_featcal.data.images import load_images
    from fusion_bench_featcal.tasks.clip_pool import ClipTaskPool
    from fusion_bench_featcal.tasks.text_pool import TextTaskPool

__all__ = ["ClipTaskPool", "NoiseImages", "TextTaskPool", "corrupted", "load_images", "mixed"]

_DERIVED = "fusion_bench_featcal.data.derived_images"

_HOMES = {
    "ClipTaskPool": f"{__name__}.clip_pool",
    "TextTaskPool": f"{__name__}.text_pool",
    "NoiseImages": _DERIVED,
    "corrupted": _DERIVED,
    "mixed": _DERIVED,
    "load_images": "fusion_bench_featcal.data.images",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
