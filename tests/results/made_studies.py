"""Studies with known numbers, for the tests of their figures and pages."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

from fusion_bench_featcal.results.study import Study
from fusion_bench_featcal.results.study_files import write_study

ROWS = ("experts", "ta", "surgery", "featcal")


def row(name: str, value: float, half: float = 0.01, **more: Any) -> dict[str, Any]:
    gain = None if name == "experts" else {"estimate": value - 0.6, "low": -0.1, "high": 0.3}
    return {
        "upstream": "ta", "name": name, "accuracy": {"average": value, "a": value},
        "half_width": half if name not in ("ta", "experts") else 0.0, "difference": gain,
        "against": "ta", "recovered_gap": (value - 0.6) / 0.3, "worst_task": "a",
        "worst_recovered_gap": 0.5, "samples": "", "spread": {}, "cost": {}, "seeds": 3, **more,
    }  # fmt: skip


def point(labels: dict[str, Any], **values: float) -> dict[str, Any]:
    values = {"ta": 0.6, "experts": 0.9, **values}
    return {
        "labels": labels,
        "rows": [row(n, values[n]) for n in ROWS if n in values],
        "failed": [],
    }


def study(name: str, points: list[dict[str, Any]], **more: Any) -> Study:
    return Study(name=name, suite="suite", points=points, seeds=[1, 2, 3], **more)


def sweep_points() -> list[dict[str, Any]]:
    pairs = [(0.05, 0.3), (0.0, 0.3), (1.0, 0.3), (0.05, 0.0), (0.05, 1.0), (1.0, 1.0)]
    return [
        point({"ridge_lambda": ridge, "mix_alpha": mix}, featcal=0.7 + mix / 10 - ridge / 20)
        for ridge, mix in pairs
    ]


def leave(made: Study, folder: Path) -> Path:
    """A study's folder without its figures, which take a second."""
    with patch("fusion_bench_featcal.results.study_figures.draw_study", return_value=[]):
        write_study(made, folder)
    return folder
