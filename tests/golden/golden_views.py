"""Text that `featcal report` prints and writes.

data/runs has a run of `method=featcal` and two of `method=compare` with the seeds 42 and 43, on the
bundled pool clip-vit-mini_alphabets2 with 8 samples per task. Other folders have known numbers.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reports import GOLDEN, LEVELS, Page, featcal, leave_lines, leave_run, patch

# Story -> words of `report`. Files that it writes are read too.
STORIES = {
    "against": ["compare42", "compare43", "--against", "task_arithmetic/featcal"],
    "two seeds": ["compare42", "compare43", "--out", "written/two seeds"],
    "mergers": ["mergers", "--out", "written/mergers", "--html", "written/mergers.html"],
    "losses": ["losses", "--out", "written/losses"],
    "many": ["many"],
    "diagnosis": ["diagnosis", "--out", "written/diagnosis", "--html", "written/diagnosis.html"],
}
NOTES = {
    "ties": {"kind": "below", "text": "dtd ends below it: featcal -1.0", "task": "dtd"},
    "ties:small": {"kind": "note", "text": "tuned by hand", "row": "ties:small"},
}
_CODES = re.compile(r"\x1b\[[\d;]*m")


def leave_stories(folder: Path) -> None:
    """Write the runs of all stories."""
    for run in GOLDEN.iterdir():
        (folder / run.name).symlink_to(run)
    slow = {"kind": "note", "text": "slow [bold]disk[/bold]", "row": "featcal"}
    for (merger, note), level in zip(NOTES.items(), (0.5, 0.6), strict=True):
        levels = {"base": 0.3, "experts": 0.9, merger: level, "featcal": 0.7}
        run = folder / "mergers" / merger.replace(":", "-")
        leave_run(run, levels, upstream=merger, notes=[note, slow])
    assert featcal("report", folder / "mergers", "--out", folder / "mergers").code == 0
    failed = [{"upstream": "ties", "name": "surgery", "reason": "the features are not finite"},
              {"upstream": "wudi", "name": "none", "reason": "out of memory"}]  # fmt: skip
    patch(folder / "mergers", failed=failed)
    for seed in (1, 2):
        loss = {
            "task_arithmetic": {"cars": 2.0, "dtd": 1.0, "average": 1.5},
            "featcal": {"cars": float(seed), "dtd": 4.0, "average": 2.0 + seed / 2},
        }
        versions = {"torch": f"2.{seed}", "org/model": "aa"}
        leave_run(folder / "losses" / str(seed), seed=seed, loss=loss, versions=versions)
    tasks = [f"oxford_flowers{number}" for number in range(9)]
    leave_run(folder / "many", LEVELS | {"featcal_preset": 0.6}, tasks)
    leave_lines(leave_run(folder / "diagnosis"), diagnosis_lines())


def diagnosis_lines() -> Iterator[dict[str, Any]]:
    """A diagnosis in which rows have known drift and known distances to the expert."""
    key = {"suite": "toy", "merger": "task_arithmetic"}
    sizes = {"featcal": 0.1, "featcal_plus": 0.05, "task_arithmetic": 0.2, "base": 0.3}
    for task, far in (("toy_one", 0.1), ("toy_two", 0.2)):
        for row, size in sizes.items():
            one = key | {"row": row, "task": task}
            for block in (1, 2):
                where = one | {"block": f"layers.{block - 1}.block"}
                yield where | {"metric": "relative", "value": size * block}
                for metric in ("share", "drift", "mismatch", "propagation"):
                    yield where | {"metric": metric, "value": 0.5}
            yield one | {"metric": "final_cosine", "value": 1 - size - far}
            for number in range(10):
                in_class = one | {"class": f"c{number}"}
                yield in_class | {"metric": "final_cosine", "value": 1 - size * number * (1 + far)}
                level = 0.5 - size * (number - 4) / 4 * (1 + far)
                yield in_class | {"metric": "accuracy", "value": level}
        for number in range(10):
            counted = key | {"task": task, "class": f"c{number}"}
            yield counted | {"metric": "items", "value": number}
            yield counted | {"metric": "test_items", "value": 10 + number}


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
    tables = sorted([*folder.glob("written/*/*.md"), *folder.glob("written/*/*.csv")])
    for file in (*tables, folder / "losses" / "1" / "report.md"):
        content[f"{file.parent.name}: {file.name}"] = file.read_text().splitlines()
    for page in sorted(folder.glob("written/*.html")):
        content[f"{page.stem}: page"] = Page(page.read_text()).lines()
    return content
