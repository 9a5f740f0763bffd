"""Distances between WUDI's steps of Adam, SWUDI's gradient flow, and the solution of both.

    OMP_NUM_THREADS=1 python benchmarks/swudi.py [--steps 400 4000]

Adam's steps take the gradient from the normal equation, which is that of FusionBench's loss. All
linear weights of a bundled suite count as one vector. Results: `benchmarks/results/swudi.md`.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, CLIPVisionModel

from fusion_bench_featcal.lab.rivals import SWUDI
from fusion_bench_featcal.lab.rivals.matrices import matrix_names
from fusion_bench_featcal.suites import image, text

TIMES = 2, 5, 20, 100, 300, 1e6
SUITES = {
    "clip-vit-mini_TA6": (
        CLIPVisionModel,
        [image.path(), *(image.path(task) for task in image.TA6)],
    ),
    "flan-t5-mini_TA6": (
        AutoModelForSeq2SeqLM,
        [text.path("flan-t5-mini", name) for name in ("pretrained", *text.TA6)],
    ),
}


def task_matrices(suite: str) -> list[Tensor]:
    """Return the experts' steps for each linear weight, `[tasks, outputs, inputs]`."""
    kind, (base_path, *paths) = SUITES[suite]
    base = kind.from_pretrained(base_path)
    experts = [kind.from_pretrained(path) for path in paths]
    names = [name for name in matrix_names(base) if name != "lm_head.weight"]
    weights = [torch.stack([e.get_parameter(n).detach() for e in experts]) for n in names]
    return [w - base.get_parameter(n).detach() for n, w in zip(names, weights, strict=True)]


def adam(steps: Tensor, counts: list[int]) -> Iterator[Tensor]:
    """Yield WUDI's merged step after each of some numbers of updates."""
    merged = torch.nn.Parameter(steps.sum(0))
    optimizer = torch.optim.Adam([merged], lr=1e-5)
    units = steps / steps.flatten(1).norm(dim=1)[:, None, None]
    grams = units.mT @ units
    gram, right = grams.sum(0), (steps @ grams).sum(0)
    for count in range(1, max(counts) + 1):
        merged.grad = 2 * (merged.data @ gram - right)
        optimizer.step()
        if count in counts:
            yield merged.data.clone()


def distance(xs: list[Tensor], ys: list[Tensor]) -> float:
    """Return the distance of merged steps, all weights together."""
    gaps = (x.double() - y.double() for x, y in zip(xs, ys, strict=True))
    return sum(float(gap.square().sum()) for gap in gaps) ** 0.5


def loss(merged: list[Tensor], matrices: list[Tensor]) -> float:
    """Return WUDI's loss of all weights."""
    total = 0.0
    for x, steps in zip(merged, (m.double() for m in matrices), strict=True):
        products = ((x.double() - steps) @ steps.mT).square().sum((1, 2))
        total += float((products / steps.square().sum((1, 2))).sum())
    return total


def main() -> None:
    """Print a table for each suite."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[400, 4000])
    parser.add_argument("--suites", nargs="+", default=[*SUITES])
    options = parser.parse_args()
    for suite in options.suites:
        matrices = task_matrices(suite)
        start = [steps.sum(0) for steps in matrices]
        solution = [SWUDI(time=1e12, rank=1.0).merged_step(steps) for steps in matrices]
        total = distance(solution, start)
        by_count = zip(*(adam(steps, options.steps) for steps in matrices), strict=True)
        adam_times = dict(zip(options.steps, map(list, by_count), strict=True))
        rows = {"the sum of steps": start, "the solution": solution}
        rows |= {f"Adam, {count} steps": merged for count, merged in adam_times.items()}
        for time in TIMES:
            rows[f"s = {time:g}"] = [
                SWUDI(time=time, rank=1.0).merged_step(steps) for steps in matrices
            ]
        heads = [f"from Adam, {count}" for count in adam_times]
        print(f"\n{suite}\n\n| merged step | loss | from the solution | {' | '.join(heads)} |")
        print("|---|--:|--:|" + "--:|" * len(heads))
        for name, merged in rows.items():
            gaps = [distance(merged, other) / total for other in (solution, *adam_times.values())]
            cells = [f"{loss(merged, matrices):.3g}", *(f"{gap:.2f}" for gap in gaps)]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
