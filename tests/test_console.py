"""Bars of progress, short blocks of errors, and lines at the end of a job."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fusion_bench import BaseModelPool
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from torch import nn

from fusion_bench_featcal import CalibrationError, progress
from fusion_bench_featcal.error_block import error_block
from fusion_bench_featcal.fusionbench.console import FeatCalJob
from fusion_bench_featcal.fusionbench.run_results import RunResults
from fusion_bench_featcal.progress import progress_bar
from fusion_bench_featcal.read_budgets import budget_in_bytes
from fusion_bench_featcal.results import Cost
from fusion_bench_featcal.saved_model import CardFacts

BARS = {  # a terminal, shown, seconds between lines of a pipe, text
    "a pipe gets nothing of short work": (False, True, None, ""),
    "a pipe gets a line now and then of long work": (False, True, 1e-9, "block 1:  67%"),
    "a terminal gets a bar": (True, True, None, "block 2:"),
    "nothing is shown if nothing is asked for": (True, False, None, ""),
}


@pytest.mark.parametrize(("terminal", "show", "seconds", "text"), BARS.values(), ids=list(BARS))
def test_progress(terminal, show, seconds, text, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    if seconds:
        monkeypatch.setattr(progress, "_SECONDS", seconds)
    with progress_bar(total=3, unit="block", show=show) as bar:
        for step in range(3):
            bar.set_description(f"block {step}", refresh=terminal)
            bar.update()
    assert list(progress_bar("abc", what="evaluating", unit="task", show=show)) == list("abc")
    shown = capsys.readouterr()
    assert text in shown.err and not shown.out and bool(shown.err) == bool(text)


def test_errors_have_their_message_and_unexpected_ones_type_and_place():
    wrapper = InstantiationException("Error in call to target 'x'")
    wrapper.__cause__ = CalibrationError("expert 'a' has no config.json")
    assert error_block(wrapper) == "error: expert 'a' has no config.json"
    assert error_block(KeyError("a")) == "error: unexpected KeyError: 'a'"
    budget: Any = None
    with pytest.raises(TypeError) as caught:
        budget_in_bytes("5%", budget)
    first, *_, place = error_block(caught.value).splitlines()
    assert first.startswith("error: unexpected TypeError: ")
    assert place.startswith("  in fusion_bench_featcal/read_budgets.py:")


@pytest.mark.parametrize("message", ["word " * 900, "\n".join("abcdefghijklmno"), "x" * 3000, ""])
@pytest.mark.parametrize("kind", [CalibrationError, RuntimeError])
def test_block_of_an_error_is_short(message: str, kind: type[Exception]):
    block = error_block(kind(message), "traceback: " + "/long/path" * 9)
    assert len(block) < 1000 and len(block.splitlines()) <= 8
    assert block.startswith("error:") and block.endswith("/path")
    assert (" ..." in block) == (len(message) > 20)


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
