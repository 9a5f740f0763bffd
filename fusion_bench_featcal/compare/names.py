"""Row names that mean the same in every report, and the measure they define."""

BASE = "base"
EXPERTS = "experts"
FEATCAL = "featcal"
AVERAGE = "average"
UNAVAILABLE = "unavailable"


def recovered_share(value: float, merged: float, expert: float) -> float | None:
    """Share of the gap between merged and expert that `value` closes; None if there is no gap."""
    gap = expert - merged
    return (value - merged) / gap if gap > 0 else None
