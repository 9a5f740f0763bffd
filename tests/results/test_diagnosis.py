"""Tables and sentences on a diagnosis, from numbers that were made up."""

from pathlib import Path
from typing import Any

import pytest
from synthetic import leave_run

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.lab.report.diagnosis import (
    diagnosis_figures,
    diagnosis_grids,
    diagnosis_sentences,
    repairs_of,
    rows_of,
)
from fusion_bench_featcal.results.long_table import LINES_FILE, Line, write_lines

TASKS = {"toy_one": 0.1, "toy_two": 0.2}
BLOCKS = {"layers.0.block": 1.0, "layers.1.block": 2.0}
SIZES = {"featcal": 0.1, "featcal:plus": 0.05, "merger": 0.2, "base": 0.3}


def made(sizes: dict[str, float] = SIZES, *, accuracy: bool = True) -> list[Line]:
    """A diagnosis in which a row's drift and its distance to the expert are as large as told."""
    lines: list[Line] = []

    def add(row: str, task: str, metric: str, value: float, **names: str) -> None:
        key = {"suite": "toy", "merger": "merger", "row": row, "task": task, "block": "",
               "class": ""}  # fmt: skip
        lines.append({**key, **names, "metric": metric, "value": value})

    for row, size in sizes.items():
        for task, far in TASKS.items():
            for block, factor in BLOCKS.items():
                add(row, task, "relative", size * factor, block=block)
                for metric in ("share", "drift", "mismatch", "propagation"):
                    add(row, task, metric, 0.5, block=block)
            add(row, task, "final_cosine", 1 - size - far)
            for number in range(10):
                label: Any = {"class": f"c{number}"}
                add(row, task, "final_cosine", 1 - size * number * (1 + far), **label)
                if accuracy:
                    add(row, task, "accuracy", 0.5 - size * (number - 4) / 4 * (1 + far), **label)
    for task in TASKS:
        for number in range(10):
            label = {"class": f"c{number}"}
            add("", task, "items", number, **label)
            add("", task, "test_items", 10 + number, **label)
    return lines


def test_rows_in_order():
    assert rows_of(made()) == ["base", "merger", "featcal", "featcal:plus"]
    assert repairs_of(made()) == ["featcal", "featcal:plus"]


def test_tables():
    drift, cosine, classes = diagnosis_grids(made()).values()
    assert list(drift.columns) == ["base", "merger", "featcal", "featcal:plus"]
    assert drift.lines == [
        ("0", ["0.300 (50 %)", "0.200 (50 %)", "0.100 (50 %)", "0.050 (50 %)"]),
        ("1", ["0.600 (50 %)", "0.400 (50 %)", "0.200 (50 %)", "0.100 (50 %)"]),
    ]
    assert list(cosine.columns) == ["one", "two", "average"]
    assert dict(cosine.lines)["featcal"] == ["0.800", "0.700", "0.750"]
    assert list(classes.columns) == ["items", "merger", "featcal", "featcal:plus"]
    # Calibration halves a distance that grows with the class's number, and most in task two.
    heads = [head for head, _ in classes.lines]
    assert heads == ["two: c9", "one: c9", "two: c8", "two: c1", "one: c0", "two: c0"]
    assert classes.lines[0] == ("two: c9", ["19", "0.200", "0.350", "0.425"])


def test_classes_without_accuracies():
    classes = diagnosis_grids(made(accuracy=False))[
        "final cosine of classes that gain and lose most"
    ]
    assert classes.lines[0] == ("two: c9", ["9", "-1.160", "-0.080", "0.460"])


def test_without_a_merged_model_nothing_is_compared():
    lines = made({"base": 0.3})
    assert [len(grid.lines) for grid in diagnosis_grids(lines).values()] == [2, 1]
    assert diagnosis_sentences(lines) == []
    assert not diagnosis_grids([]) and not diagnosis_sentences([])


def test_sentences():
    assert diagnosis_sentences(made(SIZES | {"featcal": 0.25})) == [
        "featcal: final features are farther from the experts' than the merged model's (mean "
        "cosine 0.600, merged 0.650). Are the calibration samples like these items?",
        "featcal: relative drift changes by +25 % at block 0 (best) to +25 % at block 0; farthest "
        "from its expert is two, with a cosine of 0.550",
        "featcal:plus: relative drift changes by -75 % at block 0 (best) to -75 % at block 0; "
        "farthest from its expert is two, with a cosine of 0.750",
    ]


def test_a_run_is_reported_with_its_diagnosis(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = leave_run(tmp_path / "run")
    write_lines(run / LINES_FILE, made())
    assert main(["report", str(run)]) == 0
    text = capsys.readouterr().out
    assert text.index("gain over") < text.index("relative drift (share")
    assert "featcal:plus: relative drift changes by -75 %" in text


def test_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    run, drawn = leave_run(tmp_path / "run"), tmp_path / "figures"
    write_lines(run / LINES_FILE, made())
    assert main(["report", str(run), "--figures", str(drawn)]) == 0
    names = {"diagnosis", "diagnosis-terms", "diagnosis-change"}
    assert {f"written: {drawn / name}.svg" for name in names} <= set(
        capsys.readouterr().out.splitlines()
    )
    panels = {name: titles(figure) for name, figure in diagnosis_figures(made()).items()}
    assert panels == {
        "diagnosis": ["mean over tasks", "one", "two"],
        "diagnosis-terms": ["merger", "featcal", "featcal:plus"],
        "diagnosis-change": ["featcal", "featcal:plus"],
    }
    assert set(diagnosis_figures(made({"base": 0.3}))) == {"diagnosis", "diagnosis-terms"}
    assert diagnosis_figures([]) == {}


def titles(figure: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_a_damaged_diagnosis_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = leave_run(tmp_path / "run")
    (run / LINES_FILE).write_text("row,value\n")
    assert main(["report", str(run)]) == 2
    assert f"{run / LINES_FILE}: its first line has no suite" in capsys.readouterr().err
