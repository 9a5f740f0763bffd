"""The commands `featcal` and `fusion_bench`: plans, screens, and mistakes in one line."""

import errno
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import screen
from configs import composing
from hub_mirror import Mirror
from hydra import compose
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import InstantiationException
from reports import error_of, featcal, leave_run
from transformers import CLIPVisionConfig, CLIPVisionModel

from fusion_bench_featcal import CalibrationError, __version__
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.fusionbench.console import FeatCalJob, ScreenFilter
from fusion_bench_featcal.fusionbench.plan_run import plan_run
from fusion_bench_featcal.models.hub import hub_error
from fusion_bench_featcal.models.plan import Plan, check
from fusion_bench_featcal.run import progress_bar

TA6 = "modelpool=clip-vit-mini_TA6"
RUN = ("method=featcal", "modelpool=clip-vit-mini_alphabets2", "path.log_dir=log")

# --- mistakes ---

# A word of a run, and the message about it.
WORDS = {
    "modelpool=clip-vit-mini_TA7": "no config modelpool/clip-vit-mini_TA7 (nearest: 'clip-vi",
    "taskpool=clip-vit-mini_TA7": "no config taskpool/clip-vit-mini_TA7 (nearest: 'clip-vit-",
    "method=fetcal": "there is no config method/fetcal (nearest: 'featcal')",
    "method@method.base_method=task_arithmetics": "(nearest: 'task_arithmetic')",
    "method.base_method=task_arithmetic": "method.base_method must be null or a method's con",
    "method.mix_alfa=1": "method.mix_alfa is unknown (nearest: 'mix_alpha')",
    "+method.mix_alfa=1": "method.mix_alfa is unknown (nearest: 'mix_alpha')",
    "method.mix_alpha=2": "method.mix_alpha must be a finite number",
    "method.save=featcal_plsu": "method.save must be a row that this run makes",
    "method.presets={a: {mix_alfa: 1}}": "method.presets.a.mix_alfa is unknown",
    "method.calibration_data={mini_nmist: a}": "mini_nmist is unknown (nearest: 'mini_",
    "method.calibration_data={mini_mnist: a.csv}": "mini_mnist=a.csv: there is no such file",
    "modelpool.models.mini_mnist=/no/folder": "modelpool.models.mini_mnist=/no/folder: there",
    "+modelpool.default_taskpool.tasks.mini_mnis=1":
        "default_taskpool.tasks.mini_mnis: no expert has this name (nearest: 'mini_mnist')",
}  # fmt: skip
COMMANDS = {
    "report {tmp}/nowhere": "no such run: ",
    "calibrate m --out {tmp}/o --expert a=b --base b --data a={tmp}/none.jsonl":
        "none.jsonl: there is no such file or folder here",
}  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
def test_a_wrong_word_of_a_run_is_named(word: str):
    assert WORDS[word] in error_of("plan", TA6, word)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_argument_is_named(command: str, tmp_path: Path):
    assert COMMANDS[command] in error_of(*command.format(tmp=tmp_path).split())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("calibrate m --uot x", "calibrate: error: no option --uot (nearest: '--out')"),
        ("calibrate --eval-rows many", "calibrate: error: argument --eval-rows: invalid int"),
        *((words, ": error: ") for words in ("", "repot", "report", "suite")),
    ],
)
def test_unknown_options_and_verbs_end_in_one_line(command: str, message: str):
    done = featcal(*command.split())
    (line,) = done.err.splitlines()
    assert line.startswith("featcal") and message in line and "--help" in line and done.code == 2


def test_a_bug_has_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(_: Path) -> None:
        raise RuntimeError("a bug")

    run = leave_run(tmp_path)
    monkeypatch.setattr("fusion_bench_featcal.results.joining.read_run", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        featcal("report", run)


def cycle(first: Exception, second: Exception) -> Exception:
    """Two errors of which each led to the other."""
    first.__cause__, second.__context__ = second, first
    return first


def test_errors_are_described_by_their_cause_also_in_a_cycle():
    wrapper = cycle(InstantiationException("wrapper"), ValueError("the cause"))
    assert first_line(wrapper) == "the cause"
    for second, words in (
        (ValueError("second"), "--base one: first"),
        (TimeoutError("away"), "does not answer"),
        (OSError(errno.ENOSPC, "no space"), "no room on the disk"),
    ):
        assert words in str(hub_error(cycle(RuntimeError("first"), second), "--base one"))


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_a_failed_run_ends_in_one_line_and_a_bug_in_its_traceback():
    with composing():
        config = compose("fabric_model_fusion", [*RUN, "modelpool.models.mini_korean=/no/folder"],
                         return_hydra_config=True)  # fmt: skip
    with pytest.raises(SystemExit, match=r"^error: modelpool\.models\.mini_korean=/no/folder: th"):
        FeatCalJob().on_run_start(config)
    job = JobReturn(status=JobStatus.FAILED)
    job.return_value = raised(CalibrationError("method.seed: change it"))
    FeatCalJob().on_job_end(config, job)
    with pytest.raises(SystemExit, match=r"^\nerror: method\.seed: change it$"):
        FeatCalJob().on_run_end(config, job_return=job)
    job.return_value = bug = raised(KeyError("a bug"))
    FeatCalJob().on_job_end(config, job)
    assert job._return_value is bug


# --- screens ---


@pytest.mark.parametrize(
    ("name", "level", "message", "rank", "visible"),
    [
        ("fusion_bench_featcal.algorithm", logging.INFO, "calibrating", "0", True),
        ("fusion_bench_featcal.algorithm", logging.INFO, "calibrating", "1", False),
        ("fusion_bench_featcal.algorithm", logging.WARNING, "few samples", "1", True),
        ("fusion_bench.modelpool", logging.WARNING, "Unused argument: featcal=", "0", False),
        ("transformers", logging.WARNING, "CLIP LOAD REPORT\nx | UNEXPECTED", "0", False),
        ("transformers", logging.WARNING, "CLIP LOAD REPORT\nx | MISSING", "0", True),
    ],
)
def test_visible_lines(name, level, message, rank, visible, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    record = logging.LogRecord(name, level, "", 0, message, (), None)
    assert ScreenFilter().filter(record) is visible


@pytest.mark.parametrize(("terminal", "show"), [(True, True), (True, False), (False, True)])
def test_progress_is_shown_on_a_terminal_only(terminal, show, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with progress_bar(total=1, unit="block", show=show) as bar:
        bar.set_description("block 0")
        bar.update()
    output = capsys.readouterr()
    assert ("block 0" in output.err) == bool(output.err) == (terminal and show)
    assert not output.out


def test_version_and_folders_of_suites():
    assert featcal("--version").out.strip() == f"featcal {__version__}"
    images = Path(featcal("suite", "path", "images").out.strip())
    assert images.is_dir() and images.parent == Path(featcal("suite", "path").out.strip())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message", "is_bug"),
    [
        (["method.ridge_lambda=-1"], "method.ridge_lambda must be", False),
        (["method.modules=[nothing]"], "method.modules: 'nothing' matches no module", False),
        (["method=surgery", "method.seed=-1"], "method.seed must be", False),
        (["fabric.devices=2", "fabric.accelerator=cpu", "method.base_method=null"], "", False),
        (["modelpool._target_=nowhere.Pool"], "No module named 'nowhere'", True),
        (["hydra/job_logging=rich_logging", "method.modules=[a]"], "Instantiate by calling", True),
        (["method=simple_average", "modelpool._target_=nowhere.Pool"], "HYDRA_FULL_ERROR=1", True),
    ],
)
def test_screen_of_a_failed_run(tmp_path: Path, words: list[str], message: str, is_bug: bool):
    arguments = [*(RUN[1:] if words[0].startswith("method=") else RUN), *words]
    output = screen(arguments, tmp_path, fresh="fabric.devices=2" in words)
    assert output.code == 1
    if is_bug:
        assert message in output.text and "error: " not in output.lines[-2]
        return
    assert message in " ".join(line.strip() for line in output.block) and len(output.block) <= 10
    assert "Traceback" not in output.text and "│" not in output.text
    if "method.modules=[nothing]" in words:  # raised by the run itself
        log = (tmp_path / "log" / "cli.log").read_text()
        assert log.count("Traceback (most recent call last)") == 1


@pytest.mark.slow
def test_screen_of_a_run_is_short(tmp_path: Path):
    # FusionBench's own configs of pools have a base_model to which their other keys refer.
    words = [*RUN, "+modelpool.base_model=any", "method.samples_per_task=8"]
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
    assert "Loading model" in log and "tensor by tensor from files" in log


# --- plans ---


def test_plan_of_a_suite_and_its_settings():
    def plan_of(*words: str) -> dict[str, Any]:
        return json.loads(featcal("plan", TA6, *words, "--json").out)

    plan = plan_of("method=featcal")
    assert plan["downloads"] == [] and plan["rows"] == {"featcal": 1, "featcal_plus": 1}
    assert 5 * plan["output"] < plan["read"] < 6 * plan["output"]  # the base has a head of text
    assert plan_of("method.expert_read_budget=50%")["read"] == plan["read"] // 2
    text = featcal("plan", TA6, "method.checkpoint_dir=blocks").out
    assert "read from experts, at most" in text and "free in blocks" in text
    with pytest.raises(CalibrationError, match=r"of disk space in .*new, .* are free"):
        check(Plan(output=2**62, folder="new"))


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (["method=surgery"], {"SurgeryAlgorithm": 1}),
        (["method.seed=1,2", "method.samples_per_task=8,16,32"],
         {"featcal": 6, "featcal_plus": 6}),
        (["method=compare", "method.upstreams=[task_arithmetic,ties_merging]", "method.alone=[lot]",
          "method.post_merging=[featcal]", "method.seed=1,2,3"],
         {"base": 3, "experts": 3, "task_arithmetic": 3, "featcal": 6, "ties_merging": 3,
          "lot": 3}),
    ],
)  # fmt: skip
def test_plan_counts_rows_of_comparisons_and_sweeps(words: list[str], rows: dict[str, int]):
    assert plan_run([TA6, *words]).rows == rows


def test_plan_reads_sizes_of_downloads_from_the_hub_or_does_without(tmp_path: Path):
    sizes: Any = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
    config = CLIPVisionConfig(hidden_size=32, intermediate_size=64, patch_size=16, **sizes)
    for name in ("base", "one"):
        CLIPVisionModel(config).save_pretrained(tmp_path / name)
    weights = (tmp_path / "one" / "model.safetensors").stat().st_size
    models = f"{{_pretrained_: {tmp_path}/base, one: {tmp_path}/one, two: some/model}}"
    words = [TA6, "~modelpool.models", f"+modelpool.models={models}", "~modelpool.train_datasets",
             "+modelpool.train_datasets={one: {path: some/data}, two: other/data}"]  # fmt: skip
    offline = plan_run(words)
    assert [entry.name for entry in offline.downloads] == ["some/model", "some/data", "other/data"]
    assert (offline.read, offline.output) == (None, weights)
    with Mirror() as mirror:
        files = {"config.json": b"{}", "model.safetensors": b"0" * 70, "tf_model.h5": b"0" * 900}
        mirror.add("some/model", files)
        data = {"a.parquet": b"0" * 30, "b.parquet": b"0", "README.md": b"0"}
        mirror.add("datasets/some/data", data)
        code = (
            "import sys, json\n"
            "from fusion_bench_featcal.fusionbench.plan_run import plan_run\n"
            f"print(json.dumps([plan_run({words!r}).as_dict(), 'torch' in sys.modules]))"
        )
        environment = mirror.environment(tmp_path / "home")
        text = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    plan, has_torch = json.loads(text)
    assert [tuple(entry.values()) for entry in plan["downloads"]] == [
        ("some/model", 2, 72), ("some/data", 2, 31), ("other/data", None, None)
    ]  # fmt: skip
    assert plan["read"] == weights + 70
    assert not has_torch
