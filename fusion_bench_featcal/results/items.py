"""Flags per test item of each row, and intervals from them by a paired bootstrap."""

import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusion_bench_featcal.files import LOG_DIR_SETTING, ReportError, write_atomic

ITEMS_FILE = "items.npz"
_MOST_BYTES = 2**31  # of all flags, unpacked

Items = dict[str, dict[str, NDArray[np.bool_]]]
"""Row name -> task -> bool `[items]`, in the test set's order."""


def as_correct(values: Any, place: str) -> NDArray[np.bool_]:
    """Turn one task's flags (array, list or CPU tensor of bool or 0/1) into bool `[items]`."""
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0:
        raise ReportError(f"{place}: expected one flag per test item, got shape {array.shape}")
    if array.dtype != np.bool_ and not np.isin(array, (0, 1)).all():
        raise ReportError(f"{place}: flags per test item must be true or false")
    return array.astype(np.bool_)


def save_items(directory: Path, items: Mapping[str, Mapping[str, Any]],
               setting: str = LOG_DIR_SETTING) -> Path:  # fmt: skip
    """Write `items.npz` into an existing folder; `setting` chose it.

    Row and task names may hold any character: arrays are numbered, and a JSON index (stored as
    bytes, so that no pickle is involved) tells which is which.
    """
    index = [(row, task) for row, tasks in items.items() for task in tasks]
    arrays: dict[str, NDArray[Any]] = {
        f"array_{number}": as_correct(items[row][task], f"row '{row}', task '{task}'")
        for number, (row, task) in enumerate(index)
    }
    arrays["index"] = np.frombuffer(json.dumps(index).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # pyright: ignore[reportArgumentType]
    return write_atomic(Path(directory) / ITEMS_FILE, _sealed(buffer.getvalue()), setting)


def _sealed(archive: bytes) -> bytes:
    """Put the archive's digest into its comment, with which every zip file ends."""
    digest = hashlib.sha256(archive).hexdigest().encode()
    return archive[:-2] + len(digest).to_bytes(2, "little") + digest


def _check_seal(content: bytes, path: Path) -> None:
    length = 2 * hashlib.sha256().digest_size
    has_seal = content[-length - 2 : -length] == length.to_bytes(2, "little")
    if has_seal and _sealed(content[: -length - 2] + b"\0\0") != content:
        raise ReportError(f"{path} is damaged: its digest does not fit its content")


def load_items(directory: Path) -> Items | None:
    """Read `items.npz` from `directory`; None when the run left none.

    Raises:
        ReportError: The file is damaged or not one that `save_items` wrote. A file of an earlier
            version has no digest; then checksums of its parts find most damage.
    """
    path = Path(directory) / ITEMS_FILE
    if not path.exists():
        return None
    try:
        # From memory: numpy leaves a damaged file open.
        content = path.read_bytes()
        _check_seal(content, path)
        return _unpacked(content, path)
    except ReportError:
        raise
    # Whatever zip, its decompressors and numpy raise for bytes that are not theirs.
    except Exception as error:
        raise ReportError(f"{path} is damaged: {error!r}") from error


def _unpacked(content: bytes, path: Path) -> Items:
    items: Items = {}
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        size = sum(entry.file_size for entry in archive.zip.infolist())
        if size > _MOST_BYTES:
            raise ValueError(f"it unpacks to {size} bytes")
        for number, (row, task) in enumerate(json.loads(archive["index"].tobytes())):
            place = f"{path}: row {row!r}, task {task!r}"
            tasks = items.setdefault(row, {})
            if not isinstance(row, str) or not isinstance(task, str) or task in tasks:
                raise ValueError(f"row {row!r}, task {task!r} is no new entry")
            tasks[task] = as_correct(archive[f"array_{number}"], place)
    return items


# ---- Paired bootstrap. Both rows answer the same items, so each resample draws items once and uses
# them for both; items are drawn within each task and the tasks' means are averaged, as the report's
# average does. With several seeds, an item counts with its mean over the seeds, and the interval is
# about the test items, given those seeds.

RESAMPLES = 10_000
LEVEL = 0.95
BOOTSTRAP_SEED = 0
_MOST_DRAWN = 2**24  # counts at a time
_ROUNDING = 1e-12  # of averages
_NORMAL = NormalDist().inv_cdf((1 + LEVEL) / 2)

Scores = Mapping[str, Any]
"""Task -> flags per test item, `[items]`, or `[seeds, items]` for several calibration seeds."""

BySeed = Mapping[Any, Scores]
"""Seed -> flags of that run, `[items]`; the seed is None for a run that draws nothing."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its percentile interval, in the unit of accuracy (0..1) or as a share."""

    estimate: float
    low: float
    high: float


def student_interval(values: Sequence[float] | NDArray[Any]) -> Interval:
    """Mean of draws with Student's interval; of one value without width."""
    mean, half = float(np.mean(values)), half_width(values)
    return Interval(mean, mean - half, mean + half)


def half_width(values: Sequence[float] | NDArray[Any]) -> float:
    """Half of the 95 % interval of a mean over draws, by Student's t; 0 for one draw."""
    return half_of(float(np.std(values, ddof=1)), len(values)) if len(values) > 1 else 0.0


def half_of(deviation: float, draws: int) -> float:
    """The same from the draws' standard deviation (n - 1) and their number."""
    from scipy import stats  # slow to import

    if draws < 2:
        return 0.0
    return float(stats.t.ppf((1 + LEVEL) / 2, draws - 1)) * deviation / math.sqrt(draws)


def student_p(values: Sequence[float] | NDArray[Any]) -> float:
    """Two-sided p-value of a t test of the mean of several draws."""
    from scipy import stats  # slow to import

    mean, error = float(np.mean(values)), float(stats.sem(values))
    ratio = abs(mean) / error if error > 0 else (np.inf if mean else 0.0)
    return float(2 * stats.t.sf(ratio, len(values) - 1))


def common_seeds(one: BySeed, other: BySeed) -> tuple[Any, ...]:
    """Seeds of both rows; a run that draws nothing goes with every seed of the other."""
    seeds = {*one} & {*other} or {*(other if None in one else one if None in other else ())}
    return tuple(sorted(seeds, key=str))


def stacked(row: BySeed, seeds: Sequence[Any]) -> Scores:
    """Flags of a row, task -> `[seeds, items]`."""
    runs = [row[seed if seed in row else None] for seed in seeds]
    return {task: np.stack([run[task] for run in runs]) for task in runs[0]}


def over_seeds(
    estimate: float, values: Sequence[float] | NDArray[Any], items: Interval | None
) -> Interval:
    """Interval of an estimate over seeds and test items together.

    Each half-width is the root of the sum of squares of two: over seeds (Student's t), and over
    test items, given the seeds.

    Args:
        estimate: The mean over seeds.
        values: The same of each seed, such as the gains of a row over its merger.
        items: The interval over test items; None where they are not known.
    """
    half, low, high = half_width(values), 0.0, 0.0
    if items is not None:
        low, high = items.estimate - items.low, items.high - items.estimate
    return Interval(estimate, estimate - math.hypot(low, half), estimate + math.hypot(high, half))


def paired_difference(row: Scores, other: Scores, *, resamples: int = RESAMPLES) -> Interval:
    """Accuracy of `row` minus that of `other`, averaged over tasks; seeds may differ in number."""
    gains = {task: gain[:, None] for task, gain in _differences(row, other).items()}
    estimate, resampled = _macro_means(gains, resamples)
    return _interval(estimate[0], resampled[:, 0])


class Bootstrap:
    """Average accuracies of several rows, observed and in resamples of test items that they share.

    Attributes:
        observed: `[rows]`.
        resampled: `[resamples, rows]`.
    """

    def __init__(self, rows: Sequence[Scores]) -> None:
        """Resample.

        Args:
            rows: Rows of the same tasks and test items, each over seeds of its own.

        Raises:
            ReportError: If they are not.
        """
        for row in rows[1:]:
            _differences(rows[0], row)
        self._columns = {
            task: np.stack([_item_scores(row[task]) for row in rows], axis=1) for task in rows[0]
        }
        self.observed, self.resampled = _macro_means(self._columns, RESAMPLES)
        self._by_seed = [
            np.mean([np.atleast_2d(flags).mean(axis=1) for flags in row.values()], axis=0)
            for row in rows
        ]

    def difference(self, first: int, second: int) -> tuple[Interval, float]:
        """The first row minus the second, which has the same seeds, and the two-sided p-value.

        The interval is that of `over_seeds`. The p-value is that of a normal distribution with the
        interval's standard error: the share of resamples beyond zero has no value small enough for
        a correction over many pairs. It is at least that of a t test over the seeds, and that of a
        sign test in which every item that tells the rows apart favours one.
        """
        value = float(self.observed[first] - self.observed[second])
        resampled = self.resampled[:, first] - self.resampled[:, second]
        gains = self._by_seed[first] - self._by_seed[second]
        half = half_width(gains)
        error = math.hypot(float(resampled.std(ddof=1)), half / _NORMAL)
        if error < _ROUNDING:
            p = 1.0 if abs(value) < _ROUNDING else 0.0
        else:
            p = math.erfc(abs(value) / error / math.sqrt(2))
        if len(gains) > 1:
            p = max(p, student_p(gains))
        sides = ((task[:, first], task[:, second]) for task in self._columns.values())
        apart = sum(int((abs(one - two) > _ROUNDING).sum()) for one, two in sides)
        p = max(p, min(1.0, 2.0 ** (1 - apart)))
        return over_seeds(value, gains, _interval(value, resampled)), p


def recovered_gap_interval(row: Scores, merged: Scores, experts: Scores) -> Interval | None:
    """Share of the merged-to-expert gap that `row` recovers on the average over tasks.

    One resample of items serves all three rows. None where the gap is not positive, in the data or
    in any resample: a share of it would mean nothing.
    """
    gains, gaps = _differences(row, merged), _differences(experts, merged)
    both = {task: np.stack([gains[task], gaps[task]], axis=1) for task in gains}
    estimate, resampled = _macro_means(both, RESAMPLES)
    if estimate[1] <= 0 or resampled[:, 1].min() <= 0:
        return None
    return _interval(estimate[0] / estimate[1], resampled[:, 0] / resampled[:, 1])


def _differences(first: Scores, second: Scores) -> dict[str, NDArray[Any]]:
    """Task -> `[items]`, the difference of the rows' means over seeds."""
    if set(first) != set(second) or not first:
        raise ReportError(
            f"rows are not about the same tasks: {sorted(first)} and {sorted(second)}"
        )
    differences = {}
    for task in first:
        one, two = _item_scores(first[task]), _item_scores(second[task])
        if one.shape != two.shape or one.size == 0:
            raise ReportError(
                f"task '{task}': rows have {one.size} and {two.size} test items, "
                "so they cannot be paired"
            )
        differences[task] = one - two
    return differences


def _item_scores(flags: Any) -> NDArray[np.float64]:
    return np.atleast_2d(np.asarray(flags, dtype=np.float64)).mean(axis=0)


def _macro_means(
    columns: Mapping[str, NDArray[Any]], resamples: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Average over tasks of the columns' means over items, as observed and resampled.

    Items with equal values are interchangeable, so instead of drawing items the count of every
    distinct value is drawn (multinomial): the same distribution, without `[resamples, items]`.
    Each task has a generator of its own, seeded by its name.

    `columns` map tasks to `[items, k]`; the observed means are `[k]`, the resampled ones
    `[resamples, k]`.
    """
    observed = resampled = np.zeros(1)
    for task in sorted(columns):
        # Rounding off the last bits keeps equal scores equal whatever order they were summed in.
        values, counts = np.unique(np.round(columns[task], 12), axis=0, return_counts=True)
        items = counts.sum()
        generator = np.random.default_rng([BOOTSTRAP_SEED, _number(task)])
        size = max(1, _MOST_DRAWN // len(counts))
        parts = [
            generator.multinomial(items, counts / items, size=min(size, resamples - start)) @ values
            for start in range(0, resamples, size)
        ]
        observed = observed + counts @ values / items
        resampled = resampled + np.concatenate(parts) / items
    return observed / len(columns), resampled / len(columns)


def _number(task: str) -> int:
    return int.from_bytes(hashlib.sha256(task.encode()).digest()[:8], "big")


def _interval(estimate: Any, resampled: NDArray[Any]) -> Interval:
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(estimate), float(low), float(high))
