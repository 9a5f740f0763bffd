"""Generated parts of README and docs."""

import json
from pathlib import Path

import pytest
import take_results
import write_tables

from fusion_bench_featcal.results import write_lines


@pytest.mark.parametrize("page", write_tables.PAGES, ids=lambda page: page.name)
def test_generated_parts_are_fresh(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert write_tables.rewritten(page) == text, "python scripts/write_tables.py"


def test_results_of_the_make_targets_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, results = tmp_path / "runs", tmp_path / "results"
    monkeypatch.setattr(take_results, "RESULTS", results)
    rows = [{"name": "featcal", "seeds": [1, 2]}]
    reports = {
        "tables/TA6": {"kind": "combined", "rows": rows},
        "TA6/task_arithmetic-42": {"device": {"cpu": "x"}, "versions": {}},
        "tables/grid": {"kind": "comparison", "rows": rows},
        "toy/samples": {"kind": "study", "points": []},
        "toy": {"kind": "run"},
    }
    for name, content in reports.items():
        (runs / name).mkdir(parents=True, exist_ok=True)
        (runs / name / "report.json").write_text(json.dumps(content))
    (runs / "plain").mkdir()
    write_lines(runs / "plain/lines.csv", [{"row": "featcal", "value": 1}])
    write_lines(runs / "toy/lines.csv", [{"row": "featcal", "block": "0", "value": 1}])
    take_results.take(runs)
    files = {file.relative_to(results).as_posix() for file in results.rglob("*.json")}
    assert files == {"runs/TA6.json", "comparison/grid.json", "studies/toy/samples.json",
                     "diagnosis/toy/run.json"}  # fmt: skip
    taken = json.loads((results / "runs/TA6.json").read_text())
    assert taken["rows"][0]["runs"] == 2 and taken["device"] == {"cpu": "x"}
