"""The bundled suites: data, weights and loaders; `scripts/suites` of the source built them."""

from fusion_bench_featcal.suites.text import load_text_split

__all__ = ["load_text_split"]
