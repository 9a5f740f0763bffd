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
         "best: featcal, +5.0 ± 2.3 points over surgery, worse on no task"),
        ({"featcal": (0.75, 0.65), "surgery": (0.8, 0.7)}, (),
         "best: surgery, +5.0 ± 2.3 points over featcal, worse on no task"),
        ({"featcal": (0.9, 0.7), "surgery": (0.75, 0.75)}, (),
         "best: featcal, +5.0 ± 3.0 points over surgery, worse on b (-5.0 ± 3.3)"),
        ({"featcal": (0.8, 0.7), "surgery": (0.75, 0.76)}, (),
         "best: surgery and featcal tie (+0.5 ± 2.3 points), the first worse on a (-5.0 ± 3.3)"),
        ({"featcal": (0.9, 0.7, 0.7), "surgery": (0.6, 0.75, 0.71)}, (),
         "best: featcal, +8.0 ± 2.5 points over surgery, worse on 2 of 3 tasks, most on b "
         "(-5.0 ± 3.3)"),
        ({"featcal": (0.75, 0.65), "surgery": (0.8, 0.7)}, ("surgery",),
         "best one model: featcal, +20.0 ± 4.0 points over ties, worse on no task; best with "
         "task id: surgery, +5.0 ± 2.3 points over featcal, worse on no task"),
        ({"surgery": (0.4, 0.5)}, ("surgery",),
         "best one model: ties; best with task id: surgery, -5.0 ± 2.2 points from ties, worse "
         "on a (-10.0 ± 4.4)"),
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
    ending = "points over {} (1 seed, no interval), worse on no task"
    assert lines[0] == f"- best (n = 8): surgery, +5.0 {ending.format('featcal')}"
    assert lines[1] == f"- best (n = 64): featcal, +10.0 {ending.format('surgery')}"


def test_a_row_without_the_setting_of_a_sweep_leads_at_each_of_its_values(tmp_path: Path) -> None:
    for ridge, level in {0.005: 0.65, 0.5: 0.6}.items():
        settings = {"rule": "paper", "ridge_lambda": ridge}
        leave_rows(tmp_path / str(ridge), {"paper": level}, settings=settings)
    # FeatCal+ has no such number, though its model has all settings.
    leave_rows(tmp_path / "merged", {"ties": 0.5})
    leave_rows(tmp_path / "plus", {"plus": 0.7}, settings={"rule": "plus", "ridge_lambda": 0.05})
    lines = featcal("report", tmp_path, "--markdown").out.splitlines()[2:4]
    ending = "points over paper (1 seed, no interval), worse on no task"
    assert lines[0] == f"- best (ridge_lambda = 0.005): plus, +5.0 {ending}"
    assert lines[1] == f"- best (ridge_lambda = 0.5): plus, +10.0 {ending}"


def test_equal_rows_of_two_mergers_tie(tmp_path: Path) -> None:
    for merger, level in {"ties": 0.6, "dare": 0.5}.items():
        leave_run(tmp_path / merger, {merger: level, "featcal": 0.7}, merger=merger)
    out = featcal("report", tmp_path, "--markdown").out
    assert "/featcal tie (+0.0 ± " in out and "points), the first worse on no task" in out


def test_the_best_row_of_several_mergers_losses_and_seeds(tmp_path: Path) -> None:
    for merger, level in {"ties": 0.6, "dare": 0.7}.items():
        leave_run(tmp_path / merger, {merger: 0.5, "featcal": level}, merger=merger)
    out = featcal("report", tmp_path, "--markdown").out
    assert "- best: dare/featcal, +10.0 ± 3.1 points over ties/featcal, worse on no task" in out
    run = Run(suite="toy", merger="ties")
    for name, losses in {"ties": (1.5, 1.5), "featcal": (0.7, 1.0), "x": (0.8, 0.8)}.items():
        run.add_row(name, {"loss": dict(zip("ab", losses, strict=True))})
    out = featcal("report", write_run(tmp_path / "loss", run), "--markdown").out
    text = "x, -0.050 in loss from featcal (1 seed, no interval), worse on a (+0.100)"
    assert f"- best: {text}" in out
    for seed, rows in enumerate(({"x": 0.7}, {"y": 0.6})):
        leave_run(tmp_path / "seeds" / str(seed), rows, merger="ties", seed=seed)
    out = featcal("report", tmp_path / "seeds", "--markdown").out
    assert "- best: x (no seed in common with y)" in out
