"""Averages that the FeatCal paper (arXiv 2605.13030) prints, with what is known against them."""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .names import AVERAGE, BASE, EXPERTS

_FILE = Path(__file__).with_name("paper_results.csv")


@dataclass(frozen=True)
class Published:
    """One published average.

    Attributes:
        value: Accuracy in 0..1.
        source: Where it stands, for example `Table 1`.
        note: Why not to trust it; empty if nothing is known.
    """

    value: float
    source: str
    note: str


def published_average(suite: str, upstream: str | None, name: str) -> Published | None:
    """The paper's average for a row.

    Args:
        suite: Model pool, for example `clip-vit-base-patch32_TA8`.
        upstream: The upstream merger's name.
        name: The row: the upstream merger's own name, a post-merging method's, `base` or `experts`.

    Returns:
        None where the paper has no such row. A row `featcal:<preset>` has none: the paper's numbers
        are for its own settings.
    """
    if name in (BASE, EXPERTS):
        return _averages().get((suite, "", name))
    return _averages().get((suite, upstream or "", "" if name == upstream else name))


@cache
def _averages() -> dict[tuple[str, str, str], Published]:
    with _FILE.open(encoding="utf-8", newline="") as lines:
        return {
            (row["setting"], row["upstream"], row["post_merging"]): Published(
                float(row["value"]) / 100, row["source"], row["note"]
            )
            for row in csv.DictReader(lines)
            if row["metric"] == AVERAGE
        }
