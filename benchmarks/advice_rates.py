"""Simulated rates of wrong advice.

    OMP_NUM_THREADS=1 python benchmarks/advice_rates.py [--repeats 1000]

An example's margin, right answer minus the best wrong one, is normal. Of its variance .7 is common
to expert, merged and repaired model. The answer is right if the margin is positive, and the loss is
log(1 + exp(-3 margin)). The experts' accuracy is 85 %, the merged model's 75 %, unless the merge is
lossless. A better task gains, and a worse one loses, 5 points.
"""

import argparse
from collections import Counter
from itertools import product
from statistics import NormalDist

import numpy as np
import torch
from sides import machine

from fusion_bench_featcal.data.comparing import compare_scores
from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.results.advice import KEEP, REJECT, UNCLEAR, USE, advise

COMMON, EXPERT, MERGED, CHANGE = 0.7, 0.85, 0.75, 0.05
KINDS = (USE, KEEP, UNCLEAR, REJECT)
TASKS, EXAMPLES = (1, 3, 6), (50, 200, 400)


CASES = {
    "no change": (MERGED, 0.0, 0.0),
    "lossless merge, no change": (EXPERT, 0.0, 0.0),
    "all better": (MERGED, CHANGE, CHANGE),
    "one worse, others better": (MERGED, -CHANGE, CHANGE),
    "all worse": (MERGED, -CHANGE, -CHANGE),
}
"""Case -> accuracy of the merged model, and changes of the first task and of each other task."""


def scores(
    accuracies: tuple[float, ...], count: int, generator: np.random.Generator
) -> list[Score]:
    """Return scores of models with these accuracies on the same examples."""
    shared = generator.normal(size=count)
    results = []
    for accuracy in accuracies:
        own = generator.normal(size=count)
        margins = COMMON**0.5 * shared + (1 - COMMON) ** 0.5 * own + NormalDist().inv_cdf(accuracy)
        right, losses = (
            torch.from_numpy(margins > 0),
            torch.from_numpy(np.logaddexp(0, -3 * margins)),
        )
        results.append(Score(float(right.double().mean()), losses, right))
    return results


def rates(case: str, tasks: int, count: int, repeats: int) -> list[str]:
    """Return the percentages of each kind of advice."""
    merged, first, further = CASES[case]
    gains = [first, *[further] * (tasks - 1)]
    generator, kinds = np.random.default_rng(0), Counter[str]()
    for _ in range(repeats):
        sides = [scores((EXPERT, merged, merged + gain), count, generator) for gain in gains]
        experts, before, after = (
            {str(task): side[model] for task, side in enumerate(sides)} for model in range(3)
        )
        comparisons, averages, _ = compare_scores(experts, before, after)
        kinds[advise(comparisons, averages).kind] += 1
    return [f"{100 * kinds[kind] / repeats:.1f}" for kind in KINDS]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=1000)
    repeats = parser.parse_args().repeats
    print(f"{repeats} simulated runs per line, {machine()}\n")
    heads = ["what is true", "tasks", "test examples each", *(f"{kind}, %" for kind in KINDS)]
    print(f"| {' | '.join(heads)} |\n|:--|{'--:|' * (len(heads) - 1)}")
    for case in CASES:
        for tasks, count in product(
            TASKS if case != "one worse, others better" else TASKS[1:], EXAMPLES
        ):
            cells = [case, str(tasks), str(count), *rates(case, tasks, count, repeats)]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
