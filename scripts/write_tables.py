"""Write the generated parts of README.md and docs/: tables, settings and quoted YAML.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`; its source is
named in PARTS. `--check` changes nothing and fails where a part is stale.

    python scripts/write_tables.py [--check] [--runs outputs/demo-full]
        [--comparisons outputs/compare-full] [--diagnoses outputs/diagnosis]
        [--studies outputs/studies]
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import paper
import reproduce
from comparison_tables import (
    columns_table,
    costs_table,
    grid_table,
    seconds_table,
    tasks_table,
)
from gallery import gallery
from study_tables import STUDIES, keep_studies, study_part

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
COMPARISON = RESULTS / "comparison"
FIGURES = ROOT / "docs" / "figures"
DIAGNOSES = RESULTS / "diagnosis"
DIAGNOSED = {"": "clip-vit-mini_TA6", "-t5": "flan-t5-mini_TA6", "-llama": "llama-mini_TA6"}
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PART = re.compile(
    r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(^<!-- end of (?P=name) -->)",
    re.DOTALL | re.MULTILINE,
)


def combined_table(pool: str) -> str:
    """The tables of `featcal report` over demo-full's runs on one pool."""
    text = (RESULTS / pool / "report.md").read_text(encoding="utf-8")
    tables = text.partition("## ")[2].partition("\n")[2].partition("## Runs")[0].strip()
    return f"{tables}\n- {provenance(RESULTS / pool)}"


def provenance(folder: Path) -> str:
    """Machine, versions and data of the runs."""
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    device, versions = run["device"], run["versions"]
    threads = device["torch_threads"]
    items = sum(task["items"] for task in run.get("test_sets", {}).values())
    kind = "images" if run["suite"].startswith(("clip", "resnet")) else "texts"
    tested = f", {items} test {kind}" if items else ""  # FusionBench's own pools do not count them
    return (
        f"measured on {device['cpu']} ({device['platform']}, {device['cpu_cores']} cores, "
        f"{threads} thread{'s' if threads > 1 else ''}) with torch {versions['torch']} and "
        f"transformers {versions['transformers']}; data: {run['suite']}{tested}"
    )


def methods_table() -> str:
    """Every registered method."""
    from fusion_bench_featcal.methods.registry import all_methods

    rows = ["| `method=` | Kind | Description | Source |", "|---|---|---|---|"]
    for option, method in all_methods().items():
        kind = "merger" if hasattr(method, "merge") else "post-merging"
        summary = (method.__doc__ or "").partition("\n")[0]
        rows.append(f"| `{option}` | {kind} | {summary} | {method.source} |")
    return "\n".join(rows)


def yaml_file(path: str) -> str:
    """A shipped YAML file, quoted whole."""
    return f"```yaml\n{(ROOT / path).read_text(encoding='utf-8').strip()}\n```"


SUITES = {
    "clip-vit-mini_TA6": "six image tasks",
    "clip-vit-mini_alphabets2": "two alphabets",
    "flan-t5-mini_TA6": "T5, six text tasks",
    "llama-mini_TA6": "Llama, six text tasks",
}
README_ROWS = (
    "merged", "+ surgery:calibration", "+ prob_surgery:calibration", "+ surgery_v2:calibration",
    "+ distillation", "+ featcal", "+ featcal:plus", "experts",
)  # fmt: skip


def draws(suite: str) -> str:
    """Every row of a suite with 8, 64 and 256 samples, three draws."""
    return columns_table({f"n = {n}": COMPARISON / f"draws-{suite}-n{n}" for n in (8, 64, 256)})


def comparison_suites() -> str:
    """A few rows on every suite, 64 samples."""
    folders = {head: COMPARISON / f"draws-{suite}-n64" for suite, head in SUITES.items()}
    measured = provenance(COMPARISON / "grid").partition("; data")[0]
    return f"{columns_table(folders, README_ROWS)}\n\n- {measured}"


def comparison_seconds() -> str:
    """Seconds of FeatCal+ and of trained methods in every comparison that has FeatCal+."""
    sizes = (8, 64, 256)
    folders = {f"{suite}, n = {n}": f"draws-{suite}-n{n}" for suite in SUITES for n in sizes} | {
        "clip-vit-mini_TA6, n = 64, the table above": "costs",
        "clip-vit-mini_TA6, n = 64, the field": "field",
        "clip-vit-mini_TA6, n = 256, every merger": "grid",
        "flan-t5-mini_TA6, n = 256, two mergers": "flan-t5-mini",
        "llama-mini_TA6, n = 256, two mergers": "llama-mini",
    }
    plus = "featcal:plus"
    trained = ("distillation", "surgery_v2:calibration", "prodistill")
    pairs = [(plus, "featcal"), *((name, plus) for name in trained)]
    return seconds_table({title: COMPARISON / name for title, name in folders.items()}, pairs)


def diagnosis_part(pool: str) -> str:
    """The tables and sentences of a diagnosis."""
    from fusion_bench_featcal.results.diagnosis import diagnosis_grids, diagnosis_sentences
    from fusion_bench_featcal.results.lines import LINES_FILE, read_lines

    lines = read_lines(DIAGNOSES / pool / LINES_FILE)
    grids = diagnosis_grids(lines).items()
    tables = [f"*{title}*\n\n{grid.for_page().markdown()}" for title, grid in grids]
    run = json.loads((DIAGNOSES / pool / "run.json").read_text(encoding="utf-8"))
    notes = [note for note in run["notes"] if note.startswith("diagnosis: ")]
    sentences = [*diagnosis_sentences(lines), *notes, provenance(DIAGNOSES / pool)]
    return "\n\n".join([*tables, "\n".join(f"- {line}" for line in sentences)])


PARTS: dict[str, Callable[[], str]] = {
    "results-TA6": lambda: combined_table("TA6"),
    "results-alphabets2": lambda: combined_table("alphabets2"),
    "comparison-grid": lambda: "\n".join(
        [grid_table(COMPARISON / "grid"), f"- {provenance(COMPARISON / 'grid')}"]
    ),
    "comparison-texts": lambda: "\n\n".join(
        grid_table(COMPARISON / pool) for pool in ("flan-t5-mini", "llama-mini")
    ),
    "comparison-suites": comparison_suites,
    "comparison-costs": lambda: costs_table(COMPARISON / "costs"),
    "comparison-seconds": comparison_seconds,
    "trainings": lambda: (ROOT / "benchmarks/results/trainings.md").read_text("utf-8").strip(),
    **{f"draws-{suite}": partial(draws, suite) for suite in SUITES},
    **{f"study-{name}": partial(study_part, name) for name in STUDIES},
    "comparison-tasks": lambda: tasks_table(COMPARISON / "grid", "task_arithmetic"),
    "comparison-field": lambda: grid_table(COMPARISON / "field"),
    "comparison-kl": lambda: grid_table(COMPARISON / "kl"),
    "results-flan-t5-mini": lambda: combined_table("flan-t5-mini"),
    "results-llama-mini": lambda: combined_table("llama-mini"),
    "results-resnet-mini": lambda: combined_table("resnet-mini"),
    "gallery": gallery,
    "paper-commands": reproduce.commands_part,
    "paper-averages": paper.averages_table,
    "paper-samples": paper.samples_table,
    "paper-corrupted": paper.corruption_table,
    "paper-cost": paper.cost_table,
    "paper-observations": paper.observations_part,
    "paper-drift": paper.drift_table,
    "plus-grid": lambda: (
        (ROOT / "benchmarks/results/plus_grid.md").read_text("utf-8").partition("\n\n**")[0]
    ),
    "model-types": lambda: (ROOT / "benchmarks/results/model_types.md").read_text("utf-8").strip(),
    "pools": lambda: (
        (ROOT / "benchmarks/results/pools.md").read_text("utf-8").partition("\n\n**")[0]
    ),
    "mergers": lambda: (ROOT / "benchmarks/results/mergers.md").read_text("utf-8").strip(),
    **{f"diagnosis{end}": partial(diagnosis_part, pool) for end, pool in DIAGNOSED.items()},
    "methods": methods_table,
    "method-yaml": lambda: yaml_file("config/method/featcal.yaml"),
}


def copy_report(source: Path, target: Path) -> None:
    """Copy what `featcal report` wrote."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("report.md", "report.csv", "report.json"):
        shutil.copyfile(source / name, target / name)


def keep_results(runs: Path) -> None:
    """Copy demo-full's combined tables into the repository and draw one of its image runs."""
    from fusion_bench_featcal.results import charts
    from fusion_bench_featcal.results.figures import figures_of
    from fusion_bench_featcal.results.summary import summarise

    for folder in sorted((runs / "tables").iterdir()):
        target = RESULTS / folder.name
        copy_report(folder, target)
        one_run = runs / folder.name / "task_arithmetic-42"
        shutil.copyfile(one_run / "report.json", target / "run.json")
    drawn = runs / "TA6" / "task_arithmetic-42"
    if drawn.is_dir():
        figures = figures_of(summarise([drawn]))
        # The depth is another run's.
        charts.save({name: figures[name] for name in ("accuracy", "drift")}, FIGURES, "docs")


def keep_comparisons(folder: Path) -> None:
    """Copy compare-full's tables into the repository and draw its figures."""
    from fusion_bench_featcal.results import charts
    from fusion_bench_featcal.results.figures import figures_of
    from fusion_bench_featcal.results.find import find
    from fusion_bench_featcal.results.summary import summarise

    for source in sorted((folder / "tables").iterdir()):
        copy_report(source, COMPARISON / source.name)
    one_run = folder / "grid" / "task_arithmetic" / "report.json"
    shutil.copyfile(one_run, COMPARISON / "grid" / "run.json")
    grid = figures_of(summarise(find([folder / "grid"]).runs))
    training = figures_of(summarise([folder / "grid" / "task_arithmetic"]))
    drawn = {"comparison": grid["comparison"], "cost": grid["cost"]}
    charts.save(drawn | {"convergence": training["convergence"]}, FIGURES, "docs")


def keep_diagnoses(folder: Path) -> None:
    """Copy the numbers of `make diagnose` into the repository, and draw the image suite's."""
    from fusion_bench_featcal.results import charts
    from fusion_bench_featcal.results.diagnosis import diagnosis_figures
    from fusion_bench_featcal.results.lines import LINES_FILE, read_lines

    for pool in DIAGNOSED.values():
        target = DIAGNOSES / pool
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / pool / LINES_FILE, target / LINES_FILE)
        shutil.copyfile(folder / pool / "report.json", target / "run.json")
    lines = read_lines(DIAGNOSES / DIAGNOSED[""] / LINES_FILE)
    charts.save(diagnosis_figures(lines), FIGURES, "docs")


def rewritten(page: Path) -> str:
    """A page's text with every generated part made anew."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}{PARTS[match['name']]()}\n{match[3]}"

    return PART.sub(fill, page.read_text(encoding="utf-8"))


def main() -> None:
    """Write, or with --check compare, all pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--runs", type=Path, help="take new tables from this demo-full folder")
    parser.add_argument("--comparisons", type=Path, help="and these from a compare-full folder")
    parser.add_argument("--diagnoses", type=Path, help="and these from make diagnose's folder")
    parser.add_argument("--studies", type=Path, help="and these from a folder of make studies")
    options = parser.parse_args()
    if options.runs:
        keep_results(options.runs)
    if options.comparisons:
        keep_comparisons(options.comparisons)
    if options.diagnoses:
        keep_diagnoses(options.diagnoses)
    if options.studies:
        keep_studies(options.studies)
    stale = [page for page in PAGES if rewritten(page) != page.read_text(encoding="utf-8")]
    for page in stale:
        print(f"{'stale' if options.check else 'written'}: {page.relative_to(ROOT)}")
        if not options.check:
            page.write_text(rewritten(page), encoding="utf-8")
    if stale and options.check:
        sys.exit("run: python scripts/write_tables.py")


if __name__ == "__main__":
    main()
