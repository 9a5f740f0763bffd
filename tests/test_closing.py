"""Results are shown when the job is over, below everything that FusionBench prints."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fusion_bench import BaseModelPool
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from torch import nn

from fusion_bench_featcal.fusionbench.console import FeatCalJob
from fusion_bench_featcal.fusionbench.run_results import RunResults
from fusion_bench_featcal.results import Cost
from fusion_bench_featcal.saved_model import CardFacts

POOL = SimpleNamespace(evaluate=lambda model: {"cars": {"accuracy": 0.5, "loss": 1.5}})
NOT_SAVED = "not saved: merged_model_save_path=DIR saves the model of row featcal"


def finished(folder: Path, taskpool: Any, saved: Path | None = None) -> RunResults:
    """Results of a run with one model."""
    program = SimpleNamespace(taskpool=taskpool, log_dir=str(folder))
    program.merged_model_save_path, program.save_merged_model = None, None
    fabric = SimpleNamespace(loggers=[], device="cpu")
    method = SimpleNamespace(_program=program, log_dir=str(folder), fabric=fabric)
    run = RunResults(method, BaseModelPool({}), upstream="merged", row="featcal")
    model = nn.Identity()
    run.saver.offer(model, CardFacts("featcal"))
    run.add_made("featcal", model, settings={}, cost=Cost(), samples={}, seed=None)
    run.saver.folder = saved
    run.finish()
    return run


@pytest.mark.parametrize("status", [JobStatus.COMPLETED, JobStatus.FAILED])
def test_closing_lines_come_once_when_the_job_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: JobStatus
) -> None:
    callback, config = FeatCalJob(), OmegaConf.create({"hydra": {"overrides": {"task": []}}})
    for saved, line in ((None, NOT_SAVED), (tmp_path, "saved the model of row featcal: ")):
        callback.on_job_start(config=config)
        finished(tmp_path, POOL, saved)
        assert capsys.readouterr().out == ""
        callback.on_job_end(config=config, job_return=JobReturn(status=status))
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1].endswith(f"featcal report {tmp_path}")
        assert lines[-3].startswith(line) and any("50.0" in text for text in lines[:-3])


def test_results_are_shown_at_once_without_the_callback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = finished(tmp_path, POOL).report
    assert NOT_SAVED in capsys.readouterr().out
    assert report.loss == {"featcal": {"cars": 1.5, "average": 1.5}}
    finished(tmp_path, None)  # evaluates nothing
    assert capsys.readouterr().out.startswith(NOT_SAVED)
