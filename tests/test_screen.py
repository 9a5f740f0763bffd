"""The screen while one of our methods runs, and where it fails."""

import os
import sys
from pathlib import Path

import pytest
from cli_runs import screen

POOL = "modelpool=clip-vit-mini_alphabets2"
FAST = ("method.samples_per_task=8", "method.presets={}")

pytestmark = pytest.mark.slow

MISTAKES = {
    "out_of_range": (["method.ridge_lambda=-1"], "method.ridge_lambda must be"),
    "of_the_run": (["method.base_method=null"], "method.base_method is null"),
    "misspelt": (["method.ridge_lamda=1"], "method.ridge_lamda is no setting (nearest: 'ridge_l"),
    "no_such_pool": (["modelpool=clip-vit-mini_TA66"], "(nearest: 'clip-vit-mini_"),
    "no_such_class": (["modelpool._target_=nowhere.Pool"], "making modelpool nowhere.Pool"),
    "raw": (["method.base_method={_target_: builtins.dict}"], "program.py:"),
    "interpolation": (["modelpool.models._pretrained_=${nowhere}"], "nowhere"),
    "log_dir": (["path.log_dir=taken"], "Change path.log_dir to a writable directory"),
    "debug": (["method.debug=7"], "method.debug must be true or false"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_ends_in_one_short_block(tmp_path: Path, mistake: str) -> None:
    words, told = MISTAKES[mistake]
    (tmp_path / "taken").write_text("")
    seen = screen(["method=featcal", POOL, "path.log_dir=log", *words], tmp_path)
    assert seen.code == 1
    assert len(seen.block) <= 10
    assert told in " ".join(line.strip() for line in seen.block)
    assert "Traceback" not in seen.text and "│" not in seen.text
    if mistake in ("raw", "of_the_run"):  # of the run itself: the log file has all
        log = (tmp_path / "log" / "cli.log").read_text()
        assert log.count("Traceback (most recent call last)") == 1
        assert "Running the model fusion program" in log


@pytest.mark.parametrize("method", ["surgery", "compare", "featcal_baselines/regmean"])
def test_mistake_in_other_methods(tmp_path: Path, method: str) -> None:
    words = [f"method={method}", POOL, "path.log_dir=log", "method.seed=-1"]
    seen = screen(words, tmp_path)
    assert seen.code == 1
    assert len(seen.block) <= 10
    assert not any(line.strip() for line in seen.lines[: -len(seen.block)])
    assert "method.seed must be" in seen.text


@pytest.mark.parametrize("switch", ["method.debug=true", "hydra.verbose=true", "HYDRA_FULL_ERROR"])
def test_everything_is_shown_to_who_asks(tmp_path: Path, switch: str) -> None:
    asked = {switch: "1"} if switch.isupper() else {}
    words = ["method=featcal", POOL, "path.log_dir=log", "method.ridge_lambda=-1"]
    seen = screen([*words, *([] if asked else [switch])], tmp_path, environment=asked)
    assert seen.code == 1
    assert "Instantiate by calling class" in seen.text
    assert "Traceback" in seen.text


def test_several_processes_speak_once(tmp_path: Path) -> None:
    words = ["method=featcal", POOL, "path.log_dir=log", "method.base_method=null"]
    words += ["fabric.devices=2", "fabric.accelerator=cpu"]
    seen = screen(words, tmp_path, fresh=True)
    assert seen.code == 1
    assert len(seen.block) <= 10
    assert "Traceback" not in seen.text


def test_each_of_several_runs_goes_on(tmp_path: Path) -> None:
    words = ["--multirun", "method=featcal", POOL, "hydra.sweep.dir=runs"]
    seen = screen([*words, "method.ridge_lambda=-1,-2"], tmp_path)
    assert seen.code == 1
    assert "got -1" in seen.block[0]
    assert "got -2" in (tmp_path / "runs" / "1" / "cli.log").read_text()
    assert len(seen.lines) < 20


@pytest.mark.parametrize("mistake", ["method.foo=1", "modelpool._target_=nowhere.Pool"])
def test_methods_of_fusion_bench_fail_as_ever(tmp_path: Path, mistake: str) -> None:
    words = ["method=simple_average", POOL, "path.log_dir=log", mistake]
    seen = screen(words, tmp_path)
    assert seen.code == 1
    assert "error: " not in seen.lines[-2]
    assert "Set the environment variable HYDRA_FULL_ERROR=1" in seen.text
    if "nowhere" in mistake:
        assert "Instantiate by calling class" in seen.text and "CONFIG" in seen.text


def test_normal_run_is_short(tmp_path: Path) -> None:
    # FusionBench's own configs of pools have a base_model to which their other keys refer.
    words = ["method=featcal", POOL, "+modelpool.base_model=any", "path.log_dir=log", *FAST]
    seen = screen([*words, "merged_model_save_path=saved"], tmp_path, fresh=True)
    assert seen.code == 0, seen.text
    before, table, _ = seen.text.partition("clip-vit-mini_alphabets2, merged by")
    assert table
    assert len(seen.lines) <= 40
    for stage in (
        "evaluating base", "evaluating experts", "evaluating task_arithmetic", "plan: ",
        "merging with task_arithmetic", "calibrating featcal (rule=paper)", "saved",
    ):  # fmt: skip
        assert stage in before
    for needless in (
        "Instantiate",
        "CONFIG",
        "Unused argument",
        "Loading model",
        "slow image",
        "LOAD REPORT",
        "it/s",
    ):
        assert needless not in seen.text
    log = (tmp_path / "log" / "cli.log").read_text()
    assert "Loading model" in log and "Unused argument: base_model=any" in log
    assert "tensor by tensor from files" in log and "settings of featcal: samples_per_task=8" in log
    assert (tmp_path / "log" / "program_report.json").stat().st_size > 100


def test_default_suite_takes_forty_lines_with_its_tables(tmp_path: Path) -> None:
    words = ["method=featcal", "modelpool=clip-vit-mini_TA6", "path.log_dir=log"]
    words += ["method.samples_per_task=8", "+modelpool.default_taskpool.fast_dev_run=true"]
    seen = screen(words, tmp_path)
    assert seen.code == 0, seen.text
    assert "featcal:plus" in seen.text and "gain over merger" in seen.text
    assert len(seen.lines) <= 40, seen.text


def test_surgery_is_short_and_prints_what_is_asked_for(tmp_path: Path) -> None:
    words = ["method=surgery", POOL, "path.log_dir=log", "method.steps=2"]
    seen = screen([*words, "print_config=true", "method.samples_per_task=8"], tmp_path)
    assert seen.code == 0, seen.text
    assert "CONFIG" in seen.text
    assert "Instantiate" not in seen.text and "Profiler" not in seen.text
    assert "made surgery in" in seen.text
    _, run = seen.text.split("making surgery")
    assert len(run.splitlines()) <= 35, run


def test_command_in_a_folder_of_its_own_composes(tmp_path: Path) -> None:
    """The plugin that is tested is the source's, not a copy of another day."""
    assert (
        Path(sys.modules["fusion_bench_featcal"].__file__ or "").parent / "_hydra_plugin"
    ).is_dir()
    words = ["method=featcal", POOL, "dry_run=true", "path.log_dir=log"]
    seen = screen(words, tmp_path, fresh=True)
    assert seen.code == 0
    assert "ridge_lambda: 0.05" in seen.text
    assert os.listdir(tmp_path / "plugin" / "hydra_plugins") == ["fusion_bench_featcal"]
