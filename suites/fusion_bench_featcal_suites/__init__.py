"""Models and data of the suites bundled with fusion_bench_featcal, in the folder `data`."""

__version__ = "0.2.0"
