"""`method=diagnose`: where along the depth, for which task and class calibration helps."""

from fusion_bench_featcal.lab.diagnosis.algorithm import DiagnosisAlgorithm

__all__ = ["DiagnosisAlgorithm"]
