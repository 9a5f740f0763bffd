"""Lets benchmarks use the tests' tiny models; import it before them."""

import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
_TESTS = ("packaging", "results", "methods", "folders", "")
for folder in (*(f"tests/{name}" for name in _TESTS), "benchmarks"):
    sys.path.insert(0, str(REPOSITORY / folder))

METHODS = sorted(
    str(path.relative_to(REPOSITORY / "config" / "method").with_suffix(""))
    for path in (REPOSITORY / "config" / "method").rglob("*.yaml")
)
"""Names of the methods on the command line."""
