"""The long table of runs, comparisons, studies and diagnoses from Python."""

from pathlib import Path
from typing import Any

import pytest
from synthetic import LEVELS, leave_run, leave_seeds, make_report

from fusion_bench_featcal import lab
from fusion_bench_featcal.lab.report import load as loading
from fusion_bench_featcal.lab.report.study import Study
from fusion_bench_featcal.lab.report.views import write
from fusion_bench_featcal.results import ReportError
from fusion_bench_featcal.results.long_table import DIMENSIONS, where
from fusion_bench_featcal.results.notes import Note
from fusion_bench_featcal.results.report import summarise

RUNS = Path(__file__).parents[1] / "golden" / "data" / "runs"


@pytest.fixture
def without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda _: None)


def averages(lines: list[dict[str, Any]], **names: Any) -> list[float]:
    return [line["value"] for line in where(lines, metric="accuracy", task="average", **names)]


def test_a_run_is_a_data_frame(tmp_path: Path):
    pandas = pytest.importorskip("pandas")
    frame = lab.load(leave_run(tmp_path / "run"))
    assert isinstance(frame, pandas.DataFrame)
    accuracy = frame[(frame.metric == "accuracy") & (frame.task == "average")]
    assert dict(zip(accuracy.row, accuracy.value, strict=True)) == pytest.approx(LEVELS)
    assert frame.value.dtype == float and set(frame.seed) == {42}


def test_the_file_and_the_report_give_the_same_lines(tmp_path: Path, without_pandas: None):
    run = leave_run(tmp_path / "run")
    lines = lab.load(run)
    (run / "lines.csv").unlink()  # as an earlier version left it
    assert lab.load(run) == lines
    assert [*lines[0]] == [*DIMENSIONS, "value"]


def test_a_comparison_is_its_runs(tmp_path: Path, without_pandas: None):
    runs = leave_seeds(tmp_path)
    write(summarise(runs), tmp_path / "tables")
    lines = lab.load(tmp_path / "tables")
    assert averages(lines, row="featcal") == pytest.approx([0.7, 0.75, 0.8])
    assert [line["seed"] for line in where(lines, row="featcal", metric="gain")] == [1, 2, 3]
    assert lab.load(tmp_path) == lines  # each run counts once
    golden = lab.load(RUNS)
    assert len(averages(golden, row="surgery", merger="simple_average")) == 2


def test_a_study_has_labels(tmp_path: Path, without_pandas: None):
    runs = [tmp_path / str(count) for count in (8, 64)]
    for count, run in zip((8, 64), runs, strict=True):
        report = make_report(LEVELS | {"featcal": 0.7 + count / 1000}, settings={"n": count})
        report.labels = {"samples_per_task": count}
        report.write(run)
    Study(name="samples", suite="toy", runs=runs).write(tmp_path / "study")
    lines = lab.load(tmp_path / "study")
    assert averages(lines, row="featcal", samples_per_task=64) == pytest.approx([0.765])
    assert len(averages(lines, row="featcal")) == 2


def test_a_diagnosis_has_blocks_and_classes(tmp_path: Path, without_pandas: None):
    report = make_report()
    report.more.append({"row": "featcal", "task": "dtd", "block": "0", "metric": "drift",
                        "value": 0.5})  # fmt: skip
    report.write(tmp_path)
    (line,) = where(lab.load(tmp_path), metric="drift")
    assert (line["block"], line["merger"], line["seed"]) == ("0", "task_arithmetic", 42)


def test_runs_that_must_not_be_averaged_are_refused(tmp_path: Path):
    leave_run(tmp_path / "one", seed=1, settings={"ridge_lambda": 0.1})
    leave_run(tmp_path / "two", seed=2, settings={"ridge_lambda": 0.2})
    with pytest.raises(ReportError, match=r"row 'featcal' was made with different ridge_lambda"):
        lab.load(tmp_path)
    with pytest.raises(ReportError, match="no such run"):
        lab.load(tmp_path / "none")


def test_notes_are_lines(tmp_path: Path):
    note = Note("drift", "dtd drifts", "featcal", "dtd")
    for seed in (1, 2):
        leave_run(tmp_path / str(seed), seed=seed, notes=[note])
    (line,) = lab.load_notes(tmp_path)
    assert line == {"suite": "toy", "kind": "drift", "merger": "task_arithmetic",
                    "row": "featcal", "task": "dtd", "text": "dtd drifts"}  # fmt: skip


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="has no attribute 'loads'"):
        _ = lab.loads  # type: ignore[attr-defined]  # pyright: ignore
