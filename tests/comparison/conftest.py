"""Fixtures of all tests of comparisons."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_collection() -> Iterator[None]:
    """Models here are tiny, and collecting garbage takes most of a comparison's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda: 0)
        yield
