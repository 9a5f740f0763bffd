"""Two to sixteen tasks in one model: each bundled task becomes two, of half its classes each.

    OMP_NUM_THREADS=1 python benchmarks/many_tasks.py FOLDER clip-vit-mini --train
    OMP_NUM_THREADS=1 python benchmarks/many_tasks.py FOLDER clip-vit-mini [--seeds 0 1 2]
    python benchmarks/many_tasks.py benchmarks/results --table --figure docs/figures/many_tasks.svg

`--train` makes an expert of each half from the bundled base, by the recipe of the bundled experts
(5 to 10 minutes per suite on one core). A seed orders the tasks, and T tasks are the first T of
this order. Results are in FOLDER/many_tasks.jsonl, and a run is not repeated. Tables and figure:
`benchmarks/results/many_tasks.md`.
"""

import argparse
import copy
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import transformers
from opened_suite import OpenedSuite, Scores, generator, silence
from sides import machine

from fusion_bench_featcal.files.suite_paths import suite_path
from fusion_bench_featcal.lab.rivals import SWUDI
from fusion_bench_featcal.suites import image, text

sys.path.append(str(Path(__file__).parents[1] / "scripts" / "suites"))
import clip_builder
from build_suite import save_half
from text_builder import TextBuilder

RESULTS = "many_tasks.jsonl"
COUNTS = (2, 4, 6, 8, 10, 12, 14, 16)
SUITES: dict[str, tuple[Any, Sequence[str], str]] = {
    "clip-vit-mini": (clip_builder.ClipBuilder, image.ALL8, "clip-vit-mini_all8"),
    "llama-mini": (TextBuilder, text.TA6, "llama-mini_TA6"),
}
METHODS: dict[str, Callable[[OpenedSuite, int], Any]] = {
    "merged": lambda suite, seed: suite.merged,
    "swudi": lambda suite, seed: suite.merge(SWUDI()),
    "paper": lambda suite, seed: suite.calibrate("own", seed, 64, rule="paper")[0],
    "plus": lambda suite, seed: suite.calibrate("own", seed, 64, rule="plus")[0],
    "balance": lambda suite, seed: suite.calibrate("own", seed, 64, rule="plus", balance=1)[0],
}
TITLES = {
    "merged": "merged (task arithmetic, 0.3)", "swudi": "ASWUDI", "paper": "the paper's settings",
    "plus": "FeatCal+", "balance": "FeatCal+, balance 1",
}  # fmt: skip
Line = dict[str, Any]


def halves(tasks: Sequence[str]) -> list[str]:
    """Return the names of all halves: the even classes of a task, and the odd ones."""
    return [f"{task}_{half}" for task in tasks for half in ("even", "odd")]


def register_halves() -> None:
    """Let the bundled data contain the halves, whose classes are counted anew."""
    load_arrays, load_rows = image.load_arrays, text.load_rows

    def half_arrays(name: str) -> image.ImageArrays:
        task, _, half = name.rpartition("_")
        if half not in ("even", "odd"):
            return load_arrays(name)
        arrays = load_arrays(task)
        chosen = arrays.labels % 2 == (half == "odd")
        names = arrays.classnames[half == "odd" :: 2]
        images, labels, split = (x[chosen] for x in (arrays.images, arrays.labels, arrays.split))
        return replace(arrays, images=images, labels=labels // 2, split=split, classnames=names)

    def half_rows(name: str) -> dict[str, list[tuple[str, str]]]:
        task, _, half = name.rpartition("_")
        if half not in ("even", "odd"):
            return load_rows(name)
        splits = load_rows(task)
        labels = sorted({label for rows in splits.values() for _, label in rows})
        chosen = set(labels[half == "odd" :: 2])
        return {split: [row for row in rows if row[1] in chosen] for split, rows in splits.items()}

    image.load_arrays = clip_builder.load_arrays = cache(half_arrays)  # type: ignore[assignment]
    text.load_rows = cache(half_rows)
    for tasks in (image.TASKS, text.TASKS):
        named: Any = tasks
        for half in halves([*named]):
            named[half] = replace(named[half.rpartition("_")[0]], name=half)


def train(folder: Path, suite: str) -> None:
    """Train an expert of each half that the folder lacks."""
    kind, tasks, _ = SUITES[suite]
    pretrained = Path(suite_path(f"{suite}/pretrained"))
    builder = kind(suite, pretrained, halves(tasks), kind.RECIPES[suite], 0, lambda line: None)
    config = transformers.AutoConfig.from_pretrained(pretrained)
    base: Any = getattr(transformers, config.architectures[0]).from_pretrained(pretrained)
    for task in halves(tasks):
        if not (folder / task).exists():
            model, start = copy.deepcopy(base.float()), time.perf_counter()
            builder.finetune(model, task)
            save_half(*builder.expert_part(model), builder, folder / task)
            print(f"{task}: {100 * builder.accuracy(model, task):.1f}, was "
                  f"{100 * builder.accuracy(base, task):.1f}; {time.perf_counter() - start:.0f} s",
                  flush=True)  # fmt: skip


def run(folder: Path, suite: str, seeds: Sequence[int], counts: Sequence[int]) -> None:
    """Measure all methods on all numbers of tasks, and append lines to the results."""
    _, tasks, pool = SUITES[suite]
    file, names = folder / RESULTS, halves(tasks)
    for count in (count for count in counts if count <= len(names)):
        # All tasks together have one order.
        for seed in seeds if count < len(names) else seeds[:1]:
            order = generator("order", seed).sample(names, len(names))
            opened = None
            for method in ("experts", *METHODS):
                key = {"suite": suite, "count": count, "seed": seed, "method": method}
                if any(key.items() <= line.items() for line in read(file)):
                    continue
                chosen = f"modelpool.tasks=[{','.join(order[:count])}]"
                opened = opened or OpenedSuite(pool, chosen, experts=folder)
                start = time.perf_counter()
                if method == "experts":
                    scores = opened.expert_scores()
                else:
                    scores = opened.scores(METHODS[method](opened, 42 + seed))
                line = {**key, "scores": scores, "seconds": time.perf_counter() - start,
                        "machine": machine()}  # fmt: skip
                with file.open("a", encoding="utf-8") as stream:
                    print(json.dumps(line), file=stream)
                print(f"{key} {mean(scores.values()):.1f} {line['seconds']:.0f} s", flush=True)


def read(file: Path) -> list[Line]:
    """Return the lines of a file, which may be absent."""
    text = file.read_text("utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def by_count(lines: Sequence[Line], suite: str) -> dict[int, dict[str, list[Scores]]]:
    """Return number of tasks -> method -> scores of each order."""
    scores = defaultdict[int, dict[str, list[Scores]]](lambda: defaultdict(list))
    for line in lines:
        if line["suite"] == suite:
            scores[line["count"]][line["method"]].append(line["scores"])
    return dict(sorted(scores.items()))


def below(scores: Sequence[Scores], experts: Sequence[Scores]) -> tuple[float, float]:
    """Return points below the experts: on average, and on the worst task, means over orders."""
    pairs = [[e[task] - s[task] for task in s] for s, e in zip(scores, experts, strict=True)]
    return mean(map(mean, pairs)), mean(map(max, pairs))


def closed(scores: Sequence[Scores], merged: Sequence[Scores], experts: Sequence[Scores]) -> float:
    """Return the gap closed of the averages in per cent: 0 is the merged model, 100 the experts."""
    s, m, e = (mean(mean(one.values()) for one in some) for some in (scores, merged, experts))
    return 100 * (s - m) / (e - m)


def table(lines: Sequence[Line], suite: str) -> str:
    """Return a table with a line for each number of tasks."""
    heads = ["tasks", "experts", *TITLES.values()]
    rows = [f"| {' | '.join(heads)} |", "|--:" * len(heads) + "|"]
    for count, methods in by_count(lines, suite).items():
        experts, cells = methods["experts"], list[str]()
        for name in TITLES:
            average, worst = below(methods[name], experts)
            gap = closed(methods[name], methods["merged"], experts)
            text = "" if name == "merged" else f", {gap:.0f} %"
            cells.append(f"-{average:.1f} (-{worst:.1f}){text}")
        level = mean(mean(one.values()) for one in experts)
        rows.append(f"| {count} | {level:.1f} | {' | '.join(cells)} |")
    return "\n".join(rows)


def draw(lines: Sequence[Line], file: Path) -> None:
    """Draw points below the experts against the number of tasks: average, and worst task."""
    from matplotlib import pyplot

    suites = [suite for suite in SUITES if any(line["suite"] == suite for line in lines)]
    figure, axes = pyplot.subplots(
        len(suites), 2, figsize=(9, 3.2 * len(suites)), squeeze=False, sharex=True
    )
    for row, suite in zip(axes, suites, strict=True):
        counts = by_count(lines, suite)
        for name, title in TITLES.items():
            points = [below(m[name], m["experts"]) for m in counts.values()]
            for axis, values in zip(row, zip(*points, strict=True), strict=True):
                axis.plot([*counts], [-value for value in values], marker="o", label=title)
        row[0].set_ylabel(f"{suite}\npoints below the experts")
        row[0].set_title("average of all tasks"), row[1].set_title("worst task")
        for axis in row:
            axis.set_xlabel("number of tasks"), axis.grid(alpha=0.3)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=3)
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "featcal"}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else {})


def main() -> None:
    """Train, measure, or print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("suites", nargs="*")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    lines = read(options.folder / RESULTS)
    if options.table:
        for suite in SUITES:
            print(f"\n{suite}\n\n{table(lines, suite)}")
    if options.figure:
        draw(lines, options.figure)
    silence()
    register_halves()
    options.folder.mkdir(exist_ok=True, parents=True)
    for suite in options.suites:
        if options.train:
            train(options.folder, suite)
        else:
            run(options.folder, suite, options.seeds, options.counts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
