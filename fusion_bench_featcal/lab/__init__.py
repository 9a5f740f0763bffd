"""Comparisons, studies, diagnoses and reports, which nothing else of the package imports."""
