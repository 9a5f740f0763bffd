"""Tasks defined in YAML alone: where their data lie, their class names, their prompts and metrics.

`ClipTaskPool` evaluates image models and `TextTaskPool` language models; `load_images` loads
folders, tables and hub data sets, for task pools and model pools alike. Names are imported when
asked for: `load_images` needs no FusionBench.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion_bench_featcal.tasks.clip import ClipTaskPool
    from fusion_bench_featcal.tasks.loading import load_images
    from fusion_bench_featcal.tasks.text import TextTaskPool

__all__ = ["ClipTaskPool", "TextTaskPool", "load_images"]


def __getattr__(name: str) -> Any:
    if name == "ClipTaskPool":
        from fusion_bench_featcal.tasks.clip import ClipTaskPool

        return ClipTaskPool
    if name == "TextTaskPool":
        from fusion_bench_featcal.tasks.text import TextTaskPool

        return TextTaskPool
    if name == "load_images":
        from fusion_bench_featcal.tasks.loading import load_images

        return load_images
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
