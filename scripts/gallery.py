"""The gallery of docs/gallery.md: every figure below docs/figures, with a caption."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
# File below docs/figures -> caption, page that explains it.
CAPTIONS = {
    "depth.png": (
        "Drift after each block, class token of held-out calibration images: merged, the paper's "
        "settings, FeatCal+",
        "plus.md#held-out-samples",
    ),
    "drift.png": (
        "Relative drift of each block before and after its own update, all tokens of the "
        "calibration images, from a run's log",
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
    "corruptions.png": (
        "Gaussian noise, motion blur and fog at severities 1 to 5",
        "tasks.md#corrupted-mixed-and-noise-data",
    ),
    "diagnosis.svg": (
        "Relative drift after each block, all tokens of test items",
        "diagnose.md#drift-along-the-depth",
    ),
    "diagnosis-terms.svg": (
        "Local mismatch and upstream propagation, all tokens of test items",
        "diagnose.md#local-mismatch-and-upstream-propagation",
    ),
    "diagnosis-change.svg": (
        "Change of relative drift by task and block, all tokens of test items",
        "diagnose.md#drift-along-the-depth",
    ),
    "report.png": ("The page that featcal report --html writes", "report.md"),
}
# Folder -> end of a file's name -> caption; the suite is in the folder's or the file's name.
_MANY = {
    "studies": {
        "samples": "Accuracy by samples per task, beside the paper's curves",
        "ablation": "Parts of FeatCal and FeatCal+ left out or added",
        "sweep": "Accuracy along FeatCal's three strengths",
        "tasks": "Accuracy by the number of merged tasks",
        "cost": "Costs by samples per task",
        "corruption": "Calibration on corrupted images, beside the paper's",
        "severity": "Calibration on corrupted images by severity",
        "transfer": "Calibration on other data",
    },
}
_EXPLAINED = {"studies": "studies.md"}


def gallery() -> str:
    """Markdown of all figures; those without a caption here are named by their file."""
    files = sorted(
        path.relative_to(FIGURES).as_posix()
        for kind in ("png", "svg")
        for path in FIGURES.rglob(f"*.{kind}")
    )
    ordered = [name for name in CAPTIONS if name in files]
    parts = []
    for name in [*ordered, *(name for name in files if name not in CAPTIONS)]:
        words, page = CAPTIONS.get(name) or _one_of_many(name)
        source = f" ([explained]({page}))" if page else ""
        parts.append(f"![{words}](figures/{name})\n\n*{words}*{source}")
    return "\n\n".join(parts)


def _one_of_many(name: str) -> tuple[str, str]:
    """Caption and page of a figure that is drawn for several suites."""
    folder, _, rest = name.removesuffix(".png").partition("/")
    stem = rest.replace("/", "-")
    for end, caption in _MANY.get(folder, {}).items():
        suite, found, more = stem.partition(f"-{end}")
        if found:
            panel = more.strip("-_").replace("_", " ")
            return f"{caption} ({', '.join(filter(None, (suite, panel)))})", _EXPLAINED[folder]
    raise ValueError(f"docs/figures/{name} has no caption in scripts/gallery.py")
