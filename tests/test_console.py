"""The callback of a run: the config is checked first, and a mistake ends in one line."""

import logging
from typing import Any

import pytest
from configs import composing
from hydra import compose
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.fusionbench.console import FeatCalJob, ScreenFilter

WORDS = ["method=featcal", "modelpool=clip-vit-mini_alphabets2"]


def config_of(*words: str) -> Any:
    with composing():
        return compose("fabric_model_fusion", [*WORDS, *words], return_hydra_config=True)


def test_a_wrong_word_ends_the_run_before_anything_is_made():
    config = config_of("modelpool.models.mini_korean=/no/folder")
    with pytest.raises(
        SystemExit, match=r"^error: modelpool\.models\.mini_korean=/no/folder: ther"
    ):
        FeatCalJob().on_run_start(config)


@pytest.mark.parametrize(("word", "printed"), [("seed=1", False), ("print_config=true", True)])
def test_fusion_bench_prints_its_config_on_request_only(word: str, printed: bool):
    config = config_of(word)
    FeatCalJob().on_run_start(config)
    assert (config.print_config, config.print_function_call) == (printed, False)
    sweep = OmegaConf.create({"hydra": {"overrides": {"task": [word]}}})
    FeatCalJob().on_multirun_start(sweep)
    words = ["print_config=false", "print_function_call=false", word]
    assert sorted(sweep.hydra.overrides.task) == sorted(words)
    assert sweep.hydra.overrides.task[-1] == word  # the last one counts


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (CalibrationError("method.seed: change it"), "\nerror: method.seed: change it"),
        (KeyError("a bug"), None),
    ],
)
def test_a_mistake_ends_in_its_line_and_a_bug_in_its_traceback(error: Exception, text: str | None):
    result = JobReturn(status=JobStatus.FAILED, _return_value=raised(error))
    FeatCalJob().on_job_end(OmegaConf.create(), result)
    if text is None:
        assert result._return_value is error
    else:
        assert str(result._return_value) == text
        with pytest.raises(SystemExit):
            FeatCalJob().on_run_end(OmegaConf.create(), job_return=result)


@pytest.mark.parametrize(
    ("name", "level", "message", "rank", "visible"),
    [
        ("fusion_bench_featcal.algorithm", logging.INFO, "calibrating", "0", True),
        ("fusion_bench_featcal.algorithm", logging.INFO, "calibrating", "1", False),
        ("fusion_bench_featcal.algorithm", logging.WARNING, "few samples", "1", True),
        ("fusion_bench.modelpool", logging.WARNING, "Unused argument: featcal=", "0", False),
        (
            "transformers",
            logging.WARNING,
            "CLIPVisionModel LOAD REPORT\nx | UNEXPECTED",
            "0",
            False,
        ),
        ("transformers", logging.WARNING, "CLIPVisionModel LOAD REPORT\nx | MISSING", "0", True),
    ],
)
def test_lines_of_the_screen(name, level, message, rank, visible, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    record = logging.LogRecord(name, level, "", 0, message, (), None)
    assert ScreenFilter().filter(record) is visible
