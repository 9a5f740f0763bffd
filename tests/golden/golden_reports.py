"""Structure of the files that a run leaves: keys and types, not values."""

import csv
import json
from pathlib import Path
from typing import Any

from golden_models import stable_name

NUMBER = "number"
SAVED = ("model/README.md", "model/config.json", "model/model.safetensors", "model/provenance.json")


def structure(value: Any) -> Any:
    """Nested keys with types; of a list the structures that its items have."""
    if isinstance(value, dict):
        return {stable_name(key): structure(part) for key, part in sorted(value.items())}
    if isinstance(value, list):
        return sorted({json.dumps(structure(part)) for part in value})
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return NUMBER if is_number else type(value).__name__


def file_structures(log_dir: Path) -> dict[str, Any]:
    """Structures of all reports, logs and read manifests of a run."""
    found: dict[str, Any] = {}
    for path in sorted(log_dir.glob("*.json")):
        content = json.loads(path.read_text())
        content.pop("hashes", None)  # of the row that is saved, tensor by tensor
        found[path.name] = structure(content)
    for path in sorted(log_dir.glob("*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        kinds = {str(record.get("kind")): structure(record) for record in records}
        found[path.name] = dict(sorted(kinds.items()))
    for path in sorted(log_dir.glob("*.csv")):
        with path.open() as file:
            found[path.name] = next(csv.reader(file))
    return found


def file_names(log_dir: Path) -> list[str]:
    """Names of all files below a log directory.

    TensorBoard's are named without time and machine; the tokenizer's files depend on transformers.
    """
    found = {path.relative_to(log_dir) for path in log_dir.rglob("*") if path.is_file()}
    names = {
        path.name.partition(".tfevents")[0] if "tfevents" in path.name else str(path)
        for path in found
    }
    return sorted(name for name in names if not name.startswith("model/") or name in SAVED)
