"""Fixtures of all tests of studies."""

from comparison_parts import no_collection  # noqa: F401
