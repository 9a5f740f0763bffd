"""The bundled suites: data, weights and loaders. `scripts/suites` builds them."""

from fusion_bench_featcal.suites.text import load_text_split

__all__ = ["load_text_split"]
