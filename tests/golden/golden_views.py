"""Text that `featcal report` prints and writes of the runs in data/runs.

These are a run of `method=featcal` and two of `method=compare` with the seeds 42 and 43, on the
bundled pool clip-vit-mini_alphabets2 with 8 samples per task.
"""

import re
from pathlib import Path

import pytest
from golden_commands import featcal

RUNS = Path(__file__).parent / "data" / "runs"
PRINTED: dict[tuple[str, int], list[str]] = {
    ("run", 80): ["report", "run"],
    ("comparison", 80): ["report", "compare42"],
    ("two seeds", 200): ["report", "compare42", "compare43"],
    ("against", 80): ["report", "compare42", "compare43", "--against", "task_arithmetic/featcal"],
}
WRITTEN = {"run": ["run"], "comparison": ["compare42", "compare43"]}
_CODES = re.compile(r"\x1b\[[\d;]*m")


def views(folder: Path) -> dict[str, list[str]]:
    """Lines of every table on a terminal, and of the Markdown and CSV files."""
    content: dict[str, list[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(RUNS)
        patch.setenv("FORCE_COLOR", "1")  # for rich this is a terminal
        for (name, width), words in PRINTED.items():
            patch.setenv("COLUMNS", str(width))
            content[f"{name}, {width} columns"] = _lines(*words)
        for name, runs in WRITTEN.items():
            out = folder / name
            _lines("report", *runs, "--out", str(out))
            for kind in ("md", "csv"):
                content[f"{name}.{kind}"] = (out / f"report.{kind}").read_text().splitlines()
    return content


def _lines(*words: str) -> list[str]:
    code, screen = featcal(*words)
    assert code == 0, screen
    return [line.rstrip() for line in _CODES.sub("", screen).splitlines()]
