"""`method=study/<name>`: comparisons along axes, such as samples, settings or tasks."""

from fusion_bench_featcal.lab.studies.algorithm import StudyAlgorithm

__all__ = ["StudyAlgorithm"]
