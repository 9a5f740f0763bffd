"""Statements of the benchmarks of FeatCal+ about runs."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import far_task
import plus_grid
from plus_grid import Cell


def report(paper: float, plus: float, surgery: float, worst: float = 0.5) -> Any:
    """Two tasks of which `featcal:plus` has the given worst; all others score alike on both."""
    rows = {
        "experts": {"a": 0.9, "b": 0.9, "average": 0.9},
        "merged": {"a": 0.5, "b": 0.5, "average": 0.5},
        "featcal": {"a": paper, "b": paper, "average": paper},
        "featcal:plus": {"a": worst, "b": 2 * plus - worst, "average": plus},
        "surgery:calibration": {"a": surgery, "b": surgery, "average": surgery},
    }
    seconds = {"cost": {"featcal:plus": {"seconds": 3.0}}}
    return {"rows": rows, "tasks": ["a", "b"], "upstream": "merged", **seconds}


ROWS = ["featcal", "featcal:plus", "surgery:calibration"]
FOUND = {
    Cell("merged", 8, 42): report(0.6, 0.7, 0.65),
    Cell("merged", 8, 43): report(0.7, 0.65, 0.6, worst=0.4),
    Cell("merged", 64, 42): report(0.6, 0.8, 0.8),
}


def test_verdict_counts_cells_and_names_those_with_a_fallen_task() -> None:
    assert plus_grid.verdict(FOUND, ROWS) == [
        "FeatCal+ is above the paper's settings on the same samples in 2 of 3 cells.",
        "FeatCal+ is above every other correction (surgery:calibration) on the same samples in 2 "
        "of 3 cells.",
        "A task ends below the merged model with paper in 0 of 3 cells.",
        "A task ends below the merged model with **FeatCal+** in 1 of 3 cells: merged, n = 8, "
        "seed 43 (a).",
        "A task ends below the merged model with surgery:calibration in 0 of 3 cells.",
    ]


def test_table_has_means_over_draws_with_the_least_and_the_most() -> None:
    lines = plus_grid.table(FOUND, "merged", 8, ROWS).splitlines()
    assert lines[2] == "| experts | 90.0 (90.0 to 90.0) | 90.0 (90.0 to 90.0) | - | - | - |"
    assert lines[3].startswith("| merged | 50.0")
    assert lines[5] == (
        "| **FeatCal+** | 67.5 (65.0 to 70.0) | 45.0 (40.0 to 50.0) | -12 (-25 to 0) | - | 3.0 |"
    )


def test_overview_has_a_line_for_each_merger_and_number_of_samples() -> None:
    lines = plus_grid.overview(FOUND, ROWS).splitlines()
    assert lines[0].endswith("| surgery:calibration | worst gap: paper | worst gap: **FeatCal+** |")
    assert lines[2:] == [
        "| merged | 8 | 50.0 | 65.0 | 67.5 | 62.5 | 37 % | -12 % |",
        "| merged | 64 | 50.0 | 60.0 | 80.0 | 80.0 | 25 % | 0 % |",
    ]


def test_far_task_has_labels_that_the_suite_lacks(tmp_path: Path, monkeypatch: Any) -> None:
    import pyarrow
    from pyarrow import parquet

    known = far_task.text.load_rows("banking77")["train"][0][1]
    numbers = {"own label": 5, "rare label": 1, known: 9}
    rows = [
        {"text": f"Text {i} of it!", "label": label, "split": split}
        for label, number in numbers.items()
        for split, times in (("train", 4), ("calibration", 1), ("test", 1))
        for i in range(number * times)
    ]
    path = tmp_path / "texts.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    monkeypatch.setattr(far_task, "LABELS", 1)
    monkeypatch.setattr(far_task, "CALIBRATION", 8)
    found = far_task.read_rows(path)
    assert {split: len(part) for split, part in found.items()} == {
        "train": 17, "calibration": 8, "test": 5
    }  # fmt: skip
    assert found["test"][0] == {"prompt": "account matter : text 0 of it !", "target": "OWN LABEL"}
    monkeypatch.setattr(far_task, "LABELS", 0)
    with pytest.raises(SystemExit, match="has no labels besides those"):
        far_task.read_rows(path)
