"""Finished cells are not run again, unless a change or a damage has hit them."""

import importlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison_parts import MERGERS, Scale, comparison, finished_cells, method, model_pool
from fusion_bench import BaseModelPool
from omegaconf import OmegaConf

MERGER = "task_arithmetic"
DOUBLE, LOCAL = f"{MERGER}--double", f"{MERGER}--my_local"
OVER_MERGER = {f"{MERGER}--none", DOUBLE, LOCAL}
ALL = {"base", "experts"} | OVER_MERGER
CODE = "from comparison_parts import Scale\n\n\nclass Local(Scale):\n    x = 1\n"
FILE, SOURCE, BEFORE = Path("model.bin"), Path("local_method.py"), Path("accuracies")
RESULTS = Path("results")


class Command:
    """A comparison in the current folder, on models that a config names."""

    def __init__(self) -> None:
        local = {"_target_": "local_method.Local"}
        self.methods: Any = {"double": method(Scale), "my:local": local}
        self.mergers = {MERGER: dict(MERGERS[MERGER])}
        linear = {"_target_": "comparison_parts.linear", "file": str(FILE), "cache_dir": "cache"}
        names = ("_pretrained_", "left", "right")
        self.models: Any = {name: linear | {"seed": seed} for seed, name in enumerate(names)}
        self.tests: Any = {"left": [{"value": 1}, {"value": 2}]}
        self.train = {"left": {"_target_": "comparison_parts.Numbers", "values": [1, 2]}}
        self.seed = 42
        self.accuracies = ""

    def run(self) -> set[str]:
        """Run it without reports. Return titles of the cells whose results were written."""
        before = finished_cells(RESULTS)
        sys.modules.pop("local_method", None)
        importlib.invalidate_caches()
        algorithm = comparison(
            Path(), upstream_mergers=self.mergers, post_merging_methods=self.methods, seed=self.seed
        )
        algorithm._program.taskpool._test_datasets = self.tests
        algorithm.report = self._keep
        models: Any = OmegaConf.create(self.models)
        algorithm.run(BaseModelPool(models, train_datasets=OmegaConf.create(self.train)))
        written = finished_cells(RESULTS).items() - before.items()
        return {name.rpartition("-")[0] for name, _ in written}

    def _keep(self, _: Any, runs: Any, *__: Any) -> None:
        self.accuracies = repr({c: result.accuracy for c, result in runs[0].results.items()})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend("")
        Path("cache").mkdir()
        FILE.write_bytes(b"weights")
        SOURCE.write_text(CODE)
        command = Command()
        assert command.run() == ALL
        BEFORE.write_text(command.accuracies)
    return folder


@pytest.fixture
def command(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command beside a copy of its finished results."""
    monkeypatch.chdir(shutil.copytree(finished, tmp_path / "copy"))
    monkeypatch.syspath_prepend("")
    return Command()


def other_bytes(_: Command) -> None:
    """Change a model file, but neither its size nor its time."""
    times = FILE.stat().st_atime_ns, FILE.stat().st_mtime_ns
    FILE.write_bytes(b"weightz")
    os.utime(FILE, ns=times)


def other_code(_: Command) -> None:
    SOURCE.write_text(CODE.replace("1", "2"))


def nothing(command: Command) -> None:
    """Change the order of keys, and a file of a cache."""
    command.mergers[MERGER] = dict(reversed(command.mergers[MERGER].items()))
    Path("cache", "file").touch()


CHANGES: dict[str, tuple[Callable[[Command], Any], set[str]]] = {
    "nothing": (nothing, set()),
    "a new method": (lambda c: c.methods.update(more=method(Scale)), {f"{MERGER}--more"}),
    "a method's setting": (lambda c: c.methods.update(double=method(Scale, factor=4)), {DOUBLE}),
    "a merger's setting": (lambda c: c.mergers[MERGER].update(scaling_factor=0.4), OVER_MERGER),
    "the seed": (lambda c: setattr(c, "seed", 7), OVER_MERGER),
    "a model's config": (lambda c: c.models["left"].update(seed=9), ALL),
    "a model's file": (other_bytes, ALL),
    "code outside the package": (other_code, {LOCAL}),
    "training data": (lambda c: c.train["left"].update(values=[1, 3]), {DOUBLE, LOCAL}),
    "test items": (lambda c: c.tests["left"][1].update(value=3), ALL),
}


@pytest.mark.parametrize("name", CHANGES)
def test_cells_run_again_that_depend_on_a_change(name: str, command: Command) -> None:
    change, again = CHANGES[name]
    change(command)
    assert command.run() == again


def test_weights_in_memory_count(tmp_path: Path) -> None:
    def evaluations() -> int:
        algorithm = comparison(tmp_path, upstreams=[MERGER])
        algorithm.report = lambda *_: None
        algorithm.run(pool)
        return algorithm._program.taskpool.evaluated

    pool: Any = model_pool()
    assert (evaluations(), evaluations()) == (4, 0)
    torch.nn.init.zeros_(pool._models["left"][0].bias)
    assert evaluations() == 4


# ---- results that are damaged

RESULT, ITEMS = "result.json", "items.npz"
WEIGHTS, COST = (f"upstreams/{MERGER}-*/{name}" for name in ("model.safetensors", "cost.json"))


def file_of(pattern: str) -> Path:
    (file,) = RESULTS.glob(pattern)
    return file


def test_no_flipped_bit_goes_unnoticed(command: Command, caplog: pytest.LogCaptureFixture) -> None:
    """Flips in a file of each cell, and in the merged model, which cells over the merger need."""

    def flip(file: Path, number: int) -> None:
        content = bytearray(file.read_bytes())
        content[number * (len(content) - 3) // 8] ^= 1 << number % 8
        file.write_bytes(content)

    for number in (0, 3, 6):
        for cell, title in enumerate(sorted(ALL)):
            flip(file_of(f"cells/{title}-*/{(RESULT, ITEMS)[(number + cell) % 2]}"), number)
        flip(file_of((WEIGHTS, COST)[number % 2]), number)
        caplog.clear()
        assert command.run() == ALL and command.accuracies == BEFORE.read_text()
        assert caplog.text.count("is damaged and made again") == len(ALL) + 1
