"""Generated parts of README and docs."""

from pathlib import Path

import pytest
import write_tables


@pytest.mark.parametrize("page", write_tables.PAGES, ids=lambda page: page.name)
def test_generated_parts_are_fresh(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert write_tables.rewritten(page) == text, "python scripts/write_tables.py"
