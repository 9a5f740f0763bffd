"""Rules: frozen dataclasses whose fields are their numbers, one file each."""

from fusion_bench_featcal.rules.rule import GroupSums, Linear, Rule, Solved

__all__ = ["GroupSums", "Linear", "Rule", "Solved"]
