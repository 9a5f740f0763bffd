"""Situations for attacks: pools on disk that Python and the command share, and runs of both."""

import atexit
import copy
import os
import pickle
import re
import runpy
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import attacks.paths  # noqa: F401

# isort: split
import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import fusion_bench.scripts.cli  # noqa: F401 - loaded once, for all commands
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tiny_images import SHAPES, write_class_folders

from attacks.files import tiny_clips
from attacks.judging import WIDTH, RawTraceback, ShownRefusal, WrongResult, expect
from fusion_bench_featcal.algorithm import FeatCalAlgorithm

TASKS = ("one", "two")
ARITHMETIC = {"_target_": "fusion_bench.method.TaskArithmeticAlgorithm", "scaling_factor": 0.3}
AVERAGE = {"_target_": "fusion_bench.method.SimpleAverageAlgorithm"}
FEW = "method.samples_per_task=4"
_PATIENCE = 240  # seconds for one command on a busy machine
_ERROR_LINE = re.compile(r"(featcal: )?error:")
_LOG_LINE = re.compile(r"^\[\d\d|^ +(INFO|WARNING|DEBUG) |^\S+ INFO")


def calibrated(pool: Any, **settings: Any) -> Any:
    """The model that `method=featcal` makes of a pool, without a task pool."""
    settings = {"base_method": ARITHMETIC, "samples_per_task": 4, "decode_workers": 0} | settings
    return FeatCalAlgorithm(**settings).run(pool)


@dataclass
class World:
    """A pool of tiny CLIPs in a folder, with pictures, as configs that a case may change.

    Attributes:
        folder: Everything lies in it.
        modelpool: Config of the model pool, with `default_taskpool`.
    """

    folder: Path
    modelpool: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Write models and pictures."""
        names = ("_pretrained_", *TASKS)
        for name, source in zip(names, tiny_clips().values(), strict=False):
            shutil.copytree(source, self.model(name))
        loader = "fusion_bench_featcal.tasks.load_images"
        for number, task in enumerate(TASKS):
            for split in ("train", "test"):
                write_class_folders(self.data(task, split), seed=10 * number + len(split))
        base = str(self.model("_pretrained_"))
        self.modelpool = {
            "_target_": "fusion_bench.modelpool.CLIPVisionModelPool",
            "_recursive_": False,
            "models": {name: str(self.model(name)) for name in names},
            "processor": {
                "_target_": "transformers.CLIPProcessor.from_pretrained",
                "pretrained_model_name_or_path": base,
            },
            "train_datasets": {
                task: {"_target_": loader, "path": str(self.data(task, "train"))} for task in TASKS
            },
            "default_taskpool": {
                "_target_": "fusion_bench_featcal.tasks.ClipTaskPool",
                "_recursive_": False,
                "base_model": base,
                "tasks": {
                    task: {"data": str(self.data(task, "test")), "classnames": list(SHAPES)}
                    for task in TASKS
                },
            },
        }

    def model(self, name: str) -> Path:
        """Folder of a model."""
        return self.folder / "models" / name.strip("_")

    def weights(self, name: str) -> Path:
        """Weights of a model."""
        return self.model(name) / "model.safetensors"

    def data(self, task: str, split: str) -> Path:
        """Folder of a task's pictures."""
        return self.folder / "data" / task / split

    def pool(self) -> Any:
        """The model pool."""
        config = copy.deepcopy(self.modelpool)
        del config["default_taskpool"]
        return instantiate(OmegaConf.create(config))

    def run(self, **settings: Any) -> Any:
        """The model that `method=featcal` makes, without a task pool."""
        return calibrated(self.pool(), **settings)

    def words(self, *words: str) -> tuple[str, ...]:
        """Words of `fusion_bench` for this pool, which is written."""
        place = self.folder / "settings" / "modelpool"
        place.mkdir(parents=True, exist_ok=True)
        (place / "tiny.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(self.modelpool)))
        first = () if any(word.startswith("method=") for word in words) else ("method=featcal",)
        few = () if any(word.startswith("method=") for word in words) else (FEW,)
        words = (*first, "modelpool=tiny", *few, *words)
        return ("--config-dir", str(self.folder / "settings"), *words)

    def command(self, *words: str, **options: Any) -> "Screen":
        """Run `fusion_bench` on this pool; see `run_command`."""
        return run_command(self.folder, *self.words(*words), **options)


@dataclass(frozen=True)
class Screen:
    """Exit code of a command and all that it printed, in order."""

    code: int
    text: str

    @property
    def lines(self) -> list[str]:
        """The lines as a terminal shows them."""
        return [line.rsplit("\r", 1)[-1] for line in _plain(self.text).splitlines()]

    def succeeded(self) -> "Screen":
        """Itself.

        Raises:
            RawTraceback: If a traceback was printed.
            ShownRefusal: If the command ended with code 1, with its last block.
            WrongResult: If it ended with another code.
        """
        if self.code == 0:
            return self
        raised = [line for line in self.lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
        if "Traceback (most recent call last)" in self.text:
            raise RawTraceback(f"{len(self.lines)} lines, {raised[-1] if raised else ''}")
        if self.code != 1:
            raise WrongResult(f"exit code {self.code}: {self.block()[:300]}")
        raise ShownRefusal(self.block())

    def block(self) -> str:
        """The last lines of the screen: from `error:` on, else after a blank line or the log."""
        found: list[str] = []
        lines = "\n".join(self.lines).rstrip().splitlines()
        errors = [number for number, line in enumerate(lines) if _ERROR_LINE.match(line)]
        if errors:
            return "\n".join(lines[errors[-1] :])
        for line in reversed(lines):
            if not line.strip() or (_LOG_LINE.search(line) and "ERROR" not in line):
                break
            found.append(line)
        return "\n".join(reversed(found))


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def run_command(
    folder: Path,
    *words: str,
    prepare: Callable[[], object] | None = None,
    during: Callable[[int, Path], object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Screen:
    """Run `fusion_bench` in a process that has it loaded already, 80 columns wide.

    Args:
        folder: Where it starts.
        *words: The command's words.
        prepare: Called in that process before the command.
        during: Called meanwhile in this one, with the process' id and the file of its screen.
        environment: More environment variables.
    """
    screen = folder / f"screen-{time.monotonic_ns()}.txt"
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.environ.update({"COLUMNS": str(WIDTH), **(environment or {})})
        _exit_after(lambda: _command(words, prepare), screen)
    if during is not None:
        during(child, screen)
    return Screen(_ended(child), screen.read_text(errors="replace"))


def _command(words: tuple[str, ...], prepare: Callable[[], object] | None) -> None:
    if prepare is not None:
        prepare()
    sys.argv = ["fusion_bench", *words]
    del sys.modules["fusion_bench.scripts.cli"]  # it runs anew
    runpy.run_module("fusion_bench.scripts.cli", run_name="__main__")


def _exit_after(work: Callable[[], object], screen: Path) -> None:
    """End this process as the interpreter would: exception hook, exit handlers, code."""
    with screen.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # Those of a test runner lead elsewhere.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
    code = 0
    try:
        work()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _ended(child: int) -> int:
    """Exit code of a process, as a shell has it; one that does not end is killed."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise RawTraceback(f"no end after {_PATIENCE} s")


def forked(work: Callable[[], Any]) -> Any:
    """The value of a function that runs in a process of its own, whose state is lost with it.

    Raises:
        Exception: What the function raised.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            outcome: tuple[bool, Any] = (True, work())
        except Exception as error:
            traceback.print_exc(file=sys.__stderr__) if os.environ.get("ATTACK_DEBUG") else None
            outcome = (False, error)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(outcome))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    succeeded, value = pickle.loads(data)
    if not succeeded:
        raise value
    return value


def expect_finite(model: Any) -> None:
    """Raise `WrongResult` unless every value of a model is finite."""
    for name, tensor in model.state_dict().items():
        expect(torch.isfinite(tensor).all(), f"{name} is not finite")
