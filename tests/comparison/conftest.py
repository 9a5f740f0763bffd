"""Fixtures of all tests of comparisons."""

from comparison_parts import no_collection  # noqa: F401
