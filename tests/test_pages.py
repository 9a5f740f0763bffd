"""Generated parts of README and docs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import write_tables

from fusion_bench_featcal.results.long_table import write_lines

REPOSITORY = Path(__file__).resolve().parent.parent


def test_generated_parts_are_fresh() -> None:
    command = [sys.executable, "scripts/write_tables.py", "--check"]
    check = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert check.returncode == 0, check.stdout + check.stderr


def leave(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")


def test_results_of_the_make_targets_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, results = tmp_path / "runs", tmp_path / "results"
    monkeypatch.setattr(write_tables, "RESULTS", results)
    rows = [{"name": "featcal", "seeds": [1, 2]}]
    leave(runs / "tables/TA6/report.json", {"kind": "combined", "rows": rows})
    leave(runs / "TA6/task_arithmetic-42/report.json", {"device": {"cpu": "x"}, "versions": {}})
    leave(runs / "tables/grid/report.json", {"kind": "comparison", "rows": rows})
    leave(runs / "toy/samples/report.json", {"kind": "study", "points": []})
    leave(runs / "toy/report.json", {"kind": "run"})
    (runs / "plain").mkdir()
    write_lines(runs / "plain/lines.csv", [{"row": "featcal", "value": 1}])
    write_lines(runs / "toy/lines.csv", [{"row": "featcal", "block": "0", "value": 1}])
    write_tables.take(runs)
    files = {file.relative_to(results).as_posix() for file in results.rglob("*.json")}
    assert files == {
        "runs/TA6.json",
        "comparison/grid.json",
        "studies/toy/samples.json",
        "diagnosis/toy/run.json",
    }
    taken = json.loads((results / "runs/TA6.json").read_text(encoding="utf-8"))
    assert taken["rows"][0]["runs"] == 2 and taken["device"] == {"cpu": "x"}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"deviation": {"average": 0.01}, "runs": 2}, "**80.0 ± 9.0** (50 %)"),
        ({"half_width": 0.01, "seeds": 3}, "**80.0 ± 1.0** (50 %)"),
        ({"half_width": 0.0, "seeds": 1}, "**80.0** (50 %)"),
        ({"name": "merger"}, "**80.0**"),
    ],
)
def test_an_average_has_its_interval_and_the_worst_gap(row: dict[str, Any], text: str) -> None:
    usual = {"name": "featcal", "upstream": "merger", "worst_recovered_gap": 0.5}
    prepared = write_tables.prepared(usual | {"accuracy": {"average": 0.8}} | row)
    assert write_tables.average(prepared, "80.0") == text
