"""`method=diagnose`: blocks and tasks for which calibration helps."""

from fusion_bench_featcal.lab.diagnosis.algorithm import DiagnosisAlgorithm

__all__ = ["DiagnosisAlgorithm"]
