"""Earlier name of `fusion_bench_featcal.results`."""

from fusion_bench_featcal.results import *  # noqa: F403
from fusion_bench_featcal.results import __all__  # noqa: F401
