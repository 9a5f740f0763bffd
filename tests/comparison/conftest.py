"""Fixtures of all tests of comparisons."""

import pytest

from fusion_bench_featcal.lab.compare import cells


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models here are tiny, and collecting garbage takes most of a comparison's time."""
    monkeypatch.setattr(cells.gc, "collect", lambda: 0)
