"""The commands `featcal` and `fusion_bench`: plans, screens, and mistakes in one line."""

import json
import logging
import os
import re
import signal
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
from reports import error_of, featcal, leave_run
from tiny_texts import write_adapter
from transformers import AutoModelForSeq2SeqLM

from fusion_bench_featcal import CalibrationError, __version__
from fusion_bench_featcal.fusionbench.console import (
    FeatCalJob,
    ScreenFilter,
    explain_interruptions,
)
from fusion_bench_featcal.suites import image, text

TA6 = "modelpool=clip-vit-mini_TA6"
RUN = ("method=featcal", "modelpool=clip-vit-mini_alphabets2", "path.log_dir=log")

# --- mistakes ---

# A word of a run, and the message about it.
WORDS = {
    "modelpool=clip-vit-mini_TA7": "no config modelpool/clip-vit-mini_TA7 (nearest: 'clip-vi",
    "method=fetcal": "there is no config method/fetcal (nearest: 'featcal')",
    "method=featcal_plus": "no config method/featcal_plus (nearest: 'featcal/plus')",
    "method=FeatCal+": "no config method/FeatCal+ (nearest: 'featcal/plus')",
    "method=regmean++": "(nearest: 'featcal_baselines/regmean_plusplus')",
    "method.base_method=task_arithmetic": "method.base_method must be null or a method's con",
    "+method.mix_alfa=1": "method.mix_alfa is unknown (nearest: 'mix_alpha')",
    "method.mix_alpha=2": "method.mix_alpha must be a finite number",
    "method.calibration_data={mini_nmist: a}": "mini_nmist is unknown (nearest: 'mini_",
    "method.calibration_data={mini_mnist: a.csv}": "mini_mnist=a.csv: there is no such file",
    "modelpool.models.mini_mnist=/no/folder": "modelpool.models.mini_mnist=/no/folder: there",
    "modelpool.train_datasets.mini_mnist=/no/file": "train_datasets.mini_mnist=/no/file: there",
    "+modelpool.train_dataset={a: b}": "modelpool.train_dataset is unknown (nearest: 'train_",
    "method.calibration_data.mini_mnist=a.csv": "To add it, write +method.calibration_data.mini_",
    "+modelpool.models.mini_new=a": "task 'mini_new' has no calibration data",
    "+modelpool.default_taskpool.tasks.mini_mnis=1":
        "default_taskpool.tasks.mini_mnis: no expert has this name (nearest: 'mini_mnist')",
}  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
def test_a_wrong_word_of_a_run_is_named(word: str):
    assert WORDS[word] in error_of("plan", TA6, word)


@pytest.mark.parametrize(("command", "message"), [
    ("report nowhere", "no such run: "),
    ("repot", "invalid choice: 'repot'"),
    ("suite", "are required: "),
    ("calibrate m --uot x", "calibrate: error: no option --uot (nearest: '--out')"),
    ("calibrate m --samples 32", "no option --samples (nearest: '--set samples_per_task=32')"),
    ("calibrate --max=512", "no option --max (nearest: '--set max_length=512')"),
    ("calibrate m --seed", "no option --seed (nearest: '--set seed=...')"),
    ("calibrate m --experts a=b", "no option --experts (nearest: '--expert')"),
    ("calibrate --eval-rows many", "calibrate: error: argument --eval-rows: invalid int"),
])  # fmt: skip
def test_wrong_arguments_end_in_one_line(command: str, message: str):
    done = featcal(*command.split())
    (line,) = done.err.splitlines()
    assert line.startswith("featcal") and message in line and done.code == 2


def test_a_bug_has_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = leave_run(tmp_path)
    monkeypatch.setattr("fusion_bench_featcal.results.lines.read_run", None)
    with pytest.raises(TypeError):
        featcal("report", run)


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_a_failed_run_ends_in_one_line_and_a_bug_in_its_traceback(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with composing():
        config = compose("fabric_model_fusion", [*RUN, "modelpool.models.mini_korean=/no/folder"],
                         return_hydra_config=True)  # fmt: skip
    with pytest.raises(SystemExit, match=r"^error: modelpool\.models\.mini_korean=/no/folder: th"):
        FeatCalJob().on_run_start(config)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err.startswith("\ninterrupted. With method.checkpoint_dir and meth")
    job = JobReturn(status=JobStatus.FAILED)
    job.return_value = raised(CalibrationError("method.seed: change it"))
    FeatCalJob().on_job_end(config, job)
    with pytest.raises(SystemExit, match=r"^\nerror: method\.seed: change it$"):
        FeatCalJob().on_run_end(config, job_return=job)
    job.return_value = bug = raised(KeyError("a bug"))
    FeatCalJob().on_job_end(config, job)
    assert job._return_value is bug


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_run_of_pools_with_the_way_to_go_on(name: str):
    code = f"""
import os, signal, time
from fusion_bench_featcal.fusionbench.console import explain_interruptions
explain_interruptions({{"resume": False}})
os.kill(os.getpid(), signal.{name})
time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert done.returncode == 128 + signal.Signals[name]
    (line,) = done.stderr.split("\n")[1:-1]
    assert line.startswith("interrupted. ") and "method.resume=true" in line


@pytest.mark.parametrize(("method", "advice"), [
    ({"post_merging": [], "upstreams": []},
     ". Repeat the command to continue after the finished runs"),
    ({"stream": "calibration"}, ""),
])  # fmt: skip
def test_an_interruption_names_only_settings_that_apply(method, advice, monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    explain_interruptions(method)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == f"\ninterrupted{advice}\n"


# --- screens ---


@pytest.mark.parametrize(("name", "level", "message", "rank", "visible"), [
    ("fusion_bench_featcal.algorithm", logging.INFO, "calibrating", "0", True),
    ("fusion_bench_featcal.algorithm", logging.INFO, "calibrating", "1", False),
    ("fusion_bench.modelpool", logging.WARNING, "Unused argument: featcal=", "0", False),
    ("transformers", logging.WARNING, "CLIP LOAD REPORT\nx | UNEXPECTED", "0", False),
    ("transformers", logging.WARNING, "CLIP LOAD REPORT\nx | MISSING", "0", True),
])  # fmt: skip
def test_visible_lines(name, level, message, rank, visible, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    record = logging.LogRecord(name, level, "", 0, message, (), None)
    assert ScreenFilter().filter(record) is visible


@pytest.mark.slow
@pytest.mark.parametrize(("words", "message", "is_bug"), [
    (["method.ridge_lambda=-1"], "method.ridge_lambda must be", False),
    (["method.ridge_lamda=1"], "method.ridge_lamda is unknown (nearest: 'ridge_lambda')", False),
    (["method.modules=[nothing]"], "method.modules='nothing' matches no module", False),
    (["modelpool._target_=nowhere.Pool"], "No module named 'nowhere'", True),
])  # fmt: skip
def test_screen_of_a_failed_run(tmp_path: Path, words: list[str], message: str, is_bug: bool):
    output = screen([*RUN, *words], tmp_path)
    assert output.code == 1
    if is_bug:
        assert message in output.text and "error: " not in output.lines[-2]
        return
    assert message in " ".join(line.strip() for line in output.block) and len(output.block) <= 10
    assert "Traceback" not in output.text
    if "method.modules=[nothing]" in words:  # raised by the run itself
        log = (tmp_path / "log" / "cli.log").read_text()
        assert log.count("Traceback (most recent call last)") == 1


@pytest.mark.slow
def test_screen_of_a_run_is_short(tmp_path: Path):
    words = ["method.samples_per_task=8", "method.presets={}", "merged_model_save_path=saved"]
    output = screen([*RUN, *words], tmp_path, fresh=True)
    assert output.code == 0 and len(output.lines) <= 40, output.text
    before, table, _ = output.text.partition("clip-vit-mini_alphabets2: accuracy, %")
    assert table
    for stage in ("evaluating experts", "merging with task_arithmetic",
                  "calibrating featcal (rule=paper)", "the first block took", "saved"):  # fmt: skip
        assert stage in before
    for noise in ("Instantiate", "CONFIG", "Unused argument", "Loading model", "it/s"):
        assert noise not in output.text
    assert "Loading model" in (tmp_path / "log" / "cli.log").read_text()


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "fusion_bench_featcal", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == f"featcal {__version__}"


def test_a_shell_completes_names_of_options(tmp_path: Path):
    pytest.importorskip("argcomplete")
    line, completions = "featcal calibrate --to", tmp_path / "completions"
    shell = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)),
             "_ARGCOMPLETE_STDOUT_FILENAME": str(completions)}  # fmt: skip
    command = [sys.executable, "-m", "fusion_bench_featcal"]
    subprocess.run(command, env={**os.environ, **shell}, capture_output=True, check=False)
    assert completions.read_text().split() == ["--tokenizer"]


def test_folders_of_suites():
    images = Path(featcal("suite", "path", "images").out.strip())
    assert images.is_dir() and images.parent == Path(featcal("suite", "path").out.strip())


# --- plans ---


def plan_of(*words: str) -> dict[str, Any]:
    done = featcal("plan", *words, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.slow
@pytest.mark.ci
def test_plan_of_a_suite_and_its_settings():
    plan = plan_of(TA6, "method=featcal")
    assert plan["downloads"] == [] and plan["rows"] == {"featcal": 1, "featcal_plus": 1}
    sweep = plan_of(TA6, "method.seed=1,2", "-m")
    assert sweep == plan | {"rows": {"featcal": 2, "featcal_plus": 2}, "jobs": 2}
    assert 5 * plan["output"] < plan["read"] < 6 * plan["output"]  # the base has a head of text
    merged = ("method=featcal", "method.base_method=null")
    merged += (f"+modelpool.models._merged_='{image.path('pretrained')}'",)
    limited = plan_of(TA6, *merged, "method.expert_read_budget=50%")
    assert limited["read"] == plan["read"] // 2
    text = featcal("plan", TA6, "method.checkpoint_dir=blocks", "method.ridge_lambda=.1").out
    assert "ridge_lambda=0.1, mix_alpha=0.3, anchor_rho=2" in text
    assert "read from experts, at most" in text and "free in blocks" in text


def test_plan_reads_adapters_without_their_base(tmp_path: Path):
    base = text.path("flan-t5-mini")
    model = AutoModelForSeq2SeqLM.from_pretrained(base, trust_remote_code=False)
    target = "fusion_bench.modelpool.seq2seq_lm.modelpool.load_lora_model"
    tasks = ("snips_intent", "banking77")
    adapters = {task: write_adapter(tmp_path / task, model, 0) for task in tasks}
    models = ", ".join(
        f"{task}: {{_target_: {target}, base_model_path: '{base}', peft_model_path: '{adapter}'}}"
        for task, adapter in adapters.items()
    )
    words = ["modelpool=flan-t5-mini_TA6", f"modelpool.tasks=[{','.join(tasks)}]"]
    words += ["~modelpool.models", f"+modelpool.models={{_pretrained_: '{base}', {models}}}"]
    sizes = [(a / "adapter_model.safetensors").stat().st_size for a in adapters.values()]
    assert plan_of(*words)["read"] == sum(sizes)


def test_plan_counts_rows_of_comparisons_and_sweeps():
    words = [TA6, "method=compare", "method.upstreams=[task_arithmetic,ties_merging]"]
    words += ["method.post_merging=[featcal]", "method.seed=1,2,3"]
    single = dict.fromkeys(("base", "experts", "task_arithmetic", "ties_merging"), 3)
    assert plan_of(*words, "-m")["rows"] == single | {"featcal": 6}


def test_plan_reads_sizes_of_downloads_from_the_hub_or_does_without(tmp_path, monkeypatch):
    base, one = (f"'{image.path(name)}'" for name in ("pretrained", "mini_mnist"))
    models = f"{{_pretrained_: {base}, one: {one}, two: some/model}}"
    words = [TA6, "~modelpool.models", f"+modelpool.models={models}", "~modelpool.train_datasets",
             "+modelpool.train_datasets={one: {path: some/data}, two: other/data}"]  # fmt: skip
    offline, names = plan_of(*words), ["some/model", "some/data", "other/data"]
    assert [next(iter(entry.values())) for entry in offline["downloads"]] == names
    assert offline["read"] is None and offline["output"]
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with Mirror() as mirror:
        mirror.connect(monkeypatch, tmp_path)
        files = {"config.json": b"{}", "model.safetensors": b"0" * 70, "tf_model.h5": b"0" * 900}
        mirror.add("some/model", files)
        data = {"a.parquet": b"0" * 30, "b.parquet": b"0", "README.md": b"0"}
        mirror.add("datasets/some/data", data).hiccup = 503
        mirror.add("datasets/other/data", {"c.csv": b"0"})
        plan = plan_of(*words)
    assert [tuple(entry.values()) for entry in plan["downloads"]] == [
        ("some/model", 2, 72), ("some/data", 2, 31), ("other/data", 1, 1)
    ]  # fmt: skip


def test_ls_lists_names_that_commands_accept() -> None:
    out = featcal("ls").out
    groups = re.split(r"^\S.*\n", out, flags=re.M)[1:]
    methods, mergers, pools, families, types = (re.findall(r"[\w./-]+", group) for group in groups)
    assert "surgery" in methods and "featcal_baselines/lot" in methods
    assert all(featcal("settings", method).code == 0 for method in methods)
    assert {"task_arithmetic", "swudi", "featcal_plus"} < {*mergers}
    config = Path(__file__).resolve().parents[1] / "config"
    assert {*pools} == {file.stem for file in (config / "modelpool").iterdir()}
    assert families[0] == "auto" and "clip_vision_model" in types
