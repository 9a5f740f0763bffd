"""Tasks defined in YAML: their data, class names, prompts and metrics.

Names are imported on first use, because `load_images` does not need FusionBench.
"""

from typing import TYPE_CHECKING

from fusion_bench_featcal.lazy import lazy_names

if TYPE_CHECKING:
    from fusion_bench_featcal.data.corruptions import corrupted as corrupted
    from fusion_bench_featcal.data.images import load_images as load_images
    from fusion_bench_featcal.tasks.clip_pool import ClipTaskPool as ClipTaskPool
    from fusion_bench_featcal.tasks.encoder_pool import EncoderTaskPool as EncoderTaskPool
    from fusion_bench_featcal.tasks.harness import LMEvalTaskPool as LMEvalTaskPool
    from fusion_bench_featcal.tasks.open_clip import OpenClipTaskPool as OpenClipTaskPool
    from fusion_bench_featcal.tasks.speech_pool import SpeechTaskPool as SpeechTaskPool
    from fusion_bench_featcal.tasks.text_pool import TextTaskPool as TextTaskPool
    from fusion_bench_featcal.tasks.text_rows import load_chats as load_chats
    from fusion_bench_featcal.tasks.text_rows import load_glue as load_glue

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ClipTaskPool": ".clip_pool",
        "EncoderTaskPool": ".encoder_pool",
        "LMEvalTaskPool": ".harness",
        "OpenClipTaskPool": ".open_clip",
        "SpeechTaskPool": ".speech_pool",
        "TextTaskPool": ".text_pool",
        "corrupted": "..data.corruptions",
        "load_chats": ".text_rows",
        "load_glue": ".text_rows",
        "load_images": "..data.images",
    },
)
