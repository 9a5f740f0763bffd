"""Types of transformers' models: found by `auto`, calibrated as the oracle does, saved.

    python benchmarks/model_types.py

Each row of tests/kit/model_types.py is a tiny model with random weights in float64, with a base,
two experts and their merger. Its calibration with `auto` is compared with the oracle
(tests/kit/oracle.py), which imports nothing of the package. The calibrated model is saved and
loaded again. Writes results/model_types.md, and exits with 1 if a row differs.
"""

import logging
import platform
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "kit"))

import torch
import transformers
from model_types import ROWS, examined

RESULT = Path(__file__).with_name("results") / "model_types.md"
BOUND = 1e-5
HEADS = (
    "model type", "kind", "family", "blocks", "distance to the oracle", "saved and loaded",
    "stays as merged",
)  # fmt: skip


def main() -> None:
    """Write the table."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    lines, all_pass = [f"| {' | '.join(HEADS)} |", "|:--|:--|:--|:--|--:|:--|:--|"], True
    for row in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            result = examined(row, Path(folder))
        names = row.name, row.kind, f"`{result.family}`", f"`{result.blocks}`"
        parameters = "same parameters" if result.reloaded else "other parameters"
        figures = f"{result.oracle_gap:.0e}", parameters, ", ".join(f"`{n}`" for n in result.stays)
        lines.append(f"| {' | '.join((*names, *figures))} |")
        all_pass &= result.family == row.family and result.oracle_gap <= BOUND and result.reloaded
    lines += [
        "",
        f"Random models in float64, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {platform.machine()} CPU. Distances to the oracle are the "
        "largest of a parameter, relative to its norm.",
    ]
    RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.exit(not all_pass)


if __name__ == "__main__":
    main()
