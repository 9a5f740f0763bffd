"""`featcal calibrate` that fails midway or is killed has one sentence for it, and loses nothing."""

import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killing import finished_blocks
from made_folders import PAPER, ROWS, words, write_models, write_rows
from process_group import in_forks
from reports import Done, error_of, featcal
from tiny_models import model_of, scatter
from tiny_texts import TASKS, WORDS, sentences, word_tokenizer

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.files.json_files import read_lines
from fusion_bench_featcal.run import CheckpointFolder

Fault = Callable[[Path], Any]


def largest_file(size: int) -> None:
    """Let the system refuse files above some size, as a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def size_of(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


def ctrl_c(_: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)


def ended(arguments: list[str], folder: Path, fault: Fault) -> Done:
    """Exit code and errors of a command in a fork that meets a fault after its first block."""

    def work(_: int) -> Done:
        write = CheckpointFolder.write

        def written(self: CheckpointFolder, block: str, *rest: Any) -> Any:
            tensors = write(self, block, *rest)
            fault(folder)
            CheckpointFolder.write = write  # type: ignore[method-assign]
            return tensors

        CheckpointFolder.write = written  # type: ignore[method-assign]
        done = featcal(*arguments)
        largest_file(resource.RLIM_INFINITY)
        return done

    (result,) = in_forks(1, work, seconds=600.0)
    return result


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """Folders of models, and the model that an undisturbed command makes of them."""
    folder = tmp_path_factory.mktemp("whole")
    for task in TASKS:
        write_rows(folder / f"{task}.jsonl", sentences(task, ROWS))
    options: Any = {"vocab_size": len(WORDS), "intermediate_size": 4096}
    write_models(folder, scatter(model_of(**options), 0, 0.05), word_tokenizer())
    assert main(command(folder)) == 0
    content = (folder / "out" / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "out")
    return folder, content


def command(folder: Path) -> list[str]:
    return words(folder, "--no-eval", "--set", "modules=[q_proj]")


FAULTS: dict[str, tuple[Fault, int, str]] = {
    "no room for a block": (lambda _: largest_file(1024), 1,
        r"cannot write .*block-0001\.safetensors: .*needs .*B are free.*--out"),
    "no room for the model": (lambda folder: largest_file(size_of(folder / "merged") - 1), 2,
        r"the model cannot be saved to --out .*/out: .*File too large.* It needs .*iB are free.*"
        r"--resume: .*/out\.blocks"),
    "Ctrl-C": (ctrl_c, 1, r"interrupted. If .*/out\.blocks exists, --resume continues"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_sentence_and_loses_nothing(name: str, whole: Any, tmp_path: Path):
    fault, blocks, message = FAULTS[name]
    source, expected = whole
    folder = tmp_path / "models"
    shutil.copytree(source, folder)
    done = ended(command(folder), folder, fault)
    assert done.code == (130 if fault is ctrl_c else 2)
    assert re.search(message, done.err) and len(done.err.splitlines()) == 1, done.err
    files = {path.name for path in folder.iterdir()}
    assert files == {path.name for path in source.iterdir()} | {"out.blocks"}
    assert finished_blocks(folder / "out.blocks") == blocks
    assert main([*command(folder), "--resume"]) == 0
    assert (folder / "out" / "model.safetensors").read_bytes() == expected
    log = read_lines(folder / "out" / "featcal" / "calibration_log.jsonl")
    assert [record["blocks"] for record in log if record["kind"] == "resumed"] == [blocks]


def test_a_run_that_was_killed_after_saving_ends_well(folder: Path):
    run, out = words(folder, *PAPER), folder / "out"
    assert main(run) == 0
    Path(f"{out}.blocks").mkdir()  # the process was killed before it removed the blocks
    saved = (out / "model.safetensors").read_bytes()
    message = error_of(*run, "--set", "seed=1", "--resume")  # the model is of another command
    assert f"--out {out} exists and is not empty" in message
    assert str(out) in featcal(*run).out
    assert not Path(f"{out}.blocks").exists()
    assert (out / "model.safetensors").read_bytes() == saved
    assert main(run) == 2  # another run needs another folder
