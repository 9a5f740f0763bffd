"""`method=diagnose`: blocks and tasks for which calibration helps."""

from fusion_bench_featcal.lazy import lazy_names

# `featcal report` imports the views alone, without FusionBench.
__getattr__, __dir__ = lazy_names(__name__, {"DiagnosisAlgorithm": ".algorithm"})
