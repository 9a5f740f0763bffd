"""`method=diagnose`: blocks, tasks and classes for which calibration helps."""

from fusion_bench_featcal.lab.diagnosis.algorithm import DiagnosisAlgorithm

__all__ = ["DiagnosisAlgorithm"]
