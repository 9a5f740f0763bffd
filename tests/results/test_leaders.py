"""After the advice, a report names the best model, its lead and where it is worse."""

import re
from pathlib import Path
from typing import Any

import pytest
from reports import featcal, flags, leave_rows, leave_run

from fusion_bench_featcal.results import Run, write_run

TASK_ID = {"task_id_at_inference": 1.0}


def leave(folder: Path, rows: dict[str, tuple[float, ...]], with_task_id: Any = ()) -> Path:
    """Write a run of `ties`: model -> its level on each task, `a` first, of 200 examples."""
    run = Run(suite="toy", merger="ties")
    for name, levels in {"experts": (0.9,) * 6, "ties": (0.5,) * 6, **rows}.items():
        tasks = "abcdef"[: len(next(iter(rows.values())))]
        correct = {task: flags(level) for task, level in zip(tasks, levels, strict=False)}
        accuracy = {task: float(flag.mean()) for task, flag in correct.items()}
        cost: Any = TASK_ID if name in with_task_id else {}
        run.add_row(name, {"accuracy": accuracy}, correct=correct, cost=cost)
    return write_run(folder, run)


# First case: 10 of each task's 200 examples tell the methods apart, so that half of the interval
# is 1.96 sqrt(2 (11 / 201 - (10 / 201)^2) / 201) / 2 + 10 / 200 - 10 / 201.
@pytest.mark.parametrize(
    ("rows", "with_task_id", "line"),
    [
        ({"featcal": (0.8, 0.7), "surgery": (0.75, 0.65)}, (),
         "Best model: featcal, +5.0 ± 2.3 points compared with surgery. It is worse on no task"),
        ({"featcal": (0.75, 0.65), "surgery": (0.8, 0.7)}, (),
         "Best model: surgery, +5.0 ± 2.3 points compared with featcal. It is worse on no task"),
        ({"featcal": (0.9, 0.7), "surgery": (0.75, 0.75)}, (),
         "Best model: featcal, +5.0 ± 3.0 points compared with surgery. It is worse on b "
         "(-5.0 ± 3.3)"),
        ({"featcal": (0.8, 0.7), "surgery": (0.75, 0.76)}, (),
         "Best model: surgery, tied with featcal (difference +0.5 ± 2.3 points). It is worse on a "
         "(-5.0 ± 3.3)"),
        ({"featcal": (0.9, 0.7, 0.7), "surgery": (0.6, 0.75, 0.71)}, (),
         "Best model: featcal, +8.0 ± 2.5 points compared with surgery. It is worse on 2 of 3 "
         "tasks, most on b (-5.0 ± 3.3)"),
        ({"featcal": (0.75, 0.65), "surgery": (0.8, 0.7)}, ("surgery",),
         "Best single model: featcal, +20.0 ± 4.0 points compared with ties. It is worse on no "
         "task\n- Best model that needs the task id: surgery, +5.0 ± 2.3 points compared with "
         "featcal. It is worse on no task"),
        ({"surgery": (0.4, 0.5)}, ("surgery",),
         "Best single model: ties\n- Best model that needs the task id: surgery, -5.0 ± 2.2 "
         "points compared with ties. It is worse on a (-10.0 ± 4.4)"),
    ],
)  # fmt: skip
def test_the_best_row(rows, with_task_id, line, tmp_path: Path) -> None:
    out = featcal("report", leave(tmp_path, rows, with_task_id), "--markdown").out
    assert re.match(rf"# Report\n\n- .*\n- {re.escape(line)}\n\n## toy", out)


def test_the_best_row_of_each_point_without_an_interval(tmp_path: Path) -> None:
    for samples, levels in {64: (0.7, 0.6), 8: (0.6, 0.65)}.items():
        settings = {"settings": {"samples_per_task": samples}}
        rows = dict(zip(("featcal", "surgery"), levels, strict=True))
        leave_rows(tmp_path / str(samples), {"ties": 0.5, **rows}, **settings)
    lines = featcal("report", tmp_path, "--markdown").out.splitlines()[2:4]
    ending = "points compared with {} (1 seed, no interval). It is worse on no task"
    assert lines[0] == f"- Best model (n = 8): surgery, +5.0 {ending.format('featcal')}"
    assert lines[1] == f"- Best model (n = 64): featcal, +10.0 {ending.format('surgery')}"


def test_a_row_without_the_setting_of_a_sweep_leads_at_each_of_its_values(tmp_path: Path) -> None:
    for ridge, level in {0.005: 0.65, 0.5: 0.6}.items():
        settings = {"rule": "paper", "ridge_lambda": ridge}
        leave_rows(tmp_path / str(ridge), {"paper": level}, settings=settings)
    # FeatCal+ has no such number, though its model has all settings.
    leave_rows(tmp_path / "merged", {"ties": 0.5})
    leave_rows(tmp_path / "plus", {"plus": 0.7}, settings={"rule": "plus", "ridge_lambda": 0.05})
    lines = featcal("report", tmp_path, "--markdown").out.splitlines()[2:4]
    ending = "points compared with paper (1 seed, no interval). It is worse on no task"
    assert lines[0] == f"- Best model (ridge_lambda = 0.005): plus, +5.0 {ending}"
    assert lines[1] == f"- Best model (ridge_lambda = 0.5): plus, +10.0 {ending}"


def test_equal_rows_of_two_mergers_tie(tmp_path: Path) -> None:
    for merger, level in {"ties": 0.6, "dare": 0.5}.items():
        leave_run(tmp_path / merger, {merger: level, "featcal": 0.7}, merger=merger)
    out = featcal("report", tmp_path, "--markdown").out
    assert re.search(
        r"tied with \w+/featcal \(difference \+0\.0 ± .* points\)\. It is worse on no", out
    )


def test_the_best_row_of_several_mergers_losses_and_seeds(tmp_path: Path) -> None:
    for merger, level in {"ties": 0.6, "dare": 0.7}.items():
        leave_run(tmp_path / merger, {merger: 0.5, "featcal": level}, merger=merger)
    out = featcal("report", tmp_path, "--markdown").out
    text = "dare/featcal, +10.0 ± 3.1 points compared with ties/featcal. It is worse on no task"
    assert f"- Best model: {text}" in out
    run = Run(suite="toy", merger="ties")
    for name, losses in {"ties": (1.5, 1.5), "featcal": (0.7, 1.0), "x": (0.8, 0.8)}.items():
        run.add_row(name, {"loss": dict(zip("ab", losses, strict=True))})
    out = featcal("report", write_run(tmp_path / "loss", run), "--markdown").out
    text = (
        "x, -0.050 in loss compared with featcal (1 seed, no interval). It is worse on a (+0.100)"
    )
    assert f"- Best model: {text}" in out
    for seed, rows in enumerate(({"x": 0.7}, {"y": 0.6})):
        leave_run(tmp_path / "seeds" / str(seed), rows, merger="ties", seed=seed)
    out = featcal("report", tmp_path / "seeds", "--markdown").out
    assert "- Best model: x (no seed in common with y)" in out
