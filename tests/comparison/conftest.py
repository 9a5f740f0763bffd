"""Fixtures of all tests of comparisons."""

import pytest

from fusion_bench_featcal.comparison import cells, reports


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models here are tiny, and collecting garbage takes most of a comparison's time."""
    monkeypatch.setattr(cells.gc, "collect", lambda: 0)


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than comparing; the tests of figures put it back."""
    monkeypatch.setattr(reports, "draw_figures", lambda folder, runs: None)
