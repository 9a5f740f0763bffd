"""Results are shown when the job is over, below everything that FusionBench prints."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fusion_bench import BaseModelPool
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from torch import nn

from fusion_bench_featcal.fusionbench.console import FeatCalJob, at_the_end
from fusion_bench_featcal.fusionbench.run_results import RunResults
from fusion_bench_featcal.results import Cost
from fusion_bench_featcal.saved_model import CardFacts

CONFIG = OmegaConf.create({"hydra": {"overrides": {"task": []}}})
POOL = SimpleNamespace(evaluate=lambda model: {"cars": {"accuracy": 0.5, "loss": 1.5}})
statuses = pytest.mark.parametrize("status", [JobStatus.COMPLETED, JobStatus.FAILED])


def run_results(folder: Path, taskpool: Any, saved: Path | None = None) -> RunResults:
    """Results of a run with one model."""
    program = SimpleNamespace(taskpool=taskpool, log_dir=str(folder))
    program.merged_model_save_path, program.save_merged_model = None, None
    fabric = SimpleNamespace(loggers=[], device="cpu")
    method = SimpleNamespace(_program=program, log_dir=str(folder), fabric=fabric)
    run, model = (
        RunResults(method, BaseModelPool({}), upstream="merged", row="featcal"),
        nn.Identity(),
    )
    run.saver.offer(model, CardFacts("featcal"))
    run.add_made("featcal", model, settings={}, cost=Cost(), samples={}, seed=None)
    run.saver.folder = saved
    return run


@statuses
@pytest.mark.parametrize("is_saved", [True, False])
def test_closing_lines_come_when_the_job_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: JobStatus, is_saved: bool
) -> None:
    callback = FeatCalJob()
    for _ in range(2):  # each time once
        callback.on_job_start(config=CONFIG)
        run_results(tmp_path, POOL, tmp_path / "model" if is_saved else None).finish()
        at_the_end(lambda: print("last"))
        assert capsys.readouterr().out == ""
        callback.on_job_end(config=CONFIG, job_return=JobReturn(status=status))
        *lines, report, last = capsys.readouterr().out.splitlines()
        assert report.endswith(f"featcal report {tmp_path}") and last == "last"
        line = "saved the model of row featcal: " if is_saved else "not saved: "
        assert lines[-2].startswith(line) and any("50.0" in text for text in lines[:-2])


def test_results_are_shown_at_once_without_the_callback_and_without_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_results(tmp_path, POOL).finish()
    assert "not saved: " in capsys.readouterr().out
    run_results(tmp_path, None).finish()
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "not saved: merged_model_save_path=DIR saves the model of row featcal"


def test_losses_and_tasks_below_the_merged_model_reach_the_report(tmp_path: Path) -> None:
    run = run_results(tmp_path, POOL)
    run.report.add_row("merged", {"cars": 0.6})
    run.finish()
    assert run.report.loss == {"featcal": {"cars": 1.5, "average": 1.5}}
    note = "cars ends below the merged model: featcal -10.0 points"
    assert [each.text for each in run.report.notes] == [note]
    assert note in (tmp_path / "report.md").read_text()
