"""Simulate how often the 95 % intervals of reports and verdicts hold.

    OMP_NUM_THREADS=1 python benchmarks/interval_coverage.py

Each draw has two rows with a flag per test item. An interval holds if it has the true difference,
or the true value of one row.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from fusion_bench_featcal.results.statistics import OF_DIFFERENCES, difference, halves, student

DRAWS = 4000
ITEMS = (50, 100, 400)
CHANGES = ((0.20, 0.05), (0.08, 0.03), (0.03, 0.03), (0.03, 0.01), (0.01, 0.003))
"""Shares of items that one row alone has right, and the other alone. Rows of docs/results have
such shares."""
VALUES = (0.5, 0.8, 0.9, 0.95, 0.98)
SPREAD = 0.01
"""Standard deviation over seeds of the share that one row alone has right."""


def flags(uniform: np.ndarray, one: float, other: float) -> np.ndarray:
    """Return the flags of two rows for uniform draws `[items]`, `[2, items]`."""
    return np.stack([uniform < 0.6 + one, (uniform < 0.6) | (uniform > 1 - other)])


def difference_holds(random: np.random.Generator, items: int, change: tuple[float, float],
                     tasks: int, seeds: int) -> bool:  # fmt: skip
    """Draw two rows, and test the interval of the difference of their averages."""
    one, other = change
    uniform = {str(task): random.random(items) for task in range(tasks)}
    shifts = SPREAD * random.standard_normal(seeds) * (seeds > 1)
    drawn = [{t: flags(u, one + shift, other) for t, u in uniform.items()} for shift in shifts]
    rows = ({s: {t: pair[n] for t, pair in d.items()} for s, d in enumerate(drawn)} for n in (0, 1))
    result = difference(*rows)
    assert result and result.half is not None
    return abs(result.value - (one - other)) <= result.half


def value_holds(random: np.random.Generator, items: int, value: float) -> bool:
    """Draw a row, and test the interval of its value."""
    flags = {"task": random.random(items) < value}
    return abs(flags["task"].mean() - value) <= halves({0: flags})["task"]


def student_holds(random: np.random.Generator, items: int, change: tuple[float, float]) -> bool:
    """Draw two rows, and test Student's interval of their difference."""
    one, other = flags(random.random(items), *change).astype(float)
    half = student(one - other, OF_DIFFERENCES)[0]
    return abs((one - other).mean() - (change[0] - change[1])) <= half


def simulations() -> Iterator[tuple[str, str, Callable[..., bool]]]:
    """Yield kinds of intervals with the shares of their rows and the simulation of one draw."""
    for kind, tasks, seeds in (
        ("difference on one task", 1, 1),
        ("difference of averages over six tasks", 6, 1),
        ("the same over three seeds", 6, 3),
    ):
        for change in CHANGES:
            text = " and ".join(f"{100 * share:g} %" for share in change)
            yield kind, text, partial(difference_holds, change=change, tasks=tasks, seeds=seeds)
    for value in VALUES:
        yield "value of one row", f"{100 * value:g} %", partial(value_holds, value=value)
    for change in CHANGES:
        text = " and ".join(f"{100 * share:g} %" for share in change)
        yield "verdict of `featcal calibrate`", text, partial(student_holds, change=change)


def main() -> None:
    """Print how often each interval holds, in per cent."""
    print("| interval | right: one row alone and the other alone, or the row |",
          *(f" {items} items |" for items in ITEMS), sep="")  # fmt: skip
    print("|:--|:--|", "--:|" * len(ITEMS), sep="")
    for kind, shares, holds in simulations():
        cells = []
        for items in ITEMS:
            random = np.random.default_rng(0)
            cells.append(f"{100 * np.mean([holds(random, items) for _ in range(DRAWS)]):.1f}")
        print(f"| {kind} | {shares} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
