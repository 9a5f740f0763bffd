"""Draw docs/figures/accuracies.svg: average accuracies on the bundled suites, from docs/results.

python scripts/draw_accuracies.py
"""

from comparison_tables import SUITES, prepared
from paper import ROOT, read

from fusion_bench_featcal.files import write_atomic
from fusion_bench_featcal.results.figures import Value, dots, svg

ROWS = {"task_arithmetic": "merged", "featcal": "featcal", "featcal_plus": "featcal_plus",
        "experts": "experts"}  # fmt: skip
FILE = ROOT / "docs" / "figures" / "accuracies.svg"


def figure_text() -> str:
    """Return the figure: a line for each suite, a dot for each row with 64 samples per task."""
    rows: dict[str, dict[str, Value]] = {name: {} for name in ROWS.values()}
    for suite, category in SUITES.items():
        for row in map(prepared, read("comparison", f"draws-{suite}-n64.json")["rows"]):
            if row["name"] in ROWS:
                value = Value(100 * row["accuracy"]["average"], 100 * (row["half"] or 0.0))
                rows[ROWS[row["name"]]][category] = value
    figure = dots({"": rows}, "average accuracy, %")
    return svg(figure)


if __name__ == "__main__":
    write_atomic(FILE, figure_text(), "docs/figures")
