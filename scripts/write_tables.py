"""Write the generated parts of README.md and docs/ from docs/results, settings and benchmarks.

A generated part is between `<!-- generated: NAME -->` and `<!-- end of NAME -->`. PARTS has its
source. `--check` changes nothing and fails if a part is stale.

    python scripts/write_tables.py [--check]
"""

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import paper
import reproduce
from comparison_tables import (
    RUNS,
    SUITES,
    costs_table,
    draws,
    grid,
    grid_tasks,
    readme_table,
    run_table,
    suites_table,
    times_table,
)
from paper import ROOT, table
from study_tables import diagnosis_part, study_table

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PART = re.compile(
    r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(^<!-- end of (?P=name) -->)",
    re.DOTALL | re.MULTILINE,
)


def methods_table() -> str:
    """Return a table of the registered methods."""
    from fusion_bench_featcal.lab.rivals.registry import all_methods

    lines = []
    for option, method in all_methods().items():
        kind = "merger" if hasattr(method, "merge") else "post-merging"
        summary = (method.__doc__ or "").partition("\n")[0]
        lines.append([f"`{option}`", kind, summary, method.source])
    return table(["`method=`", "Kind", "Description", "Source"], lines).replace("--:", ":--")


def options_table() -> str:
    """Return a table of the options of `featcal calibrate`."""
    from fusion_bench_featcal.folders.options import flag_of
    from fusion_bench_featcal.folders.request import Request
    from fusion_bench_featcal.setting_fields import settings_of

    lines = ["| Option | |", "|---|---|"]
    for number, field in enumerate(settings_of(Request)):
        keys = field.metadata
        words = [flag_of(field.name) if number else "", keys.get("metavar", "")]
        lines.append(f"| `{' '.join(filter(None, words))}` | {keys['help']} |")
    return "\n".join(lines)


def text_of(path: str, *, after: str = "") -> str:
    """Return the text of a file of the repository, or the part of it after a heading."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return text[text.index(after) + len(after) :].strip()


STUDIES = {
    "clip-vit-mini_TA6": (
        "samples", "ablation", "sweep", "cost", "corruption", "severity", "transfer"
    ),
    "clip-vit-mini_all8": ("tasks",),
    "flan-t5-mini_TA6": ("samples", "ablation"),
    "llama-mini_TA6": ("samples", "ablation"),
}  # fmt: skip
PARTS: dict[str, Callable[[], str]] = {
    **{f"results-{name}": partial(run_table, name) for name in RUNS},
    "readme-accuracy": readme_table,
    "comparison-suites": suites_table,
    "comparison-grid": partial(grid, "grid"),
    "comparison-texts": partial(grid, "flan-t5-mini", "llama-mini"),
    "comparison-field": partial(grid, "field"),
    "comparison-kl": partial(grid, "kl"),
    "comparison-costs": costs_table,
    "comparison-times": times_table,
    "comparison-tasks": grid_tasks,
    **{
        f"draws-{suite}": partial(draws, {f"n = {n}": f"draws-{suite}-n{n}" for n in (8, 64, 256)})
        for suite in SUITES
    },
    **{
        f"study-{name}-{suite}": partial(study_table, suite, name)
        for suite, names in STUDIES.items()
        for name in names
    },
    **{
        f"diagnosis{end}": partial(diagnosis_part, suite)
        for suite, end in zip(paper.OURS, ("", "-t5", "-llama"), strict=True)
    },
    "paper-commands": reproduce.commands_part,
    "paper-averages": paper.averages_table,
    "paper-samples": paper.samples_table,
    "paper-corrupted": paper.corruption_table,
    "paper-cost": paper.cost_table,
    "paper-observations": paper.observations_part,
    "paper-drift": paper.drift_table,
    "model-types": partial(text_of, "benchmarks/results/model_types.md"),
    "scale-predicted": partial(text_of, "benchmarks/results/scale.md", after="## Predicted\n"),
    "methods": methods_table,
    "calibrate-options": options_table,
    "method-yaml": lambda: f"```yaml\n{text_of('config/method/featcal.yaml')}\n```",
}


def rewritten(page: Path) -> str:
    """Return a page's text with every generated part written again."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}{PARTS[match['name']]()}\n{match[3]}"

    return PART.sub(fill, page.read_text(encoding="utf-8"))


def main() -> None:
    """Write all pages, or with --check compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = [page for page in PAGES if rewritten(page) != page.read_text(encoding="utf-8")]
    for page in stale:
        print(f"{'stale' if options.check else 'written'}: {page.relative_to(ROOT)}")
        if not options.check:
            page.write_text(rewritten(page), encoding="utf-8")
    if stale and options.check:
        sys.exit("run: python scripts/write_tables.py")


if __name__ == "__main__":
    main()
