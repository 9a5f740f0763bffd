"""One calibration: its models and samples, processes, finished blocks and log."""

from fusion_bench_featcal.lazy import lazy_names

__getattr__ = lazy_names(__name__, {"CheckpointFolder": ".checkpoint", "Processes": ".processes"})
