"""Errors as short blocks."""

from typing import Any

import pytest
from hydra.errors import InstantiationException

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.error_block import error_block
from fusion_bench_featcal.read_budgets import budget_in_bytes


def test_errors_have_their_message_and_unexpected_ones_type_and_place():
    wrapper = InstantiationException("Error in call to target 'x'")
    wrapper.__cause__ = CalibrationError("expert 'a' has no config.json")
    assert error_block(wrapper) == "error: expert 'a' has no config.json"
    assert error_block(KeyError("a")) == "error: unexpected KeyError: 'a'"
    budget: Any = None
    with pytest.raises(TypeError) as caught:
        budget_in_bytes("5%", budget)
    first, *_, place = error_block(caught.value).splitlines()
    assert first.startswith("error: unexpected TypeError: ")
    assert place.startswith("  in fusion_bench_featcal/read_budgets.py:")


@pytest.mark.parametrize("message", ["word " * 900, "\n".join("abcdefghijklmno"), "x" * 3000, ""])
@pytest.mark.parametrize("kind", [CalibrationError, RuntimeError])
def test_block_is_short(message: str, kind: type[Exception]):
    block = error_block(kind(message), "traceback: " + "/long/path" * 9)
    assert len(block) < 1000 and len(block.splitlines()) <= 8
    assert block.startswith("error:") and block.endswith("/path")
    assert (" ..." in block) == (len(message) > 20)
