"""Compute how often the 95 % intervals of reports and verdicts contain the true value.

    OMP_NUM_THREADS=1 python benchmarks/interval_coverage.py

Two methods answer the same test examples. An interval of their difference on one task, or of one
method's accuracy, has a finite number of possible inputs. So its coverage is an exact sum over all
of them, for every pair of shares in a grid. Averages over tasks and seeds are simulated.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from scipy.special import gammaln, xlogy
from scipy.stats import binom

from fusion_bench_featcal.results.statistics import difference, halves

ITEMS = (50, 100, 200, 400)
SHARES = (0, *np.arange(0.0025, 0.03, 0.0025), *np.arange(0.03, 0.1, 0.01),
          *np.arange(0.1, 0.31, 0.02))  # fmt: skip
"""Shares of the test examples that only one of two methods answers."""
PAIRS = [(one, other) for one in SHARES for other in SHARES if other <= one <= 0.5 - other]
VALUES = np.arange(0.3, 1.0, 0.005)

DRAWS = 4000
CHANGES = ((0.2, 0.05), (0.2, 0), (0.08, 0.03), (0.05, 0), (0.03, 0.01), (0.02, 0), (0.01, 0.003))
SPREAD = 0.01
"""Standard deviation over seeds of the share that only the first method answers."""


def interval_half(differences: np.ndarray) -> float:
    """Return half of the interval for `[items]` differences of flags."""
    rows = ({None: {"task": differences == value}} for value in (1, -1))
    result = difference(*rows)
    assert result and result.half is not None
    return result.half


def exact_differences(items: int) -> np.ndarray:
    """Return the probability that the interval holds, for each pair of shares in `PAIRS`.

    `items` is the number of test examples.
    """
    one, other = (grid.ravel() for grid in np.indices((items + 1, items + 1)))
    one, other = (numbers[one + other <= items] for numbers in (one, other))
    by_numbers: Mapping[tuple[int, int], float] = {
        (b, c): interval_half(np.repeat([1, -1, 0], [b, c, items - b - c]))
        for b, c in zip(one.tolist(), other.tolist(), strict=True)
        if b >= c
    }
    half = np.array([by_numbers[max(pair), min(pair)] for pair in zip(one, other, strict=True)])
    same = items - one - other
    ways = gammaln(items + 1) - gammaln(one + 1) - gammaln(other + 1) - gammaln(same + 1)
    return np.array([
        np.exp(ways + xlogy(one, p) + xlogy(other, q) + xlogy(same, 1 - p - q))
        @ (abs((one - other) / items - (p - q)) <= half + 1e-12)
        for p, q in PAIRS
    ])  # fmt: skip


def exact_values(items: int) -> np.ndarray:
    """Return the probability that the interval of one method's accuracy holds, for `VALUES`."""
    right = np.arange(items + 1)
    half = np.array([halves({0: {"task": np.arange(items) < n}})["task"] for n in right])
    return np.array([
        binom.pmf(right, items, value) @ (abs(right / items - value) <= half + 1e-12)
        for value in VALUES
    ])  # fmt: skip


def averages_hold(random: np.random.Generator, items: int, change: tuple[float, float],
                  tasks: int, seeds: int) -> bool:  # fmt: skip
    """Draw flags of two methods, and return whether the interval of their averages holds."""
    one, other = change
    uniform = {str(task): random.random(items) for task in range(tasks)}
    shifts = SPREAD * random.standard_normal(seeds) * (seeds > 1)
    drawn = [
        {t: (u < 0.6 + one + shift, (u < 0.6) | (u > 1 - other)) for t, u in uniform.items()}
        for shift in shifts
    ]
    rows = ({s: {t: pair[n] for t, pair in d.items()} for s, d in enumerate(drawn)} for n in (0, 1))
    result = difference(*rows)
    assert result and result.half is not None
    return abs(result.value - (one - other)) <= result.half


def simulated(items: int, **options: int) -> np.ndarray:
    """Return the share of draws whose interval holds, for each of `CHANGES`."""
    shares = []
    for change in CHANGES:
        random = np.random.default_rng(0)
        held = (averages_hold(random, items, change, **options) for _ in range(DRAWS))
        shares.append(np.mean([*held]))
    return np.array(shares)


def kinds() -> Iterator[tuple[str, Callable[[int], np.ndarray]]]:
    """Yield each kind of interval with a function: test examples -> coverages."""
    yield "difference on one task", exact_differences
    yield "accuracy of one method", exact_values
    yield "difference of averages over six tasks", partial(simulated, tasks=6, seeds=1)
    yield "the same over three seeds", partial(simulated, tasks=6, seeds=3)


def main() -> None:
    """Print the least, the median and the greatest coverage of each interval, in per cent."""
    print("| interval | coverage |", *(f" {items} examples |" for items in ITEMS), sep="")
    print("|:--|:--|", "--:|" * len(ITEMS), sep="")
    for kind, coverages in kinds():
        columns = [100 * coverages(items) for items in ITEMS]
        for name, summary in (("least", np.min), ("median", np.median), ("greatest", np.max)):
            cells = " | ".join(f"{summary(column):.1f}" for column in columns)
            print(f"| {kind} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
