"""Parts of docs/studies.md: tables of `make studies` out of docs/results/studies."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from fusion_bench_featcal.results.items import half_width

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results" / "studies"
IMAGES, TEXTS = "clip-vit-mini_TA6", ("flan-t5-mini_TA6", "llama-mini_TA6")
STUDIES = {
    f"{study}-{suite}": (suite, study)
    for study, suites in {
        "samples": (IMAGES, *TEXTS),
        "ablation": (IMAGES, *TEXTS),
        "ablation_fog": (IMAGES,),
        "sweep": (IMAGES,),
        "tasks": ("clip-vit-mini_all8",),
        "cost": (IMAGES,),
        "corruption": (IMAGES,),
        "severity": (IMAGES,),
        "transfer": (IMAGES,),
    }.items()
    for suite in suites
}
"""Part -> suite and study."""


def keep_studies(folder: Path) -> None:
    """Copy results of a folder with suites and studies into the repository."""
    for source in sorted(folder.glob("*/*/report.json")):
        target = RESULTS / source.parent.parent.name / source.parent.name
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / "report.json")


def study_part(name: str) -> str:
    """Return the tables of one study on one suite."""
    suite, study_name = STUDIES[name]
    path = RESULTS / suite / study_name / "report.json"
    if not path.is_file():
        return f"Not run on {suite}: `make studies`."
    study = json.loads(path.read_text())
    rows = [row for point in study["points"] for row in point["rows"]]
    mergers = dict.fromkeys(row["upstream"] for row in rows if row["upstream"])
    several = len(study["points"]) > 1
    tables = [_by_point(study, m) if several else _by_row(study, m) for m in mergers]
    if study["name"] == "cost":
        tables += [_by_point(study, m, "seconds") for m in mergers]
    return "\n\n".join([*tables, provenance(study)])


def _by_point(study: Mapping[str, Any], merger: str, cost: str = "") -> str:
    """Return rows by points: a cost, or mean accuracy and the gap of the worst task."""
    points: dict[str, dict[str, list[Any]]] = {}
    for point in study["points"]:
        labels = {k: v for k, v in point["labels"].items() if k not in study["over"]}
        short = {key: "n" if key == "samples_per_task" else key for key in labels}
        text = ", ".join(f"{short[key]} = {value}" for key, value in labels.items())
        for row in point["rows"]:
            has_value = not cost or cost in row["cost"]
            if row["upstream"] == merger and row["name"] != "base" and has_value:
                points.setdefault(text, {}).setdefault(row["name"], []).append(row)
    names = list(dict.fromkeys(name for rows in points.values() for name in rows))
    lines = [
        [text, *(_cell(rows[name], cost) if name in rows else "-" for name in names)]
        for text, rows in points.items()
    ]
    lines.insert(0, [cost or "mean accuracy, % (gap of the worst task)", *names])
    return _table(lines)


def _cell(rows: list[Any], cost: str) -> str:
    if cost:
        return f"{fmean(row['cost'][cost] for row in rows):.1f}"
    values = [row["accuracy"]["average"] for row in rows]
    shares = [row["worst_recovered_gap"] for row in rows]
    worst = min((share for share in shares if share is not None), default=None)
    half = rows[0]["half_width"] if len(rows) == 1 else half_width(values)
    text = f"{100 * fmean(values):.1f} ± {100 * half:.1f}"
    return text if worst is None else f"{text} ({100 * worst:.0f} %)"


def _by_row(study: Mapping[str, Any], merger: str) -> str:
    """Return rows of the only point with their differences from the row that they change."""
    lines = [["row", "average, %", "gap of the worst task", "against", "points"]]
    for row in study["points"][0]["rows"]:
        if row["upstream"] != merger or row["name"] == "base":
            continue
        share, difference = row["worst_recovered_gap"], row["difference"]
        ends = "-"
        if difference is not None and row["name"] not in (merger, "experts"):
            estimate, low, high = (100 * difference[key] for key in ("estimate", "low", "high"))
            ends = f"{estimate:+.1f} [{low:+.1f}, {high:+.1f}]"
        is_repair = ends != "-"
        lines.append(
            [
                row["name"],
                f"{100 * row['accuracy']['average']:.1f} ± {100 * row['half_width']:.1f}",
                f"{100 * share:.0f} %" if share is not None and is_repair else "-",
                row["against"] if is_repair else "-",
                ends,
            ]
        )
    return _table(lines)


def _table(lines: list[list[str]]) -> str:
    texts = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([texts[0], "|:--" + "|--:" * (len(lines[0]) - 1) + "|", *texts[1:]])


def provenance(study: Mapping[str, Any]) -> str:
    """Return the machine, versions and seeds of a study."""
    device, versions = study["device"], study["versions"]
    return (
        f"Measured on {device['cpu']} ({device['cpu_cores']} cores, shared with other programs, "
        f"{device['torch_threads']} thread) with torch {versions['torch']} and transformers "
        f"{versions['transformers']}. Seeds: {', '.join(map(str, study['seeds']))}."
    )
