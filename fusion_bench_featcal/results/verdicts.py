"""Verdicts on the paper's observations: an interval beside what the paper says of it."""

from .items import Interval

HOLDS, FAILS, OPEN = "holds", "does not hold", "is not decided"
ABOVE, BELOW, LEVEL = "above", "below", "level with"


def verdict(difference: Interval, relation: str, margin: float = 0.0) -> str:
    """Say whether a difference has a sign, or is small; open where its interval allows both.

    Args:
        difference: Of the one side minus the other.
        relation: `above`, `below`, or `level with` (within `margin`) the other side.
        margin: Of `level with`, in the unit of the difference.

    Returns:
        One of `HOLDS`, `FAILS` and `OPEN`.
    """
    low, high = difference.low, difference.high
    if relation == LEVEL:
        if -margin <= low and high <= margin:
            return HOLDS
        return FAILS if low > margin or high < -margin else OPEN
    if relation == BELOW:
        low, high = -high, -low
    return HOLDS if low > 0 else FAILS if high < 0 else OPEN
