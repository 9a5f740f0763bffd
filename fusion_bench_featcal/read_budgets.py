"""Read budgets: amounts of expert weights to read, as the setting `expert_read_budget` has them."""

import re
from fractions import Fraction
from typing import Any

from fusion_bench_featcal.setting_fields import is_number

_UNITS = {"B": 1} | {
    prefix + end: base**power
    for end, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}
_AMOUNT = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)}|%)")


def budget_in_bytes(budget: float | str, full: int) -> int:
    """Return a read budget as a number of bytes, rounded down.

    Args:
        budget: The setting `expert_read_budget`.
        full: Bytes of a full read, of which a percentage is a share.
    """
    if not isinstance(budget, str):
        return int(budget)
    number, unit = _amount(budget)
    return int(number * full / 100 if unit == "%" else number * _UNITS[unit])


def is_read_budget(value: Any) -> bool:
    """Return True for a number of bytes, an amount with a unit, or a percentage up to 100."""
    if not isinstance(value, str):
        return is_number(value) and value >= 1 and value == int(value)
    number, unit = _amount(value)
    return number > 0 and (unit != "%" or number <= 100) and bool(unit)


def _amount(text: str) -> tuple[Fraction, str]:
    match = _AMOUNT.fullmatch(text)
    return (Fraction(match[1]), match[2]) if match else (Fraction(0), "")
