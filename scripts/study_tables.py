"""Parts of docs/studies.md: tables and sentences of `make studies`, and their files in docs/."""

import csv
import io
import shutil
from pathlib import Path

from fusion_bench_featcal.results.study import Study
from fusion_bench_featcal.results.study_page import fewer_samples, study_grids

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results" / "studies"
FIGURES = ROOT / "docs" / "figures" / "studies"
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
    """Copy tables and figures of a folder with suites and studies into the repository."""
    for source in sorted(folder.glob("*/*/study.json")):
        suite, study = source.parent.parent.name, source.parent.name
        target = RESULTS / suite / study
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / source.name)
        (target / "table.csv").write_text(_accuracies(source.parent / "table.csv"), "utf-8")
        FIGURES.mkdir(parents=True, exist_ok=True)
        for figure in [*source.parent.glob("*.png"), *source.parent.glob("*.svg")]:
            shutil.copyfile(figure, FIGURES / f"{suite}-{figure.name}")


def _accuracies(table: Path) -> str:
    """The long table's accuracies: with costs and shares it is too long to keep."""
    text = io.StringIO()
    with table.open(encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file)
        writer = csv.DictWriter(text, lines.fieldnames or (), lineterminator="\n")
        writer.writeheader()
        writer.writerows(line for line in lines if line["metric"] == "accuracy")
    return text.getvalue()


def study_part(name: str) -> str:
    """Tables, findings and figures of one study on one suite."""
    suite, study_name = STUDIES[name]
    if not (RESULTS / suite / study_name / "study.json").is_file():
        return f"Not run on {suite}: `make studies`."
    study = Study.load(RESULTS / suite / study_name)
    first, *others = study_grids(study)
    parts = [first[1].for_page().markdown()]
    for title, grid in others:
        parts += [f"{title[0].upper()}{title[1:]}:", grid.for_page().markdown()]
    if lines := fewer_samples(study):
        parts.append("\n".join(f"- {line}" for line in lines))
    start = f"{suite}-{study_name}"
    figures = [*FIGURES.glob(f"{start}.png"), *sorted(FIGURES.glob(f"{start}-*.png"))]
    parts += [f"![{study_name} on {suite}](figures/studies/{path.name})" for path in figures]
    return "\n\n".join([*parts, provenance(study)])


def provenance(study: Study) -> str:
    """Machine, versions, seeds and time of a study."""
    device, versions = study.device, study.versions
    minutes = "" if study.minutes is None else f"; {study.minutes:.0f} minutes"
    return (
        f"Measured on {device['cpu']} ({device['cpu_cores']} cores, shared with other programs, "
        f"{device['torch_threads']} thread) with torch {versions['torch']} and transformers "
        f"{versions['transformers']}; seeds {', '.join(map(str, study.seeds))}{minutes}."
    )
