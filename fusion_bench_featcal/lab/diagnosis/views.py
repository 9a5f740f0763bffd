"""Views of a diagnosis: drift by block in its two terms, and final features by task."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fusion_bench_featcal.results import AVERAGE, BASE, EXPERTS, Line, Run
from fusion_bench_featcal.results.figures import MERGED, Value, curves, dots
from fusion_bench_featcal.results.show import share_text, short_names
from fusion_bench_featcal.results.tables import Table, print_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TERMS = {"drift": "drift", "mismatch": "local mismatch", "propagation": "upstream propagation"}
_COSINES = {"final_cosine": "final features", "task_vector_cosine": "task vectors"}


def show_diagnosis(run: Run) -> None:
    """Print the tables and sentences of a diagnosis, if the run has one."""
    for table in diagnosis_tables(run):
        print()
        table.show()
    print_lines(diagnosis_sentences(run))


def diagnosis_tables(run: Run) -> list[Table]:
    """Return relative drift by block, and the cosine of final features by task, for each row."""
    lines = run.all_lines()
    rows = rows_of(lines)
    if not rows:
        return []
    drift, share = ([by_block(lines, row, key) for row in rows] for key in ("relative", "share"))
    blocks = [
        (name, [f"{of[name]:.3f} ({share_text(part[name])})"
                for of, part in zip(drift, share, strict=True)])
        for name in drift[0]
    ]  # fmt: skip
    cosines = {row: by_task(lines, row, "final_cosine") for row in rows}
    names = [*short_names(list(next(iter(cosines.values())))).values(), AVERAGE]
    finals = [
        (row, [f"{value:.3f}" for value in (*values.values(), fmean(values.values()))])
        for row, values in cosines.items()
    ]
    return [
        Table("relative drift by block, mean over tasks (share of upstream propagation)", rows,
              blocks),
        Table("cosine of final features with the expert's", names, finals),
    ]  # fmt: skip


def diagnosis_sentences(run: Run) -> list[str]:
    """Return sentences on the blocks and tasks for which each row helps most and least."""
    lines, sentences = run.all_lines(), list[str]()
    rows = rows_of(lines)
    for row in rows if run.merger in rows else ():
        before, after = (by_task(lines, name, "final_cosine") for name in (run.merger, row))
        if row in (BASE, run.merger):
            continue
        if fmean(after.values()) < fmean(before.values()):
            sentences.append(
                f"{row}: final features are farther from the experts' than the merged model's "
                f"(mean cosine {fmean(after.values()):.3f}, merged {fmean(before.values()):.3f}). "
                "Are the calibration samples like these items?"
            )
        first, last = (by_block(lines, name, "relative") for name in (run.merger, row))
        change = {block: 100 * (last[block] / max(first[block], 1e-30) - 1) for block in first}
        best, worst = min(change, key=change.__getitem__), max(change, key=change.__getitem__)
        farthest = min(after, key=after.__getitem__)
        sentences.append(
            f"{row}: relative drift changes by {change[best]:+.0f} % at block {best} (best) to "
            f"{change[worst]:+.0f} % at block {worst}; farthest from its expert is "
            f"{short_names(list(after))[farthest]}, with a cosine of {after[farthest]:.3f}"
        )
    return sentences


def diagnosis_figures(run: Run) -> "dict[str, Figure]":
    """Draw Figs. 1, 2, 6 and 7 of the paper for a diagnosed run, by name, else nothing.

    `diagnosis-drift`: relative drift by block; `diagnosis-terms`: drift and its two terms (Eq. 3);
    `diagnosis-cosines`: cosines of final features and task vectors with the expert's;
    `diagnosis-components`: final features in the plane of the expert's first two principal
    directions, a panel for each task; `diagnosis-gains`: gain in accuracy against gain in cosine, a
    point for each task.
    """
    lines = run.all_lines()
    rows = rows_of(lines)
    if not rows:
        return {}
    names = {row: MERGED if row == run.merger else row for row in rows}
    drift = {names[row]: _values(by_block(lines, row, "relative")) for row in rows}
    terms = {
        row: {term: _values(by_block(lines, row, key)) for key, term in _TERMS.items()}
        for row in rows
        if row != BASE or len(rows) == 1
    }
    cosines = {
        title: {names[row]: _values(values) for row in rows
                if (values := by_task(lines, row, metric))}
        for metric, title in _COSINES.items()
    }  # fmt: skip
    figures = {
        "diagnosis-drift": curves({"mean over tasks": drift}, "block", "drift / expert's norm"),
        "diagnosis-terms": curves(terms, "block", "mean L2 norm"),
        "diagnosis-cosines": dots(cosines, "cosine with the expert's"),
    }
    if points := _components(lines, [*rows, EXPERTS], names):
        figures["diagnosis-components"] = curves(
            points, "first principal component", "second", joined=False
        )
    gains = {row: gain for row in rows if row not in (BASE, run.merger)
             if (gain := _gains(lines, row, run.merger))}  # fmt: skip
    if gains:
        label = "gain in cosine"
        figures["diagnosis-gains"] = curves(
            {"a point for each task": gains}, label, "gain in accuracy, points", joined=False
        )
    return figures


def _components(
    lines: Sequence[Line], rows: Sequence[str], names: Mapping[str, str]
) -> dict[str, dict[str, dict[Any, Value]]]:
    """Return task -> row -> first coordinate -> second coordinate of its items' final features."""
    coordinates: dict[str, dict[tuple[str, str, str], float]] = {"pca_1": {}, "pca_2": {}}
    for line in lines:
        if line["metric"] in coordinates:
            coordinates[line["metric"]][line["task"], line["row"], line["block"]] = line["value"]
    first, second = coordinates.values()
    titles = short_names(list(dict.fromkeys(task for task, *_ in first)))
    points: dict[str, dict[str, dict[Any, Value]]] = {t: {} for t in titles.values()}
    for row in rows:
        for key, value in first.items():
            if key[1] == row and row != BASE:
                panel = points[titles[key[0]]].setdefault(names.get(row, row), {})
                panel[value] = Value(second[key])
    return points


def _gains(lines: Sequence[Line], row: str, merger: str) -> dict[Any, Value]:
    """Return gain in cosine -> gain in accuracy over the merged model, for each task."""
    cosine, merged_cosine, accuracy, merged_accuracy = (
        by_task(lines, name, metric)
        for metric in ("final_cosine", "accuracy")
        for name in (row, merger)
    )
    return {
        cosine[task] - merged_cosine[task]: Value(100 * (accuracy[task] - merged_accuracy[task]))
        for task in sorted(cosine, key=lambda task: cosine[task] - merged_cosine.get(task, 0.0))
        if task in merged_cosine and task in accuracy and task in merged_accuracy
    }


def _values(numbers: dict[str, float]) -> dict[str, Value]:
    names = short_names(list(numbers))
    return {names[name]: Value(number) for name, number in numbers.items()}


def rows_of(lines: Sequence[Line]) -> list[str]:
    """Return the diagnosed rows: base, merger, and models made from it."""
    drift = [line for line in lines if line["metric"] == "relative"]
    places = {BASE: 0} | {line["merger"]: 1 for line in drift}
    return sorted(dict.fromkeys(line["row"] for line in drift), key=lambda row: places.get(row, 2))


def by_block(lines: Sequence[Line], row: str, metric: str) -> dict[str, float]:
    """Return a row's metric by the blocks' short names, averaged over tasks."""
    values: dict[str, list[float]] = {}
    for line in lines:
        if (line["row"], line["metric"]) == (row, metric) and line["block"]:
            values.setdefault(line["block"], []).append(line["value"])
    means = (math.fsum(numbers) / len(numbers) for numbers in values.values())
    return dict(zip(_short_blocks(list(values)), means, strict=True))


def by_task(lines: Sequence[Line], row: str, metric: str) -> dict[str, float]:
    """Return a row's metric of each task."""
    return {
        line["task"]: line["value"]
        for line in lines
        if (line["row"], line["metric"]) == (row, metric)
        and not line["block"] + line["class"]
        and line["task"] not in ("", AVERAGE)
    }


def _short_blocks(blocks: Sequence[str]) -> list[str]:
    """Drop the parts that all block names share: `encoder.layers.3` becomes `3`."""
    split = [block.split(".") for block in blocks]
    if len(blocks) < 2:
        return list(blocks)
    if len({*map(len, split)}) > 1:
        shared = next(n for n, words in enumerate(zip(*split, strict=False)) if len({*words}) > 1)
        return [".".join(words[shared:]) for words in split]
    differing = [n for n, words in enumerate(zip(*split, strict=True)) if len({*words}) > 1]
    return [".".join(words[n] for n in differing) for words in split]
