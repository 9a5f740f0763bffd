"""Copy the results of demo-full, compare-full and diagnose into docs/results."""

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from comparison_tables import RUNS
from paper import RESULTS

from fusion_bench_featcal.results.long_table import LINES_FILE


def take(folder: Path) -> None:
    """Copy the results in the folder of a make target into docs/results."""
    from fusion_bench_featcal.lab.report.diagnosis import diagnosis_of

    for source in sorted((folder / "tables").glob("*/report.json")):
        name, content = source.parent.name, json.loads(source.read_text(encoding="utf-8"))
        for run in sorted((folder / name).glob("task_arithmetic*/report.json"))[:1]:
            report = json.loads(run.read_text(encoding="utf-8"))
            content |= {"device": report["device"], "versions": report["versions"]}
        for row in content["rows"]:
            row.setdefault("runs", len(row["seeds"]))
        kind = "runs" if name in RUNS else "comparison"
        _keep(content, kind, f"{name}.json")
    for source in sorted(folder.glob(f"*/{LINES_FILE}")):
        suite = source.parent.name
        if not diagnosis_of(source.parent):
            continue
        run = json.loads((source.parent / "report.json").read_text(encoding="utf-8"))
        _keep(run, "diagnosis", suite, "run.json")
        shutil.copyfile(source, RESULTS / "diagnosis" / suite / LINES_FILE)


def _keep(content: Mapping[str, Any], *path: str) -> None:
    """Write a JSON file with a line for each key, and for each row or point."""
    dump, lines = partial(json.dumps, ensure_ascii=False), []
    for key, value in content.items():
        text = dump(value)
        if key in ("rows", "points") and isinstance(value, list):
            text = "[\n" + ",\n".join(map(dump, value)) + "\n]"
        lines.append(f"{dump(key)}: {text}")
    file = RESULTS.joinpath(*path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
