"""Text that `featcal report` prints and writes.

data/runs has a run of `method=featcal` and two of `method=compare` with the seeds 42 and 43, on the
bundled pool clip-vit-mini_alphabets2 with 8 samples per task. Other folders have known numbers.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reports import GOLDEN, LEVELS, Page, featcal, flags, leave_cells, leave_run, make_run

from fusion_bench_featcal.results import Note, Run, write_run

# Story -> words of `report`. Files that it writes are read too.
STORIES = {
    "against": ["compare42", "--against", "task_arithmetic/featcal"],
    "two seeds": ["compare42", "compare43", "--out", "written/two seeds"],
    "mergers": ["mergers", "--out", "written/mergers", "--html", "written/mergers.html"],
    "losses": ["losses", "--metric", "loss"],
    "many": ["many"],
    "sweep": ["sweep", "--out", "written/sweep"],
    "diagnosis": ["diagnosis"],
}
_CODES = re.compile(r"\x1b\[[\d;]*m")


def leave_stories(folder: Path) -> None:
    """Write the runs of all stories."""
    for run in GOLDEN.iterdir():
        (folder / run.name).symlink_to(run)
    joined = Run(suite="toy")
    for merger, level in (("ties", 0.5), ("wudi", 0.6)):
        one = make_run({"base": 0.3, "experts": 0.9, merger: level, "featcal": 0.7}, merger=merger)
        joined.rows += [row for row in one.rows if row.merger or merger == "ties"]
        joined.note(Note("note", "slow [bold]disk[/bold]", "featcal", merger=merger))
    joined.note(
        Note("below", "dtd ends below the merged model: featcal -1.0 points", task="dtd"),
        Note("failed", "the features are not finite", "surgery", merger="ties"),
        Note("failed", "out of memory", "none", merger="wudi"),
    )
    write_run(folder / "mergers", joined)
    for seed in (1, 2, 3):
        run = Run(suite="toy", merger="task_arithmetic", versions={"torch": f"2.{seed}"})
        for name, loss in (("experts", 0.5), ("task_arithmetic", 2.0), ("featcal", 1.0 + seed / 9)):
            right = {"accuracy": {"cars": 0.5, "dtd": 0.5}, "loss": {"cars": loss, "dtd": loss}}
            run.add_row(name, right, seed=seed, correct={t: flags(0.5, 4) for t in ("cars", "dtd")})
        write_run(folder / "losses" / str(seed), run)
    tasks = [f"oxford_flowers{number}" for number in range(9)]
    leave_run(folder / "many", LEVELS | {"featcal_preset": 0.6}, tasks)
    leave_cells(folder / "sweep")
    diagnosed(folder / "diagnosis")


def diagnosed(folder: Path) -> Path:
    """A run with a diagnosis in which rows have known drift and known distances to the expert."""
    run = make_run(LEVELS | {"featcal_plus": 0.8}, ("toy_one", "toy_two"))
    run.lines += diagnosis_lines()
    return write_run(folder, run)


def diagnosis_lines() -> Iterator[dict[str, Any]]:
    """Lines of a diagnosis of four rows on two tasks."""
    sizes = {"featcal": 0.1, "featcal_plus": 0.05, "task_arithmetic": 0.2, "base": 0.3}
    for task, far in (("toy_one", 0.1), ("toy_two", 0.2)):
        for row, size in sizes.items():
            one = {"row": row, "task": task}
            for block in (1, 2):
                at = one | {"block": f"layers.{block - 1}.block"}
                yield at | {"metric": "relative", "value": size * block}
                for metric in ("share", "drift", "mismatch", "propagation"):
                    yield at | {"metric": metric, "value": 0.5}
            yield one | {"metric": "final_cosine", "value": 1 - size - far}


def views(folder: Path) -> dict[str, list[str]]:
    """Lines of tables on a terminal, and of the Markdown and CSV files and the pages."""
    content: dict[str, list[str]] = {}
    leave_stories(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("FORCE_COLOR", "1")  # for rich this is a terminal
        patched.setenv("COLUMNS", "80")
        for name, words in STORIES.items():
            done = featcal("report", *words)
            assert done.code == 0, done.err
            lines = [line.rstrip() for line in _CODES.sub("", done.out).splitlines()]
            content[name] = [line for line in lines if not line.startswith("written: ")]
    for file in sorted([*folder.glob("written/*/*.md"), *folder.glob("written/*/report.csv")]):
        content[f"{file.parent.name}: {file.name}"] = file.read_text().splitlines()
    for page in sorted(folder.glob("written/*.html")):
        content[f"{page.stem}: page"] = Page(page.read_text()).lines()
    return content
