"""Diagnoses with made-up numbers, for the tests of their views."""

import numpy as np

from fusion_bench_featcal.results.diagnosis import Diagnosis

TASKS = ("toy_one", "toy_two", "toy_three")
ITEMS = 12


def parts_of(scale: float, seed: int, blocks: int = 3) -> dict[str, np.ndarray]:
    """Drift of items at blocks, one position each, of terms of a given size."""
    generator = np.random.default_rng(seed)
    shape = (blocks, ITEMS, 5)
    m, p, expert = (generator.normal(size=shape) for _ in range(3))
    m, p, expert = scale * m, 2 * scale * p, 10 * expert
    e, norm = m + p, lambda part: np.linalg.norm(part, axis=2)
    return {
        "drift": norm(e), "drift_sq": norm(e) ** 2, "expert_sq": norm(expert) ** 2,
        "cosine": (expert * (expert + e)).sum(2) / norm(expert) / norm(expert + e),
        "mismatch": norm(m), "mismatch_sq": norm(m) ** 2, "propagation": norm(p),
        "propagation_sq": norm(p) ** 2, "product": (m * p).sum(2),
    }  # fmt: skip


SIZES = {"base": 3.0, "merger": 2.0, "featcal": 1.0, "featcal:plus": 0.5}


def made(sizes: dict[str, float] = SIZES) -> Diagnosis:
    """A diagnosis in which a row's drift is as large as told, and a class gains most."""
    found = Diagnosis(
        suite="toy", upstream="merger", split="test", items={}, seed=3, positions="all",
        features="made up", blocks=[f"layers.{n}.block" for n in range(3)],
    )  # fmt: skip
    for number, (row, size) in enumerate(sizes.items()):
        for place, task in enumerate(TASKS):
            cosines = 1 - size * np.linspace(0.1, 0.2 + 0.05 * place, ITEMS)
            classes = ["late" if item >= ITEMS // 2 else "early" for item in range(ITEMS)]
            vector = None if row == "base" else 0.2 * size
            found.add(row, task, parts_of(size, 7 * place), cosines, classes, vector)
        found.accuracy[row] = {task: 0.5 + 0.1 * number for task in TASKS}
        right = {"early": [4 + number, 20], "late": [4 + 5 * number, 20]}
        found.class_accuracy[row] = dict.fromkeys(TASKS, right)
    found.accuracy["experts"] = dict.fromkeys(TASKS, 0.95)
    found.class_accuracy["experts"] = {
        task: {"early": [19, 20], "late": [20, 20]} for task in TASKS
    }
    for row in found.repairs if found.merged else ():
        counts = [found.class_accuracy[side][TASKS[0]] for side in (row, found.merged or "")]
        flips = {name: [counts[0][name][0] - counts[1][name][0] + 1, 1] for name in counts[0]}
        found.class_flips[row] = dict.fromkeys(TASKS, flips)
    plane = [[float(item), float(item % 3)] for item in range(ITEMS)]
    rows = ("experts", "merger", "featcal", "featcal:plus")
    found.projections = {"pca": {task: dict.fromkeys(rows, plane) for task in TASKS}}
    return found
