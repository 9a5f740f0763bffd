"""`featcal calibrate` in processes of torchrun: one calibration, and one voice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from made_folders import FEW, language_folders, words, write_rows
from safetensors.torch import load_file
from test_merge_only import merging
from tiny_texts import TASKS, llama_model

from fusion_bench_featcal.results import read_run

pytestmark = [pytest.mark.slow, pytest.mark.ci]

SMALL = ("--set", "batch_size=2")


def started(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`featcal` with arguments, in processes of torchrun."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    command = [sys.executable, *torchrun, "-m", "fusion_bench_featcal", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def assert_close(folder: Path, other: Path) -> None:
    """Both models are equal up to the rounding of float32 sums."""
    expected, result = (load_file(path / "model.safetensors") for path in (other, folder))
    for name, value in expected.items():
        assert (result[name] - value).norm() <= 1e-4 * value.norm(), name


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of language models."""
    folder = tmp_path_factory.mktemp("made")
    language_folders(folder, llama_model())
    return folder


def test_three_processes_calibrate_two_tasks(made: Path, tmp_path: Path) -> None:
    # The last --out counts for argparse.
    one = started(1, *words(made, *SMALL, "--out", str(tmp_path / "one")))
    three = started(3, *words(made, *SMALL, "--out", str(tmp_path / "three")))
    assert one.returncode == three.returncode == 0, three.stderr
    assert three.stdout.count("\naccuracy, %\n") == three.stdout.count("saved:") == 1
    assert "processes: 3 on cpu, each with batches of all tasks" in three.stdout
    assert "processes:" not in one.stdout
    assert_close(tmp_path / "three", tmp_path / "one")
    runs = [read_run(tmp_path / name / "featcal") for name in ("one", "three")]
    assert runs[0].tasks == runs[1].tasks == [*TASKS]  # scored by different processes
    assert runs[0].accuracy == runs[1].accuracy and len(runs[0].accuracy) == 3
    cost = runs[1].row("featcal_plus").cost
    assert cost["processes"] == 3 and cost["exchanged_bytes"] > 0
    again = started(3, *words(made, *SMALL, "--out", str(tmp_path / "three"), "--resume"))
    assert again.returncode == 0 and again.stdout.count("is complete") == 1, again.stderr


def test_experts_write_answers_in_all_processes(made: Path, tmp_path: Path) -> None:
    for task in TASKS:
        rows = (made / f"{task}.jsonl").read_text().splitlines()
        write_rows(tmp_path / f"{task}.jsonl", [{"prompt": json.loads(r)["prompt"]} for r in rows])
    data = [word for t in TASKS for word in ("--data", f"{t}={tmp_path / t}.jsonl")]
    experts = [word for t in TASKS for word in ("--expert", f"{t}={made / t}")]
    models = ["calibrate", str(made / "merged"), "--base", str(made / "base"), *experts]
    for processes in (1, 3):
        more = [*FEW, *SMALL, "--no-eval", "--out", str(tmp_path / f"out{processes}")]
        done = started(processes, *models, *data, *more)
        assert done.returncode == 0, done.stderr
        assert "so its expert generates them" in done.stdout
    assert_close(tmp_path / "out3", tmp_path / "out1")


def test_a_plan_names_the_processes(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = started(2, *words(made, "--out", str(out), "--plan"))
    assert plan.returncode == 0 and not out.exists(), plan.stderr
    assert plan.stdout.count("processes: 2 on cpu, each with all samples of some tasks") == 1


@pytest.mark.parametrize(("more", "message"), [
    (("--sett", "batch_size=2"), "error: no option --sett"),
    (("--set", "balance=-1"), "featcal: error: --set balance must be"),
    (("--eval", "one=nothing.jsonl"), "featcal: error: --eval one=nothing.jsonl"),
    (("--set", "samples_per_task=1"), "featcal: error: only 2 of 3 processes would get a batch "
     "of samples. Start at most 2 (torchrun --nproc-per-node), or divide the samples into smaller "
     "batches: --set batch_size"),
])  # fmt: skip
def test_a_mistake_gives_one_message(made: Path, tmp_path: Path, more, message: str) -> None:
    done = started(3, *words(made, "--out", str(tmp_path / "out"), *more))
    assert done.returncode != 0
    assert done.stderr.count("error: ") == done.stderr.count(message) == 1, done.stderr


def test_one_process_merges_alone(made: Path, tmp_path: Path) -> None:
    done = started(2, *merging(made, "--out", str(tmp_path / "out")))
    assert done.returncode == 0 and done.stdout.count("saved:") == 1, done.stderr
    assert "processes:" not in done.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_encoders_are_calibrated_together(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", minversion="6.2", reason="extra `encoders`")
    pytest.importorskip("mergekit", reason="extra `encoders`")
    import sentence_models as tiny
    import test_encoders as encoders

    (tmp_path / "bert").mkdir()
    tiny.write_folders(tmp_path, tiny.sentence_model(tiny.backbone(tmp_path / "bert")))
    for processes in (1, 3):
        more = ("--out", str(tmp_path / f"out{processes}"), "--set", "batch_size=8")
        done = started(processes, *encoders.words(tmp_path, *more))
        assert done.returncode == 0 and done.stdout.count("saved:") == 1, done.stderr
    assert_close(tmp_path / "out3", tmp_path / "out1")
