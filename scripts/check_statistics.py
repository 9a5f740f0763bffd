"""Compute the statistics of reports again from the flags per test item, without the package.

    python scripts/check_statistics.py ROW RUN...

Prints each repair: average, gain, half of its interval. Then each row minus ROW: difference, half,
p-value, Holm's p-value.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
from scipy import stats


def read(runs: list[Path]) -> dict:
    """Return `merger/row` -> task -> seed -> flags [items]. A merger's key is its name."""
    rows: dict = {}
    for run in runs:
        entries = json.loads((run / "run.json").read_text())["rows"]
        with np.load(run / "items.npz") as archive:
            for number, (row, task) in enumerate(json.loads(archive["index"].tobytes())):
                entry = entries[row]
                name, merger = entry["name"], entry["merger"]
                title = name if name in ("base", "experts", merger) else f"{merger}/{name}"
                tasks = rows.setdefault(title, {}).setdefault(task, {})
                tasks[entry["seed"]] = archive[f"array_{number}"].astype(float)
    return rows


def difference(row: dict, other: dict) -> list[float]:
    """Return the difference of averages, half of its interval, and the p-value."""
    sums, shift, by_seed, differing = 0.0, 0.0, [], 0
    for task, flags in row.items():
        seeds = sorted({*flags, *other[task]} - {None}) or [None]
        pairs = [(flags.get(s, flags.get(None)), other[task].get(s, other[task].get(None)))
                 for s in seeds]  # fmt: skip
        gains = np.array([one - two for one, two in pairs])
        items = gains.mean(axis=0)
        added = 2 / len(row)  # two examples in all, of which each method alone answers one
        count = len(items) + added
        sums += ((items**2).sum() + added) / count**2 - items.sum() ** 2 / count**3
        shift += items.mean() - items.sum() / count
        differing += int((abs(items) > 1e-12).sum())
        by_seed.append(gains.mean(axis=1))
    seed_mean, half_seeds, p = np.mean(by_seed, axis=0), 0.0, 0.0
    value, degrees = float(seed_mean.mean()), len(seed_mean) - 1
    error = seed_mean.std(ddof=1) / math.sqrt(len(seed_mean)) if degrees else 0.0
    if error:
        half_seeds = float(stats.t.ppf(0.975, degrees)) * error
        p = float(2 * stats.t.sf(abs(value) / error, degrees))
    quantile = float(stats.norm.ppf(0.975))
    half = math.hypot(quantile * math.sqrt(sums) / len(row), half_seeds) + abs(shift) / len(row)
    p_items = float(2 * stats.norm.sf(abs(value) / half * quantile)) if half else float(not value)
    return [value, half, max(p, p_items, min(1.0, 2.0 ** (1 - differing)))]


def gain(row: dict, merged: dict) -> list[float]:
    """Return an average, its gain over the merged model and half of the gain's interval."""
    average = np.mean([float(np.mean([*flags.values()])) for flags in row.values()])
    return [float(average), *difference(row, merged)[:2]]


def against(rows: dict, reference: str) -> dict[str, list[float]]:
    """Return each row minus one: difference, half of its interval, p-value, Holm's p-value."""
    results = {n: difference(row, rows[reference]) for n, row in rows.items() if n != reference}
    largest = 0.0
    for rank, values in enumerate(sorted(results.values(), key=lambda values: values[2])):
        largest = max(largest, min(1.0, (len(results) - rank) * values[2]))
        values.append(largest)
    return results


if __name__ == "__main__":
    rows = read([Path(run) for run in sys.argv[2:]])
    gains = {n: gain(row, rows[n.partition("/")[0]]) for n, row in rows.items() if "/" in n}
    for name, values in [*gains.items(), *against(rows, sys.argv[1]).items()]:
        print(f"{name}:", *(f"{value:+.6g}" for value in values))
