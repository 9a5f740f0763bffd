"""Compute the statistics of reports again from the flags per test item, without the package.

    python scripts/check_statistics.py ROW RUN...

Prints each row: average, gain and its interval. Then each minus ROW: interval, p-value, Holm's.
"""

import json
import math
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np

STUDENT = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445}  # 97.5 % quantiles


def read(runs: list[Path]) -> dict:
    """Return `merger/row` -> task -> flags [seeds, items]. A merger's key is its name."""
    rows: dict = {}
    for run in runs:
        report = json.loads((run / "report.json").read_text())
        merger, seeds = report["upstream"], report["seeds"]
        with np.load(run / "items.npz") as archive:
            for number, (row, task) in enumerate(json.loads(archive["index"].tobytes())):
                name = row if row in ("base", "experts", merger) else f"{merger}/{row}"
                tasks = rows.setdefault(name, {}).setdefault(task, {})
                tasks[seeds.get("comparison", str(seeds))] = archive[f"array_{number}"]
    return {n: {t: np.stack([*f.values()]) for t, f in row.items()} for n, row in rows.items()}


def resampled(columns: dict) -> np.ndarray:
    """Return means over tasks of 10,000 resamples of items. Columns are task -> [items, k]."""
    draws = np.zeros(1)
    for task, values in columns.items():
        distinct, counts = np.unique(np.round(values, 12), axis=0, return_counts=True)
        seed = int.from_bytes(sha256(task.encode()).digest()[:8], "big")
        size, generator = counts.sum(), np.random.default_rng([0, seed])
        resamples = generator.multinomial(size, counts / size, size=10_000) @ distinct
        draws = draws + resamples / size / len(columns)
    return draws


def student_tail(ratio: float, degrees: int) -> float:
    """Return the probability that a variable of Student's distribution is farther from 0."""
    angles = (np.arange(1_000_000) + 0.5) * math.pi / 2_000_000
    density = np.cos(angles) ** (degrees - 1)
    return float(density[angles > math.atan(ratio / math.sqrt(degrees))].sum() / density.sum())


def half_over_seeds(gains: np.ndarray) -> float:
    """Return half of Student's 95 % interval of a mean over seeds, 0 for one seed."""
    if len(gains) == 1:
        return 0.0
    return STUDENT[len(gains) - 1] * gains.std(ddof=1) / math.sqrt(len(gains))


def difference(row: dict, other: dict, resamples: np.ndarray) -> tuple[list[float], np.ndarray]:
    """Return the difference of averages with the ends of its interval, and that of each seed."""
    gains = np.mean([row[task].mean(1) - other[task].mean(1) for task in row], axis=0)
    low, high = gains.mean() - np.quantile(resamples, [0.025, 0.975])
    mean, half = gains.mean(), half_over_seeds(gains)
    return [mean, mean - math.hypot(low, half), mean + math.hypot(high, half)], gains


def gain(row: dict, merged: dict) -> list[float]:
    """Return an average, its gain over the merged model and the ends of the gain's interval."""
    columns = {t: (row[t].mean(0) - merged[t].mean(0))[:, None] for t in sorted(row)}
    values, _ = difference(row, merged, resampled(columns)[:, 0])
    return [float(np.mean([flags.mean() for flags in row.values()])), *values]


def against(rows: dict, reference: str) -> dict[str, list[float]]:
    """Return each row minus one: difference, ends of its interval, p-value, Holm's p-value."""
    results, order = {}, [*rows]
    columns = {t: np.stack([r[t].mean(0) for r in rows.values()], 1) for t in sorted(rows["base"])}
    draws, reference_column = resampled(columns), order.index(reference)
    for here, name in ((n, name) for n, name in enumerate(order) if n != reference_column):
        resamples = draws[:, here] - draws[:, reference_column]
        values, gains = difference(rows[name], rows[reference], resamples)
        half, size = half_over_seeds(gains), abs(values[0])
        p = math.erfc(size / math.hypot(resamples.std(ddof=1), half / 1.959964) / math.sqrt(2))
        if half:
            p = max(p, student_tail(size / half * STUDENT[len(gains) - 1], len(gains) - 1))
        differing = sum(
            int((abs(c[:, here] - c[:, reference_column]) > 1e-12).sum()) for c in columns.values()
        )
        results[name] = [*values, max(p, min(1.0, 2.0 ** (1 - differing)))]
    largest = 0.0
    for rank, values in enumerate(sorted(results.values(), key=lambda values: values[3])):
        largest = max(largest, min(1.0, (len(results) - rank) * values[3]))
        values.append(largest)
    return results


if __name__ == "__main__":
    rows = read([Path(run) for run in sys.argv[2:]])
    gains = {name: gain(row, rows[name.partition("/")[0]]) for name, row in rows.items()}
    for name, values in [*gains.items(), *against(rows, sys.argv[1]).items()]:
        print(f"{name}:", *(f"{value:+.6f}" for value in values))
