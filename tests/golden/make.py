"""Makes the golden files: python tests/golden/make.py [GROUP ...]

They are made once and are not edited for a refactoring: code that is moved, renamed or rewritten
must reproduce them as they are. A change that alters numbers on purpose has a line in CHANGELOG.md
and makes only its group again.
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
sys.path += [str(Path(__file__).parents[1] / "kit"), str(Path(__file__).parent)]

import golden_methods
import golden_surface
import golden_views

DATA = Path(__file__).parent / "data"


GROUPS: dict[str, Callable[[Path], Any]] = {
    "methods": lambda folder: {
        name: golden_methods.method_sketch(name, folder / name.replace(", ", "-"))
        for name in golden_methods.RUNS
    },
    "names": lambda _: golden_surface.names(),
    "configs": lambda _: golden_surface.configs(),
    "targets": lambda _: golden_surface.targets(),
    "verbs": lambda _: golden_surface.verbs(),
    "views": golden_views.views,
}


def load(group: str) -> Any:
    """Return the golden content of a group."""
    return json.loads((DATA / f"{group}.json").read_text())


def text_of(content: Any) -> str:
    """JSON with each list of plain values on one line, unless a value has brackets."""
    plain = re.compile(r"\[\s+([^][{}]+?)\s+\]")
    joined = plain.sub(lambda m: f"[{' '.join(m[1].split())}]", json.dumps(content, indent=1))
    if json.loads(joined) != content:
        joined = json.dumps(content, indent=1, ensure_ascii=False)
    return joined + "\n"


if __name__ == "__main__":
    logging.disable()
    for group in sys.argv[1:] or GROUPS:
        with tempfile.TemporaryDirectory() as folder:
            content = GROUPS[group](Path(folder))
        (DATA / f"{group}.json").write_text(text_of(content))
        print(f"made {DATA / group}.json")
