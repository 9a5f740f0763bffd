"""Updates until distillation reaches FeatCal+, from the base, a merge and a repaired merge.

    OMP_NUM_THREADS=1 python benchmarks/updates.py [SUITE] [--steps 300] [--every 25]

The rows `mopd` (on-policy distillation from all experts) and `seqkd` (cross-entropy on the experts'
answers) train on the same 64 samples per task that FeatCal+ uses. After every few updates the model
is scored on the test examples, so that the number of updates favours distillation: a user cannot
stop at the best one. Results: `benchmarks/results/updates.md`.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import mean
from typing import Any

from opened_suite import OpenedSuite, Scores, silence
from sides import machine
from torch import nn

from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.lab.rivals import MOPD, SeqKD
from fusion_bench_featcal.modules.models import copied

Curve = list[tuple[int, Scores]]
"""Number of updates -> score of each task."""
SAMPLES, SEED = 64, 42


def trained(suite: OpenedSuite, start: nn.Module, method: Any, every: int) -> tuple[Curve, float]:
    """Train a copy of a model, and return its scores and the seconds without those of scoring."""
    student = copied(start, suite.inputs.fabric.device)
    began, scoring, curve = time.perf_counter(), 0.0, Curve()

    def score(step: int) -> None:
        nonlocal scoring
        if step % every == 0:
            before = time.perf_counter()
            curve.append((step, suite.scores(student)))
            scoring += time.perf_counter() - before

    score(0)
    samples = method.take_batches(suite.inputs)
    data = {
        task: method.training_batches(student, task, samples[task], suite.inputs)
        for task in suite.tasks
    }
    method.train(student, method.trained_names(student), data, score)
    return curve, time.perf_counter() - began - scoring


def line(name: str, start: str, curve: Curve, goal: float, seconds: float, experts: Scores) -> str:
    """Return a line of the table."""
    averages = [(step, mean(scores.values())) for step, scores in curve]
    reached = next((str(step) for step, average in averages if average >= goal), "not reached")
    best = max(average for _, average in averages)
    missed = max(experts[task] - score for task, score in curve[-1][1].items())
    cells = (name, start, f"{averages[0][1]:.1f}", reached, f"{best:.1f}", f"{averages[-1][1]:.1f}",
             f"{missed:.1f}", f"{seconds:.0f}")  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main(words: Sequence[str] | None = None) -> None:
    """Print one table of a suite."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suite", nargs="?", default="llama-mini_TA6")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args(words)
    silence()
    suite = OpenedSuite(options.suite)
    experts = suite.expert_scores()
    began = time.perf_counter()
    repaired, _ = suite.calibrate("own", SEED, SAMPLES, rule="plus")
    seconds = time.perf_counter() - began
    goal = mean(suite.scores(repaired).values())
    print(f"{machine()}. {options.suite}, {options.steps} updates of {options.batch} samples per "
          f"task, rate {options.rate:g}. Experts {mean(experts.values()):.1f}, FeatCal+ {goal:.1f} "
          f"in {seconds:.0f} s.\n")  # fmt: skip
    heads = ("method", "start", "average at the start", "updates to FeatCal+'s average",
             "best average", "average at the end", "most below an expert", "seconds")  # fmt: skip
    print(f"| {' | '.join(heads)} |\n|:--|:--|{'--:|' * (len(heads) - 2)}", flush=True)
    starts = {
        "base": load_pool_model(suite.pool, BASE_MODEL),
        "task arithmetic": suite.merged,
        "FeatCal+": repaired,
    }
    for kind in (MOPD, SeqKD):
        for name, start in starts.items():
            method = kind(samples_per_task=SAMPLES, seed=SEED, steps=options.steps,
                          learning_rate=options.rate, batch_size=options.batch,
                          generated_tokens=16)  # fmt: skip
            curve, seconds = trained(suite, start, method, options.every)
            print(line(method.name, name, curve, goal, seconds, experts), flush=True)


if __name__ == "__main__":
    main()
