"""Errors as short blocks."""

from collections.abc import Callable

import pytest
from hydra.errors import InstantiationException

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.error_block import error_block
from fusion_bench_featcal.read_budgets import budget_in_bytes


def caught(work: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as error:
        work()
    return error.value


def test_own_errors_say_all_themselves():
    error = caught(lambda: FeatCalSettings(ridge_lambda=-1))
    assert error_block(error, "traceback: here").splitlines() == [
        "error: method.ridge_lambda must be a finite number >= 0 and at most 1e12, got -1",
        "traceback: here",
    ]


def test_what_hydra_wraps_is_shown():
    wrapper = InstantiationException("Error in call to target 'x'")
    wrapper.__cause__ = CalibrationError("expert 'a' has no config.json")
    assert error_block(wrapper) == "error: expert 'a' has no config.json"


def test_unexpected_errors_tell_type_and_place():
    assert error_block(KeyError("a")) == "error: unexpected KeyError: 'a'"
    error = caught(lambda: budget_in_bytes("5%", None))  # type: ignore[arg-type]
    first, *_, place = error_block(error).splitlines()
    assert first.startswith("error: unexpected TypeError: ")
    assert place.startswith("  in fusion_bench_featcal/read_budgets.py:")


@pytest.mark.parametrize("message", ["word " * 900, "\n".join("abcdefghijklmno"), "x" * 3000, ""])
@pytest.mark.parametrize("kind", [CalibrationError, RuntimeError])
def test_block_is_short(message: str, kind: type[Exception]):
    block = error_block(kind(message), "traceback: " + "/long/path" * 9)
    assert len(block) < 1000 and len(block.splitlines()) <= 8
    assert block.startswith("error:")
    assert block.endswith("/path")
    assert (" ..." in block) == (len(message) > 20)
