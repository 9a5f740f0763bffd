"""Draw docs/figures/corruptions.png: images of the bundled suite, corrupted at every severity.

python scripts/draw_corruptions.py
"""

import io
from pathlib import Path

from matplotlib.figure import Figure

from fusion_bench_featcal.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt, seeded_random
from fusion_bench_featcal.files import write_atomic
from fusion_bench_featcal.suites.image import load_split

INK = "#808080"  # readable on light and dark pages, as the figure is transparent
SHOWN = {"mini_fashion_mnist": 60, "mini_latin": 3}  # task -> position of an image
FILE = Path(__file__).resolve().parents[1] / "docs" / "figures" / "corruptions.png"


def draw() -> Figure:
    """Draw the figure: a row for each corruption and image, a column for each severity."""
    rows = [(name, task, position) for name in CORRUPTIONS for task, position in SHOWN.items()]
    figure = Figure(figsize=(5.4, 0.95 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), 1 + len(SEVERITIES))
    for line, (name, task, position) in zip(grid, rows, strict=True):
        clean = load_split(task, "train")[position]["image"]
        corrupted = [corrupt(clean, name, s, seeded_random(42, task, position)) for s in SEVERITIES]
        for axes, picture in zip(line, [clean, *corrupted], strict=True):
            axes.imshow(picture, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        line[0].set_ylabel(name.replace("_", "\n"), fontsize=9, color=INK)
    for axes, title in zip(grid[0], ["clean", *(f"severity {s}" for s in SEVERITIES)], strict=True):
        axes.set_title(title, fontsize=9, loc="center", color=INK)
    return figure


if __name__ == "__main__":
    buffer = io.BytesIO()
    draw().savefig(buffer, format="png", dpi=110, transparent=True)
    write_atomic(FILE, buffer.getvalue(), "docs/figures")
