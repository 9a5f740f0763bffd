"""The gallery of docs/gallery.md: every figure below docs/figures, with a caption."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
# File below docs/figures -> caption, page that explains it.
CAPTIONS = {
    "depth.png": (
        "Drift after each block on held-out images: merged, the paper's settings, FeatCal+",
        "plus.md#held-out-samples",
    ),
    "drift.png": (
        "Relative drift of each block before and after its own update, from a run's log",
        "suites.md#results",
    ),
    "accuracy.png": (
        "Accuracy of each task: merged, calibrated, and its expert",
        "suites.md#results",
    ),
    "comparison.png": (
        "Every merger with every post-merging method, average accuracy",
        "comparison.md#every-merger",
    ),
    "cost.png": ("Accuracy against seconds of each method", "comparison.md#every-merger"),
    "convergence.png": (
        "Losses of the trained corrections over their steps",
        "baselines.md#on-the-bundled-image-suite",
    ),
}


def gallery() -> str:
    """Markdown of all figures; those without a caption here are named by their file."""
    files = sorted(path.relative_to(FIGURES).as_posix() for path in FIGURES.rglob("*.png"))
    ordered = [name for name in CAPTIONS if name in files]
    parts = []
    for name in [*ordered, *(name for name in files if name not in CAPTIONS)]:
        words, page = CAPTIONS.get(name, (_words(name), ""))
        source = f" ([explained]({page}))" if page else ""
        parts.append(f"![{words}](figures/{name})\n\n*{words}*{source}")
    return "\n\n".join(parts)


def _words(name: str) -> str:
    """`studies/samples/clip.png` becomes `studies, samples: clip`."""
    *folders, file = name.removesuffix(".png").replace("_", " ").split("/")
    return ": ".join([", ".join(folders), file] if folders else [file])
