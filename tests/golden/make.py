"""Makes the golden files: python tests/golden/make.py [GROUP ...]

They are made once and are not edited for a refactoring: code that is moved, renamed or rewritten
must reproduce them as they are. A change that alters numbers on purpose has a line in CHANGELOG.md
and makes its own group again, and no other.
"""

import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).parents[1] / "kit"))

import golden_commands
import golden_methods
import golden_parameters
import golden_surface
import golden_views
import torch
from golden_reports import file_names, file_structures

DATA = Path(__file__).parent / "data"


def parameters(folder: Path) -> dict[str, Any]:
    """Calibrations of random tiny models, in float64."""
    cases = golden_parameters.CASES
    return {name: golden_parameters.calibrated(name, torch.float64, folder) for name in cases}


def methods(folder: Path) -> dict[str, Any]:
    """All methods on the bundled suites."""
    return {name: golden_methods.method_sketch(name, folder) for name in golden_methods.RUNS}


def commands(folder: Path) -> dict[str, Any]:
    """Exit codes, and the files of runs."""
    codes = golden_commands.run_jobs(folder)
    verbs = golden_commands.VERBS | golden_commands.SLOW_VERBS
    empty = folder / "empty"
    empty.mkdir()
    places = {"run": folder / "featcal", "compare": folder / "compare", "tmp": empty}
    runs = {
        name: {
            "names": file_names(folder / name),
            "structures": file_structures(folder / name),
        }
        for name in golden_commands.RUNS
    }
    return {
        "fusion_bench": codes,
        "featcal": golden_commands.verb_codes(verbs, **places),
        "runs": runs,
    }


GROUPS: dict[str, Callable[[Path], Any]] = {
    "parameters": parameters,
    "methods": methods,
    "commands": commands,
    "names": lambda _: golden_surface.names(),
    "configs": lambda _: golden_surface.configs(),
    "targets": lambda _: golden_surface.targets(),
    "verbs": lambda _: golden_surface.verbs(),
    "views": golden_views.views,
}


def load(group: str) -> Any:
    """The golden content of a group."""
    return json.loads((DATA / f"{group}.json").read_text())


def text_of(content: Any) -> str:
    """JSON in which lists of plain values stand in one line, where they have no brackets."""
    plain = re.compile(r"\[\s+([^][{}]+?)\s+\]")
    joined = plain.sub(lambda m: f"[{' '.join(m[1].split())}]", json.dumps(content, indent=1))
    if json.loads(joined) != content:
        joined = json.dumps(content, indent=1, ensure_ascii=False)
    return joined + "\n"


def main(groups: list[str]) -> None:
    """Make groups; all of them by default."""
    logging.disable()
    DATA.mkdir(exist_ok=True)
    for group in groups or GROUPS:
        with tempfile.TemporaryDirectory() as folder:
            content = GROUPS[group](Path(folder))
        (DATA / f"{group}.json").write_text(text_of(content))
        print(f"made {DATA / group}.json")


if __name__ == "__main__":
    main(sys.argv[1:])
