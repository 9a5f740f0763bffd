"""Digest of the code that makes numbers: syntax trees without docstrings and comments.

A test compares it, and `NUMBERS_VERSION`, with `tests/comparison/numbers.json`. Writes that file:

    python scripts/numbers_digest.py
"""

import ast
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fusion_bench_featcal.lab.compare.fingerprint import NUMBERS_VERSION

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "fusion_bench_featcal"
KEPT = REPOSITORY / "tests" / "comparison" / "numbers.json"
# Files of `results` that compute the stored values of a cell.
_STORED = {"results/cost.py", "results/curves.py", "results/items.py", "results/run_rows.py"}
# Files that read results or start runs, and do not affect any number.
_NO_PART = {
    "results", "lab/diagnosis", "lab/report", "files.py", "json_files.py", "cli.py",
    "plan.py", "plan_shapes.py", "feature_shapes.py", "folders", "_hydra_plugin",
    "setting_docs.py", "example_files.py", "examples",
    "lab/compare/fingerprint.py", "lab/compare/reports.py", "lab/compare/study.py",
    "lab/compare/axes.py", "lab/compare/data_axes.py", "lab/compare/points.py",
}  # fmt: skip


def numbers() -> dict[str, Any]:
    """Return version and digest of the code that makes numbers."""
    digest = hashlib.sha256()
    for path in makers():
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\n".encode())
        digest.update(json.dumps(shape(path.read_text(encoding="utf-8"))).encode())
    return {"version": NUMBERS_VERSION, "digest": digest.hexdigest()}


def makers() -> Iterator[Path]:
    """Return the source files that affect numbers."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if name.as_posix() in _STORED or not _NO_PART & {
            name.parts[0],
            "/".join(name.parts[:2]),
            name.as_posix(),
        }:
            yield path


def shape(source: str) -> Any:
    """Return nested lists that change with the code, not with layout, comments or docstrings."""
    return _shape(ast.parse(source))


def _shape(value: Any) -> Any:
    if isinstance(value, list):
        return [_shape(entry) for entry in value if not _is_docstring(entry)]
    if not isinstance(value, ast.AST):
        return repr(value)
    # Fields without a value differ between versions of Python.
    fields = [(name, entry) for name, entry in ast.iter_fields(value) if entry not in (None, [])]
    return [type(value).__name__, *([name, _shape(entry)] for name, entry in fields)]


def _is_docstring(node: Any) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


if __name__ == "__main__":
    KEPT.write_text(json.dumps(numbers(), indent=2) + "\n", encoding="utf-8")
    print(f"written: {KEPT.relative_to(REPOSITORY)}")
