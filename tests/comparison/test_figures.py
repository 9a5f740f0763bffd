"""Figures of a comparison, and the way of its training curves into them."""

import sys
from pathlib import Path

import pytest
from comparison_parts import Scale, comparison, method, model_pool
from torch import nn

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.comparison import reports
from fusion_bench_featcal.comparison.reports import draw_figures
from fusion_bench_featcal.results.curves import load_curves
from fusion_bench_featcal.settings import CalibrationError

CURVES = {"left": [(0, 2.0), (20, 1.0)], "right": [(0, 1.0), (20, 0.5)]}


class Trained(Scale):
    """Leaves a model with curves."""

    def post_merge(self, merged: nn.Module, inputs: object) -> nn.Module:
        merged.curves = CURVES  # type: ignore[assignment]
        return merged


class Misshapen(Scale):
    """Leaves a model whose curves are none."""

    def post_merge(self, merged: nn.Module, inputs: object) -> nn.Module:
        merged.curves = {"left": 3.0}  # type: ignore[assignment]
        return merged


def of(kind: type) -> dict[str, str]:
    return {"_target_": f"test_figures.{kind.__name__}"}


@pytest.fixture(autouse=True)
def drawing(no_figures: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "draw_figures", draw_figures)


def compare(folder: Path, kind: type) -> Path:
    methods = {"trained": of(kind), "double": method(Scale)}
    choices = {"upstreams": ["task_arithmetic"], "post_merging_methods": methods}
    comparison(folder, **choices).run(model_pool())
    return folder / "results"


def pictures(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.suffix in (".png", ".svg")
    }


@pytest.mark.slow
def test_figures_are_drawn_kept_and_drawn_again(tmp_path: Path) -> None:
    folder = compare(tmp_path, Trained)
    first = pictures(folder)
    names = ["comparison", "cost", "task_arithmetic/accuracy", "task_arithmetic/convergence"]
    assert sorted(first) == [f"{name}.{kind}" for name in names for kind in ("png", "svg")]
    assert load_curves(folder / "task_arithmetic") == {"trained": CURVES}
    for name in first:
        (folder / name).unlink()
    assert main(["plot", str(folder)]) == 0
    assert pictures(folder) == first
    # The finished cell brings its curves when the command is repeated.
    (folder / "task_arithmetic" / "training_curves.jsonl").unlink()
    compare(tmp_path, Trained)
    assert load_curves(folder / "task_arithmetic") == {"trained": CURVES}


def test_without_matplotlib_the_reports_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = compare(tmp_path, Trained)
    assert (folder / "report.json").is_file()
    assert not pictures(folder)
    assert "pip install 'fusion-bench-featcal[plots]'" in caplog.text


def test_curves_that_are_none_fail_their_cell_only(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"1 of 5 cells failed.*a curve is a list"):
        compare(tmp_path, Misshapen)
    assert (tmp_path / "results" / "report.json").is_file()
