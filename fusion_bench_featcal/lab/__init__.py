"""Comparisons, rivals and diagnoses, which nothing else of the package imports."""
