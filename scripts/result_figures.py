"""Figures of README.md and docs/ from the runs in docs/results."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from result_records import PAPER_ROWS, REAL, SUITES, UNLIKE, results_of, short_label

from fusion_bench_featcal.lab.diagnosis.views import by_block, diagnosis_figures
from fusion_bench_featcal.results import frame_of
from fusion_bench_featcal.results.figures import (
    ErrorBar,
    chart_style,
    curves,
    estimate_of,
    marks,
    svg,
)
from fusion_bench_featcal.results.names import (
    EXPERTS,
    FEATCAL,
    FEATCAL_PLUS,
    MERGED,
    ROWS_ERROR,
    ROWS_SHARE,
)

PAPER, PLUS = "FeatCal (paper's settings)", "FeatCal+"
LABELS = {MERGED: MERGED, PAPER: FEATCAL, PLUS: FEATCAL_PLUS, EXPERTS: EXPERTS}
"""Labels of the models -> names that have a look."""
DIAGNOSIS = "diagnosis"
DIAGNOSIS_FIGURES = ("diagnosis-terms", "diagnosis-components")


def rows_figure() -> str:
    """Draw what the step of the rows from weights breaks, and how far they count, by block."""
    panels: dict[str, dict[str, dict[Any, ErrorBar]]] = {}
    for suite in UNLIKE:
        (run,) = results_of(f"{suite}-clean").runs.values()
        for metric, title in ((ROWS_ERROR, "e"), (ROWS_SHARE, "f")):
            values = by_block(run, metric)["featcal_plus"].dropna().tolist()
            bars = {n: ErrorBar(value, 0.0) for n, value in enumerate(values)}
            panels.setdefault(title, {})[REAL[suite].split(",")[0]] = bars
    figure = curves(panels, "block", "median over modules")
    figure.axes[0].set_yscale("log")
    figure.axes[0].yaxis.set_major_formatter("{x:g}")
    return svg(figure)


def estimates(suite: str) -> dict[str, ErrorBar]:
    """Return the averages of a suite by label, in % with 95 % intervals."""
    lines = {line.first.name: line for line in frame_of(results_of(suite)).lines}
    paper = next(name for name in PAPER_ROWS if name in lines)
    names = {"task_arithmetic": MERGED, paper: PAPER, FEATCAL_PLUS: PLUS, EXPERTS: EXPERTS}
    return {label: estimate_of(lines[name]) for name, label in names.items()}


@chart_style()
def accuracies_figure() -> str:
    """Draw a line for each suite, from its merged model to its experts."""
    suites = SUITES | REAL
    styles = {label: marks([name])[name] for label, name in LABELS.items()}
    styles[PLUS] = styles[PLUS] | {"markerfacecolor": styles[PLUS]["color"]}
    figure = Figure(figsize=(7.6, 0.36 * len(suites) + 1.1))
    axes = figure.subplots()
    axes.grid(visible=False, axis="y")
    for height, suite in enumerate(suites):
        bars = estimates(suite)
        ends = [bars[MERGED].mean, bars[EXPERTS].mean]
        axes.plot(ends, [height, height], color="#d9d9d9", linewidth=7, zorder=1)
        plus = bars[PLUS]
        interval = [plus.mean - plus.below, plus.mean + plus.above]
        axes.plot(interval, [height] * 2, color=styles[PLUS]["color"], linewidth=1.2, zorder=2)
        for label, bar in bars.items():
            axes.plot(
                bar.mean, height, linestyle="none", zorder=3 + (label == PLUS), **styles[label]
            )
    axes.set_yticks(range(len(suites)), [*map(short_label, suites)])
    axes.set_ylim(len(suites) - 0.5, -0.5)
    axes.set_xlabel("average accuracy, % (thin line: 95 % interval of FeatCal+)")
    handles = [
        Line2D([], [], linestyle="none", label=name, **look) for name, look in styles.items()
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))
    return svg(figure)


def result_figures() -> dict[str, str]:
    """Return the texts of the figures (SVG) of README.md and docs/ by name."""
    (run,) = results_of(DIAGNOSIS).runs.values()
    diagnosis = diagnosis_figures(run)
    texts = {name: svg(diagnosis[name]) for name in DIAGNOSIS_FIGURES}
    return texts | {"accuracies": accuracies_figure(), "rows": rows_figure()}
