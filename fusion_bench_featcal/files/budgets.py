"""Read budgets: limits on the bytes of expert weights, as in the setting `expert_read_budget`."""

import math
import re
from fractions import Fraction
from typing import Any

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?) ?(%|B|([KMGT])(i?)B)")


def budget_in_bytes(budget: float | str, full: int) -> int:
    """Return a read budget as a number of bytes, rounded down.

    Args:
        budget: The setting `expert_read_budget`.
        full: Bytes of a full read, for percentages.
    """
    if not isinstance(budget, str):
        return int(budget)
    match = _AMOUNT.fullmatch(budget)
    assert match is not None, "settings are checked"
    number, unit, prefix, binary = match.groups()
    if unit == "%":
        return int(Fraction(number) * full / 100)
    return int(Fraction(number) * (1024 if binary else 1000) ** " KMGT".index(prefix or " "))


def is_read_budget(value: Any) -> bool:
    """Return True for a number of bytes, an amount with a unit, or a percentage up to 100."""
    if not isinstance(value, str):
        return type(value) in (int, float) and value >= 1 and value % 1 == 0
    match = _AMOUNT.fullmatch(value)
    return match is not None and 0 < Fraction(match[1]) <= (100 if match[2] == "%" else math.inf)
