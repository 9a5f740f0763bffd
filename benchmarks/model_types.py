"""Types of transformers' models: found by `auto`, calibrated as the oracle does, saved.

    python benchmarks/model_types.py

Each row of tests/kit/model_types.py is a tiny model with random weights (two blocks of width 8 or
16), from which a base, two experts and their merger are made in float64. The calibration with
`auto` is compared with the oracle
(tests/kit/oracle.py), which imports nothing of the package. The calibrated model is saved with
`save_pretrained` and loaded again. Exits with 1 if a row differs.
"""

import logging
import platform
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "kit"))

import torch
import transformers
from model_types import ROWS, Examined, examined

RESULT = Path(__file__).with_name("results") / "model_types.md"
BOUND = 1e-5
COLUMNS = (
    "model type", "kind", "family", "blocks", "distance to the oracle",
    "saved and loaded",
)  # fmt: skip


def passes(examined_row: Examined, family: str) -> bool:
    """Return whether a row passes."""
    return (
        examined_row.family == family and examined_row.oracle_gap <= BOUND and examined_row.reloaded
    )


def lines() -> Iterator[tuple[str, bool]]:
    """Yield each row of the table, and whether it passes."""
    for row in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            examined_row = examined(row, Path(folder))
        if examined_row is None:
            yield f"| {row.name} | {row.kind} | not in this release ||||", True
            continue
        exceptions = f", without {', '.join(row.excluded)}" if row.excluded else ""
        cells = (
            row.name,
            row.kind,
            f"`{examined_row.family}`",
            f"`{examined_row.blocks}`{exceptions}",
            f"{examined_row.oracle_gap:.0e}",
            "same parameters" if examined_row.reloaded else "other parameters",
        )
        yield f"| {' | '.join(cells)} |", passes(examined_row, row.family)


def main() -> int:
    """Write the table. The exit code is 1 if a row differs."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    table = [f"| {' | '.join(COLUMNS)} |", "|:--|:--|:--|:--|--:|:--|"]
    good = True
    for line, passed in lines():
        print(line)
        table.append(line)
        good &= passed
    table += [
        "",
        f"Random models in float64, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {platform.machine()} CPU. Distances to the "
        "oracle are the largest of a parameter, relative to its norm.",
    ]
    RESULT.write_text("\n".join(table) + "\n", encoding="utf-8")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
