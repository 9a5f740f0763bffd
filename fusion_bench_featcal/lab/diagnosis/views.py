"""Tables and figures of a diagnosis: drift and its two terms by block, features by task."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from fusion_bench_featcal.results import AVERAGE, BASE, EXPERTS, Run
from fusion_bench_featcal.results.figures import MERGED, ErrorBar, curves, dots
from fusion_bench_featcal.results.names import ROWS_SHARE
from fusion_bench_featcal.results.tables import Table, print_lines, share_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TERMS = {"drift": "drift", "mismatch": "local mismatch", "propagation": "upstream propagation"}
_COSINES = {"final_cosine": "final features", "task_vector_cosine": "task vectors"}


def row_names(run: Run) -> list[str]:
    """Return the diagnosed models: base, merged model, other models. Empty without a diagnosis."""
    diagnosed = dict.fromkeys(n["row"] for n in run.all_lines() if n["metric"] == "relative")
    positions = {BASE: 0, run.merger: 1}
    return sorted(diagnosed, key=lambda row: positions.get(row, 2))


def by_block(run: Run, metric: str) -> Any:
    """Return a frame of a metric, averaged over tasks. Its index are blocks, its columns models."""
    frame = _lines_of(run, metric)
    means = frame.pivot_table(index="block", columns="row", values="value", sort=False)
    return means.set_axis(_short_blocks([str(block) for block in means.index]))


def by_task(run: Run, metric: str) -> Any:
    """Return a frame of a metric. Its index are tasks, its columns models."""
    frame = _lines_of(run, metric)
    frame = frame[~frame["task"].isin(["", AVERAGE]) & (frame["block"] == "")]
    return frame.pivot_table(index="task", columns="row", values="value", sort=False)


def _lines_of(run: Run, metric: str) -> Any:
    lines = [line for line in run.all_lines() if line["metric"] == metric]
    return pd.DataFrame(lines, columns=["row", "task", "block", "value"])


def show_diagnosis(run: Run) -> None:
    """Print the tables and sentences of a diagnosis, if the run has one."""
    for table in diagnosis_tables(run):
        print()
        table.show()
    print_lines(diagnosis_sentences(run))


def diagnosis_tables(run: Run) -> list[Table]:
    """Return each model's relative drift by block, and its cosine of final features by task."""
    rows = row_names(run)
    if not rows:
        return []
    drift, share = by_block(run, "relative"), by_block(run, "share")
    blocks = [
        (block, [f"{drift.at[block, row]:.3f} ({share_text(share.at[block, row])})"
                 for row in rows])
        for block in drift.index
    ]  # fmt: skip
    cosines = by_task(run, "final_cosine")
    names = [*map(str, cosines.index), AVERAGE]
    finals = [
        (row, [f"{value:.3f}" for value in (*cosines[row], cosines[row].mean())]) for row in rows
    ]
    title = "relative drift by block, mean over tasks (in brackets: share of upstream propagation)"
    return [
        Table(title, rows, blocks),
        Table("cosine of final features with the expert's", names, finals),
    ]


def diagnosis_sentences(run: Run) -> list[str]:
    """Return sentences on the blocks and tasks for which each method helps most and least."""
    rows, sentences = row_names(run), list[str]()
    if run.merger not in rows:
        return []
    cosines, drift = by_task(run, "final_cosine"), by_block(run, "relative")
    before, first = cosines[run.merger], drift[run.merger].clip(lower=1e-30)
    for row in (row for row in rows if row not in (BASE, run.merger)):
        after, change = cosines[row], 100 * (drift[row] / first - 1)
        if after.mean() < before.mean():
            sentences.append(
                f"{row}: its final features are farther from the experts' than those of the merged "
                f"model (mean cosine {after.mean():.3f}, merged model {before.mean():.3f}). "
                "Check whether the calibration samples resemble these examples"
            )
        farthest = after.idxmin()
        sentences.append(
            f"{row}: the relative drift changes by {change.min():+.0f} % at block "
            f"{change.idxmin()} (best) to {change.max():+.0f} % at block {change.idxmax()} "
            f"(worst). The task farthest from its expert is {farthest}, with a cosine of "
            f"{after.min():.3f}"
        )
    return sentences


def diagnosis_figures(run: Run) -> "dict[str, Figure]":
    """Draw Figs. 1, 2, 6 and 7 of the paper for a diagnosed run, by name, else nothing.

    `diagnosis-drift`: relative drift by block; `diagnosis-terms`: drift and its two terms (Eq. 3);
    `diagnosis-cosines`: cosines of final features and task vectors with the expert's;
    `diagnosis-components`: final features in the plane of the expert's first two principal
    directions, a panel for each task; `diagnosis-gains`: gain in accuracy against gain in cosine, a
    point for each task. For FeatCal+ `diagnosis-rows`: share of the rows of task vectors, by block.
    """
    rows = row_names(run)
    if not rows:
        return {}
    names = {row: MERGED if row == run.merger else row for row in [*rows, EXPERTS]}
    relative = by_block(run, "relative")
    by_term = {term: by_block(run, metric) for metric, term in _TERMS.items()}
    terms = {
        row: {term: _values(frame[row]) for term, frame in by_term.items()}
        for row in rows
        if row != BASE or len(rows) == 1
    }
    by_cosine = {title: by_task(run, metric) for metric, title in _COSINES.items()}
    cosines = {
        title: {names[row]: _values(frame[row].dropna()) for row in rows if row in frame}
        for title, frame in by_cosine.items()
    }
    drift = {names[row]: _values(relative[row]) for row in rows}
    figures = {
        "diagnosis-drift": curves({"mean over tasks": drift}, "block", "drift / expert's norm"),
        "diagnosis-terms": curves(terms, "block", "mean L2 norm"),
        "diagnosis-cosines": dots(cosines, "cosine with the expert's"),
    }
    if any(line["metric"] == ROWS_SHARE for line in run.all_lines()):
        shares = by_block(run, ROWS_SHARE)
        panel: dict[str, Any] = {names[row]: _values(shares[row].dropna()) for row in shares}
        label = "share of the task-vector rows"
        figures["diagnosis-rows"] = curves({"median over modules": panel}, "block", label)
    if points := _components(run, names):
        label = "first principal component"
        figures["diagnosis-components"] = curves(points, label, "second", joined=False)
    if gains := _gains(run, rows):
        label = "gain in accuracy, points"
        panels = {"a point for each task": gains}
        figures["diagnosis-gains"] = curves(panels, "gain in cosine", label, joined=False)
    return figures


def _components(run: Run, names: Mapping[str, str]) -> dict[str, dict[str, dict[Any, ErrorBar]]]:
    """Return task -> model -> first coordinate -> second coordinate of its items' features."""
    first, second = _lines_of(run, "pca_1"), _lines_of(run, "pca_2")
    pairs: Any = first.merge(second, on=["row", "task", "block"])
    points: dict[str, dict[str, dict[Any, ErrorBar]]] = {
        task: {} for task in pairs["task"].unique()
    }
    for row, name in names.items():
        for pair in pairs[pairs["row"] == row].itertuples() if row != BASE else ():
            panel = points[pair.task].setdefault(name, {})
            panel[pair.value_x] = ErrorBar(pair.value_y)
    return points


def _gains(run: Run, rows: Sequence[str]) -> dict[str, dict[object, ErrorBar]]:
    """Return model -> gain in cosine -> gain in accuracy over the merged model, for each task."""
    cosines, accuracies = by_task(run, "final_cosine"), by_task(run, "accuracy")
    gains: dict[str, dict[object, ErrorBar]] = {}
    for row in (row for row in rows if row not in (BASE, run.merger)):
        if {row, run.merger} <= {*cosines} & {*accuracies}:
            cosine_gains = (cosines[row] - cosines[run.merger]).sort_values()
            gain = 100 * (accuracies[row] - accuracies[run.merger])
            tasks = [task for task in cosine_gains.index if task in gain.index]
            gains[row] = {cosine_gains[task]: ErrorBar(gain[task]) for task in tasks}
    return {row: points for row, points in gains.items() if points}


def _values(series: Any) -> dict[str, ErrorBar]:
    return {str(name): ErrorBar(value) for name, value in series.items()}


def _short_blocks(blocks: Sequence[str]) -> list[str]:
    """Drop the words that all block names share: `encoder.layers.3` becomes `3`."""
    split = [block.split(".") for block in blocks]
    if len(blocks) < 2:
        return list(blocks)
    if len({*map(len, split)}) > 1:
        shared = next(n for n, words in enumerate(zip(*split, strict=False)) if len({*words}) > 1)
        return [".".join(words[shared:]) for words in split]
    differing = [n for n, words in enumerate(zip(*split, strict=True)) if len({*words}) > 1]
    return [".".join(words[n] for n in differing) for words in split]
