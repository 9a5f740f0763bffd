"""Loaders of the bundled suites. Their models and data are the package in `suites/`."""

from fusion_bench_featcal.suites.text import load_text_split

__all__ = ["load_text_split"]
