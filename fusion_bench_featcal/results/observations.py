"""The paper's observations that a study can check, declared once, and what the study's data say."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .items import Interval
from .long_table import FEATCAL
from .study import Group, Study, difference, label_text
from .verdicts import ABOVE, BELOW, FAILS, HOLDS, LEVEL, OPEN, verdict

MERGED = "the merged model"
_NOISE = 0.1  # costs that differ by a smaller share are level: that much they vary by themselves


@dataclass(frozen=True)
class At:
    """A row at a point; labels that are not named have the other side's or the present value."""

    row: str
    labels: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.row} ({label_text(self.labels)})" if self.labels else self.row


@dataclass(frozen=True)
class Observation:
    """One observation of the paper: a row is above, below or level with another.

    Attributes:
        study: The study that can check it.
        one: A row at a point.
        relation: `above`, `below`, or `level with` (within `margin` points).
        other: The other one.
        published: The paper's difference in points; None where it gives no number.
        source: Place in the paper.
        cost: Compare this cost by its ratio, in place of accuracy.
    """

    study: str
    one: At
    relation: str
    other: At
    source: str
    published: float | None = None
    margin: float = 1.0
    cost: str | None = None


@dataclass(frozen=True)
class Finding:
    """What a study says of an observation."""

    text: str
    verdict: str
    source: str


def _few(row: str) -> At:
    return At(row, {"samples_per_task": 8})


def _set(**labels: float) -> At:
    return At(FEATCAL, labels)


def _of_corruptions() -> Iterator[Observation]:
    """Table 6: FeatCal on corrupted images falls, and stays above merged model and baselines."""
    clean = At(FEATCAL, {"corruption": "clean", "severity": 0})
    for corruption, fall, over in (
        ("gaussian_noise", -8.9, (9.1, 4.2, 3.4)),
        ("motion_blur", -11.3, (6.7, 6.7, 8.4)),
        ("fog", -9.9, (8.1, 6.2, 7.4)),
    ):
        labels = {"corruption": corruption, "severity": 3}
        here, source = At(FEATCAL, labels), "Table 6"
        yield Observation("corruption", here, BELOW, clean, source, fall)
        for row, gain in zip((MERGED, "surgery", "prob_surgery"), over, strict=True):
            yield Observation("corruption", here, ABOVE, At(row, labels), source, gain)


_N256, _N512 = {"samples_per_task": 256}, {"samples_per_task": 512}
OBSERVATIONS = (
    Observation("samples", _few(FEATCAL), ABOVE, _few(MERGED), "Table 12", 15.4),
    Observation("samples", _few("surgery"), BELOW, _few(MERGED), "Table 12", -1.3),
    Observation("samples", _few("prob_surgery"), BELOW, _few(MERGED), "Table 12", -4.1),
    Observation("samples", _few(FEATCAL), ABOVE, _few("surgery"), "Table 12", 16.7),
    Observation("samples", _few(FEATCAL), ABOVE, _few("prob_surgery"), "Table 12", 19.5),
    Observation("samples", _few(FEATCAL), ABOVE, At("surgery", _N512), "Table 12", 5.1),
    Observation("samples", _few(FEATCAL), ABOVE, At("prob_surgery", _N512), "Table 12", 2.2),
    Observation("samples", At(FEATCAL, _N512), ABOVE, At("surgery", _N512), "Table 12", 7.7),
    Observation("samples", At(FEATCAL, _N512), ABOVE, At("prob_surgery", _N512), "Table 12", 4.8),
    Observation("samples", At(FEATCAL, _N512), ABOVE, _few(FEATCAL), "Table 12", 2.6),
    Observation("sweep", _set(ridge_lambda=0.01), LEVEL, _set(ridge_lambda=0.05), "Fig. 5"),
    Observation("sweep", _set(ridge_lambda=10), BELOW, _set(ridge_lambda=0.05), "Fig. 5"),
    Observation("sweep", _set(mix_alpha=1), BELOW, _set(mix_alpha=0.3), "Fig. 5"),
    Observation("sweep", _set(mix_alpha=0.3), ABOVE, _set(mix_alpha=0), "Fig. 5"),
    Observation("sweep", _set(anchor_rho=2), ABOVE, _set(anchor_rho=1), "Fig. 5"),
    Observation("sweep", _set(anchor_rho=4), BELOW, _set(anchor_rho=2), "Fig. 5"),
    *(
        Observation("cost", At(FEATCAL, _N256), BELOW, At(row, _N256), "Table 5", ratio, cost=cost)
        for name, cost, ratio in (
            ("surgery", "seconds", 53 / 217),
            ("prob_surgery", "seconds", 53 / 224),
            ("surgery", "peak_rss_bytes", 22.8 / 69.3),
            ("prob_surgery", "peak_rss_bytes", 22.8 / 87.0),
        )
        for row in (f"{name}:recompute", f"{name}:calibration")
    ),
    *_of_corruptions(),
    # "less than 0.5 points"
    Observation("ablation", At("featcal:no_bias_no_norm"), LEVEL, At(FEATCAL), "text", margin=0.5),
)  # fmt: skip


def find_out(study: Study, groups: Sequence[Group]) -> list[Finding]:
    """Say of every observation of the study, for each merger, whether it holds.

    Args:
        study: The study.
        groups: Its points with their loaded reports.
    """
    findings = [
        _finding(observation, merger, groups)
        for merger in study.mergers
        if merger is not None
        for observation in OBSERVATIONS
        if observation.study == study.name
    ]
    if None in findings:
        study.notes.append(
            f"{findings.count(None)} of {len(findings)} observations of the paper need rows or "
            "points that this study lacks"
        )
    return [finding for finding in findings if finding is not None]


def _finding(seen: Observation, merger: str, groups: Sequence[Group]) -> Finding | None:
    """What the data say; None where a row or a point is missing."""
    one, other = (
        (group_of(at, groups), merger if at.row == MERGED else at.row)
        for at in (seen.one, seen.other)
    )
    head = f"{merger}: {seen.one} is {seen.relation} {seen.other}"
    unit = "" if seen.cost else " points"
    if seen.cost:
        head += f" in {seen.cost.replace('_', ' ')}"
    if one[0] is None or other[0] is None:
        return None
    rows = (one[0], merger, one[1]), (other[0], merger, other[1])
    value = _ratio(*rows, seen.cost) if seen.cost else difference(*rows)
    if value is None:
        return None
    said = _verdict(seen, value)
    shown = _shown(value, seen.cost)
    paper = ""
    if seen.published is not None:
        number = f"{seen.published:.2f} times" if seen.cost else f"{seen.published:+z.1f}"
        paper = f"; paper {number}"
    return Finding(f"{head}: {said}, {shown}{unit} ({seen.source}{paper})", said, seen.source)


def _shown(value: Interval, cost: str | None) -> str:
    if cost:
        return f"{value.estimate:.2f} times"
    low, high = 100 * value.low, 100 * value.high
    return f"{100 * value.estimate:+z.1f} [{low:+z.1f}, {high:+z.1f}]"


def _verdict(seen: Observation, value: Interval) -> str:
    if seen.cost:
        ratio = value.estimate if seen.relation == BELOW else 1 / value.estimate
        return HOLDS if ratio < 1 - _NOISE else FAILS if ratio > 1 + _NOISE else OPEN
    return verdict(value, seen.relation, seen.margin / 100)


def group_of(at: At, groups: Sequence[Group]) -> Group | None:
    """The point with the labels that are named, and otherwise those of the first point."""
    wanted = {**(groups[0].labels if groups else {}), **at.labels}
    if not set(at.labels) <= set(groups[0].labels):
        return None
    return next((group for group in groups if _equal(group.labels, wanted)), None)


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return set(one) == set(other) and all(one[key] == other[key] for key in one)


def _ratio(
    one: tuple[Group, str | None, str], other: tuple[Group, str | None, str], cost: str
) -> Interval | None:
    """A cost of a row as a multiple of another's, from the means over seeds."""
    values = []
    for group, merger, name in (one, other):
        row = group.row(merger, name)
        value = None if row is None else row.cost.get(cost)
        if not isinstance(value, int | float) or value <= 0:
            return None
        values.append(float(value))
    ratio = values[0] / values[1]
    return Interval(ratio, ratio, ratio)
