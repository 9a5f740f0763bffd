"""Results are shown when the job is over, below everything that FusionBench prints."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fusion_bench import BaseModelPool
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from torch import nn

from fusion_bench_featcal.fusionbench import run_results as results
from fusion_bench_featcal.fusionbench.hydra_job import LogDirectoryCheck, at_the_end
from fusion_bench_featcal.fusionbench.run_results import RunResults
from fusion_bench_featcal.results import Cost
from fusion_bench_featcal.saved_model import CardFacts

NO_CONFIG = OmegaConf.create({})
FABRIC = SimpleNamespace(loggers=[], device="cpu")


class OneTaskPool:
    """Evaluates any model to one accuracy and loss."""

    def evaluate(self, model: nn.Module) -> dict[str, dict[str, float]]:
        return {"cars": {"accuracy": 0.5, "loss": 1.5}}


def end_job(callback: LogDirectoryCheck, status: JobStatus) -> None:
    job = JobReturn(status=status)
    callback.on_job_end(config=NO_CONFIG, job_return=job)


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
    callback, shown = LogDirectoryCheck(), []
    assert not at_the_end(lambda: shown.append("nowhere"))
    for status in (JobStatus.COMPLETED, JobStatus.FAILED):
        callback.on_job_start(config=NO_CONFIG)
        assert at_the_end(lambda: shown.append("first"))
        assert at_the_end(lambda: shown.append("second"))
        end_job(callback, status)
    assert shown == ["first", "second", "first", "second"]
    assert not at_the_end(lambda: shown.append("nowhere"))


@pytest.mark.parametrize("status", [JobStatus.COMPLETED, JobStatus.FAILED])
@pytest.mark.parametrize("line", ["saved the model of row featcal: ", "not saved: "])
def test_closing_lines_say_where_the_model_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: JobStatus, line: str
) -> None:
    callback = LogDirectoryCheck()
    callback.on_job_start(config=NO_CONFIG)
    saved = None if line.startswith("not") else tmp_path / "model"
    finished_results(OneTaskPool(), tmp_path, SimpleNamespace(log_dir=str(tmp_path)), saved)
    assert capsys.readouterr().out == ""
    end_job(callback, status)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4].startswith(line)
    assert any("50.0" in text for text in lines[:-4])
    assert lines[-1].endswith(f"featcal plot {tmp_path}")


def test_a_run_that_evaluates_nothing_still_says_what_it_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = LogDirectoryCheck()
    callback.on_job_start(config=NO_CONFIG)
    finished_results(None, tmp_path, SimpleNamespace())
    end_job(callback, JobStatus.COMPLETED)
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "not saved: merged_model_save_path=DIR saves the model of row featcal"


def test_without_the_callback_results_wait_for_the_end_of_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(results.atexit, "register", registered.append)
    program: Any = SimpleNamespace()
    run = finished_results(OneTaskPool(), tmp_path, program)
    assert registered == []
    program.taskpool.evaluate(run.saver.model)  # FusionBench asks when the model has been saved
    (show,) = registered
    show()
    assert "not saved: " in capsys.readouterr().out


def test_losses_and_tasks_below_the_merged_model_reach_the_report(tmp_path: Path) -> None:
    run = run_results(SimpleNamespace(taskpool=OneTaskPool(), log_dir=None), tmp_path)
    run.report.add_row("merged", {"cars": 0.6})
    run.finish()
    assert run.report.loss == {"featcal": {"cars": 1.5, "average": 1.5}}
    note = "cars ends below the merged model: featcal -10.0 points"
    assert run.report.notes == [note]
    assert note in (tmp_path / "report.md").read_text()
