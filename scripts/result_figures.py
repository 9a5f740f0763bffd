"""Figures of README.md and docs/ from the runs in docs/results."""

from typing import Any

from result_records import REAL, SUITES, UNLIKE, results_of

from fusion_bench_featcal.lab.diagnosis.views import by_block, diagnosis_figures
from fusion_bench_featcal.results import frame_of
from fusion_bench_featcal.results.figures import ErrorBar, curves, dots, estimate_of, svg
from fusion_bench_featcal.results.names import ROWS_ERROR, ROWS_SHARE

DRAWN_ROWS = {"task_arithmetic": "merged", "featcal": "featcal", "featcal_plus": "featcal_plus",
              "experts": "experts"}  # fmt: skip
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


def accuracies_figure() -> str:
    """Draw a line for each suite, a dot for each row, with an interval if it has one."""
    rows: dict[str, dict[str, ErrorBar]] = {name: {} for name in DRAWN_ROWS.values()}
    for suite, label in (SUITES | REAL).items():
        category = label.replace("real pretrained weights", "pretrained")
        for line in frame_of(results_of(suite)).lines:
            if line.first.name in DRAWN_ROWS:
                rows[DRAWN_ROWS[line.first.name]][category] = estimate_of(line)
    return svg(dots({"": rows}, "average accuracy, %\nbars: 95 % interval"))


def result_figures() -> dict[str, str]:
    """Return the texts of the figures (SVG) of README.md and docs/ by name."""
    (run,) = results_of(DIAGNOSIS).runs.values()
    diagnosis = diagnosis_figures(run)
    texts = {name: svg(diagnosis[name]) for name in DIAGNOSIS_FIGURES}
    return texts | {"accuracies": accuracies_figure(), "rows": rows_figure()}
