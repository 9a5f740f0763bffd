"""Datasets as model inputs: labels, pictures and their tensors, texts and their tokens."""

from fusion_bench_featcal.lazy import lazy_names

__getattr__ = lazy_names(
    __name__,
    {"TextEncoder": ".text_samples", "pad_samples": ".text_samples", "sample_order": ".draws"},
)
