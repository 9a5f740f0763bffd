"""The screen while one of our methods runs, and when it fails."""

from pathlib import Path

import pytest
from cli_runs import screen

POOL = "modelpool=clip-vit-mini_alphabets2"
FEATCAL = ("method=featcal", POOL, "path.log_dir=log")

pytestmark = pytest.mark.slow

MISTAKES = {
    "method.ridge_lambda=-1": "method.ridge_lambda must be",
    "method.ridge_lamda=1": "method.ridge_lamda is unknown (nearest: 'ridge_l",
    "modelpool.models.mini_korean=/no/folder": "mini_korean=/no/folder: there is no such file",
    "method.modules=[nothing]": "method.modules: 'nothing' matches no module",
    "method=surgery method.seed=-1": "method.seed must be",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_ends_in_one_short_block(tmp_path: Path, mistake: str) -> None:
    method, _, word = mistake.rpartition(" ")
    output = screen([method or FEATCAL[0], *FEATCAL[1:], word], tmp_path)
    assert output.code == 1 and len(output.block) <= 10
    assert MISTAKES[mistake] in " ".join(line.strip() for line in output.block)
    assert "Traceback" not in output.text and "│" not in output.text
    if mistake.startswith("method.modules"):  # of the run itself: the log file has all
        log = (tmp_path / "log" / "cli.log").read_text()
        assert log.count("Traceback (most recent call last)") == 1
        assert "Running the model fusion program" in log


@pytest.mark.parametrize(
    ("word", "texts"),
    [
        ("modelpool._target_=nowhere.Pool", ["ModuleNotFoundError: No module named 'nowhere'"]),
        ("method.base_method={_target_:builtins.dict}", ["program.py", "AttributeError: 'dict'"]),
        ("hydra/job_logging=rich_logging", ["Instantiate by calling class"]),
    ],
)
def test_a_bug_has_its_traceback_and_fusion_bench_its_own_screen(
    tmp_path: Path, word: str, texts: list[str]
) -> None:
    output = screen([*FEATCAL, word, "method.modules=[nothing]"], tmp_path)
    assert output.code == 1
    assert all(text in output.text for text in ["Traceback", *texts])


def test_several_processes_print_one_block(tmp_path: Path) -> None:
    words = [*FEATCAL, "method.base_method=null", "fabric.devices=2", "fabric.accelerator=cpu"]
    output = screen(words, tmp_path, fresh=True)
    assert output.code == 1 and len(output.block) <= 10 and "Traceback" not in output.text


def test_methods_of_fusion_bench_fail_as_without_the_plugin(tmp_path: Path) -> None:
    words = ["method=simple_average", POOL, "path.log_dir=log", "modelpool._target_=nowhere.Pool"]
    output = screen(words, tmp_path)
    assert output.code == 1
    assert "error: " not in output.lines[-2]
    for text in ("Set the environment variable HYDRA_FULL_ERROR=1", "Instantiate by calling class"):
        assert text in output.text


def test_normal_run_is_short(tmp_path: Path) -> None:
    # FusionBench's own configs of pools have a base_model to which their other keys refer.
    words = [*FEATCAL, "+modelpool.base_model=any", "method.samples_per_task=8"]
    words += ["method.presets={}", "merged_model_save_path=saved"]
    output = screen(words, tmp_path, fresh=True)
    assert output.code == 0 and len(output.lines) <= 40, output.text
    before, table, _ = output.text.partition("clip-vit-mini_alphabets2: accuracy, %")
    assert table
    for stage in (
        "evaluating base", "evaluating experts", "evaluating task_arithmetic",
        "merging with task_arithmetic", "calibrating featcal (rule=paper)",
        "the first block took", "saved",
    ):  # fmt: skip
        assert stage in before
    for noise in ("Instantiate", "CONFIG", "Unused argument", "Loading model", "slow image",
                  "LOAD REPORT", "it/s"):  # fmt: skip
        assert noise not in output.text
    log = (tmp_path / "log" / "cli.log").read_text()
    assert "Loading model" in log and "Unused argument: base_model=any" in log
    assert "tensor by tensor from files" in log and "settings of featcal: {" in log
    assert (tmp_path / "log" / "program_report.json").stat().st_size > 100
