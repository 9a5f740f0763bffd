"""The bundled suites: data, weights, and the seeded builders that made them.

Import the module that is needed (`suites.image`, `suites.text`, ...); importing this package costs
nothing.
"""

from fusion_bench_featcal.suites.text import load_text_split

__all__ = ["load_text_split"]
