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
FABRIC = SimpleNamespace(loggers=[], device="cpu")


class OneTaskPool:
    """Evaluates any model to one accuracy and loss."""

    def evaluate(self, model: nn.Module) -> dict[str, dict[str, float]]:
        return {"cars": {"accuracy": 0.5, "loss": 1.5}}


def end_job(callback: FeatCalJob, status: JobStatus) -> None:
    job = JobReturn(status=status)
    callback.on_job_end(config=CONFIG, job_return=job)


def finished_results(
    taskpool: Any, folder: Path, program: Any, saved: Path | None = None
) -> RunResults:
    program.taskpool = taskpool
    run = run_results(program, folder)
    run.saver.folder = saved
    run.finish()
    return run


def run_results(program: Any, folder: Path) -> RunResults:
    """Results with one model, and no place to save it."""
    program.merged_model_save_path, program.save_merged_model = None, None
    method = SimpleNamespace(_program=program, log_dir=str(folder), fabric=FABRIC)
    run = RunResults(method, BaseModelPool({}), upstream="merged", row="featcal")
    model = nn.Identity()
    run.saver.offer(model, CardFacts("featcal"))
    run.add_made("featcal", model, settings={}, cost=Cost(), samples={}, seed=None)
    return run


def test_what_waits_is_shown_once_in_order() -> None:
    callback, shown = FeatCalJob(), []
    for status in (JobStatus.COMPLETED, JobStatus.FAILED):
        callback.on_job_start(config=CONFIG)
        seen = len(shown)
        at_the_end(lambda: shown.append("first"))
        at_the_end(lambda: shown.append("second"))
        assert len(shown) == seen
        end_job(callback, status)
    assert shown == ["first", "second", "first", "second"]


@pytest.mark.parametrize("status", [JobStatus.COMPLETED, JobStatus.FAILED])
@pytest.mark.parametrize("line", ["saved the model of row featcal: ", "not saved: "])
def test_closing_lines_say_where_the_model_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: JobStatus, line: str
) -> None:
    callback = FeatCalJob()
    callback.on_job_start(config=CONFIG)
    saved = None if line.startswith("not") else tmp_path / "model"
    finished_results(OneTaskPool(), tmp_path, SimpleNamespace(log_dir=str(tmp_path)), saved)
    assert capsys.readouterr().out == ""
    end_job(callback, status)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith(line)
    assert any("50.0" in text for text in lines[:-3])
    assert lines[-1].endswith(f"featcal report {tmp_path}")


def test_a_run_that_evaluates_nothing_still_says_what_it_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = FeatCalJob()
    callback.on_job_start(config=CONFIG)
    finished_results(None, tmp_path, SimpleNamespace())
    end_job(callback, JobStatus.COMPLETED)
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "not saved: merged_model_save_path=DIR saves the model of row featcal"


def test_without_the_callback_results_are_shown_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished_results(OneTaskPool(), tmp_path, SimpleNamespace())
    assert "not saved: " in capsys.readouterr().out


def test_losses_and_tasks_below_the_merged_model_reach_the_report(tmp_path: Path) -> None:
    run = run_results(SimpleNamespace(taskpool=OneTaskPool(), log_dir=None), tmp_path)
    run.report.add_row("merged", {"cars": 0.6})
    run.finish()
    assert run.report.loss == {"featcal": {"cars": 1.5, "average": 1.5}}
    note = "cars ends below the merged model: featcal -10.0 points"
    assert [each.text for each in run.report.notes] == [note]
    assert note in (tmp_path / "report.md").read_text()
