"""A `featcal calibrate` that fails midway says why in one sentence, and loses nothing."""

import atexit
import io
import os
import re
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import finished_blocks
from made_folders import ROWS, write_models, write_rows
from process_group import in_forks
from safetensors.torch import load_file, save_file
from test_calibrate_command import words
from tiny_models import decoder_model, scatter
from tiny_texts import TASKS, WORDS, sentences, word_tokenizer

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.output.folder import OutputFolder

Fault = Callable[[Path], Any]
BALLAST: list[torch.Tensor] = []


def disk_full(_: Path) -> None:
    """Let the system refuse files above some size: shards of blocks, not the manifest."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))


def memory_short(_: Path) -> None:
    """Take all memory that the system gives, in pieces that are smaller than a tensor."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**22, resource.RLIM_INFINITY))
    for size in (2**power for power in range(26, 14, -1)):
        while True:
            try:
                BALLAST.append(torch.empty(size, dtype=torch.uint8))
            except RuntimeError:
                break


def gone(model: str) -> Fault:
    return lambda folder: (folder / model / "model.safetensors").unlink()


def cut_short(model: str) -> Fault:
    return lambda folder: os.truncate(folder / model / "model.safetensors", 3000)


def replaced(folder: Path) -> None:
    """Write other values, of the same names and shapes."""
    file = folder / "two" / "model.safetensors"
    save_file({name: t + 1 for name, t in load_file(file).items()}, file, {"format": "pt"})


def hanging(_: Path) -> None:
    """Let the next file that is read block in the system until Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    opened = Path.open

    def blocked(self: Path, *how: Any, **more: Any) -> Any:
        if self.parent.name == "one" and self.suffix == ".safetensors":
            self = self.with_suffix(".pipe")  # nobody writes to it
            os.mkfifo(self)
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return opened(self, *how, **more)

    Path.open = blocked  # type: ignore[method-assign]


def command(folder: Path) -> list[str]:
    return [*words(folder), "--no-eval", "--set", "modules=[q_proj]"]


def ended(arguments: list[str], folder: Path, fault: Fault) -> tuple[Any, str]:
    """Exit code and errors of a command in a process of its own that a fault meets midway."""

    def work(_: int) -> tuple[Any, str]:
        write, said = OutputFolder.write, io.StringIO()

        def written(self: OutputFolder, block: str, *rest: Any) -> Any:
            tensors = write(self, block, *rest)
            fault(folder)
            OutputFolder.write = write  # type: ignore[method-assign]
            return tensors

        OutputFolder.write = written  # type: ignore[method-assign]
        atexit.register = print  # a fork does not get there
        with redirect_stderr(said):
            try:
                code = main(arguments)
            except SystemExit as stop:
                code = stop.code
        BALLAST.clear()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return code, said.getvalue()

    (result,) = in_forks(1, work)
    return result


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> tuple[Path, bytes]:
    """Folders of models, and the model that an undisturbed command makes of them."""
    folder = tmp_path_factory.mktemp("whole")
    for task in TASKS:
        write_rows(folder / f"{task}.jsonl", sentences(task, ROWS))
    options: Any = {"vocab_size": len(WORDS), "intermediate_size": 4096}
    write_models(folder, scatter(decoder_model(**options), 0, 0.05), word_tokenizer())
    assert main(command(folder)) == 0
    content = (folder / "out" / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "out")
    return folder, content


FAULTS: dict[str, tuple[Fault, str]] = {
    "disk full": (
        disk_full,
        r"cannot write .*block-0001\.safetensors: .*needs .*B are free.*--out",
    ),
    "memory short": (memory_short, r"out of memory \(cpu\) at model\.layers\.1.*--set batch_size"),
    "expert gone": (gone("two"), r"expert 'two': .*two/model\.safetensors could be read"),
    "expert cut short": (cut_short("two"), r"expert 'two': .*two/model\.safetensors has changed"),
    "expert replaced": (replaced, r"expert 'two': .*two/model\.safetensors has changed"),
    "merged gone": (gone("merged"), r"merged model: .*merged/model\.safetensors could be read"),
    "merged cut short": (
        cut_short("merged"),
        r"merged/model\.safetensors has changed.* Check MERGED or --merge",
    ),
    "folder hangs": (hanging, r"ended before it was done: finished blocks .*--resume"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_sentence_and_loses_nothing(name: str, whole: Any, tmp_path: Path):
    fault, message = FAULTS[name]
    source, wanted = whole
    folder = tmp_path / "models"
    shutil.copytree(source, folder)
    arguments = command(folder)
    code, said = ended(arguments, folder, fault)
    assert code == (130 if fault is hanging else 2)
    assert re.search(message, said) and len(said.splitlines()) == 1, said
    assert not (folder / "out").exists() and finished_blocks(folder / "out.blocks") == 1
    shutil.copytree(source, folder, dirs_exist_ok=True)
    assert main([*arguments, "--resume"]) == 0
    assert (folder / "out" / "model.safetensors").read_bytes() == wanted
