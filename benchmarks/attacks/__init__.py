"""Attacks on the package: cases of `benchmarks/attack.py`, and how outcomes are judged."""
