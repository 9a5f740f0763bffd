"""Comparisons, diagnoses and reports, which nothing else of the package imports."""

from typing import TYPE_CHECKING

from fusion_bench_featcal.lazy import lazy_names

if TYPE_CHECKING:
    from .report.load import load, load_notes

__all__ = ["load", "load_notes"]

__getattr__ = lazy_names(__name__, {"load": ".report.load", "load_notes": ".report.load"})
