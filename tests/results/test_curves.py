"""Training curves and drift in files: what comes back, and damage that is named."""

from pathlib import Path

import pytest

from fusion_bench_featcal.results import ReportError
from fusion_bench_featcal.results.curves import (
    CURVES_FILE,
    Curves,
    drift_records,
    load_curves,
    write_curves,
)

LEFT: Curves = {"x_left": [(0, 2.0), (20, 1.0), (25, 0.5)]}
BOTH: Curves = {**LEFT, "x_right": [(0, 4.0), (25, 1.0)]}


def test_curves_come_back(tmp_path: Path) -> None:
    curves = {"surgery": BOTH, "surgery:calibration": LEFT}
    assert write_curves(tmp_path, curves | {"ridge_surgery": {}}) == tmp_path / CURVES_FILE
    assert load_curves(tmp_path) == curves


def test_curves_of_an_earlier_run_do_not_stay(tmp_path: Path) -> None:
    write_curves(tmp_path, {"surgery": LEFT})
    assert write_curves(tmp_path, {"ridge_surgery": {}}) is None
    assert load_curves(tmp_path) == {}


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"name": "surgery", "task": "a"}',
        '{"name": "surgery", "task": "a", "losses": [[1, 2, 3]]}',
        '{"name": "surgery", "task": "a", "losses": [[20, 1.0], [0, 2.0]]}',
        '{"name": "surgery", "task": "a", "losses": [[0, NaN]]}',
        '{"name": "surgery", "task": "a", "losses": []}',
    ],
)
def test_damaged_curves_are_named(tmp_path: Path, line: str) -> None:
    (tmp_path / CURVES_FILE).write_text(line + "\n")
    with pytest.raises(ReportError, match=r"training_curves\.jsonl"):
        load_curves(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"), [("{", "is damaged"), ("[1]", r"expected a JSON object")]
)
def test_a_damaged_log_is_named(tmp_path: Path, line: str, message: str):
    path = tmp_path / "calibration_log.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ReportError, match=rf"calibration_log\.jsonl.*{message}"):
        drift_records(path)
