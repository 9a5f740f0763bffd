"""`featcal calibrate`: models and data in folders, without FusionBench and without Hydra."""

from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.run import run

__all__ = ["Request", "run"]
