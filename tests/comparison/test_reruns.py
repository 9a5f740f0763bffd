"""Finished cells are not run again, unless a change or a damage has hit them."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from comparison_parts import Failing, Scale, comparison, method
from fusion_bench import BaseModelPool
from omegaconf import OmegaConf
from tiny_pools import ARITHMETIC

from fusion_bench_featcal import CalibrationError

MERGER, RESULTS = "task_arithmetic", Path("results")
CELL = f"{MERGER}+double"
ALL = {"base", "experts", MERGER, CELL}


class Command:
    """A comparison in the current folder, on models that a config names."""

    def __init__(self) -> None:
        self.merger, self.methods = dict(ARITHMETIC), {"double": method(Scale)}
        self.choices: dict[str, Any] = {
            "upstream_mergers": {MERGER: self.merger}, "post_merging_methods": self.methods
        }  # fmt: skip
        names = ("_pretrained_", "left", "right")
        linear = {"_target_": "comparison_parts.linear"}
        self.models: Any = {name: linear | {"seed": seed} for seed, name in enumerate(names)}

    def run(self) -> set[str]:
        """Run it. Return titles of the cells whose files were written."""
        before = inodes()
        models: Any = OmegaConf.create(self.models)
        comparison(Path(), **self.choices).run(BaseModelPool(models))
        return {name.rpartition("-")[0] for name, _ in inodes().items() - before.items()}


def inodes() -> dict[str, int]:
    """Finished cells, and the inodes of their files, which are new in each writing."""
    files = RESULTS.glob("*-*/lines.csv")
    return {file.parent.name: file.stat().st_ino for file in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the command has run."""
    folder = tmp_path_factory.mktemp("finished")
    with contextlib.chdir(folder):
        assert Command().run() == ALL
    return folder


@pytest.fixture
def command(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command beside its finished results."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Command()


CHANGES: dict[str, tuple[Callable[[Command], Any], set[str]]] = {
    "nothing": (lambda c: None, set()),
    "settings of a method": (lambda c: c.methods["double"].update(factor=3.0), {CELL}),
    "settings of a merger": (lambda c: c.merger.update(scaling_factor=0.4), {MERGER, CELL}),
    "the seed": (lambda c: c.choices.update(seed=1), {MERGER, CELL}),
    "a model of the pool": (lambda c: c.models["left"].update(seed=7), ALL),
    "the tasks": (lambda c: c.choices.update(tasks=1), ALL),
    "one more method": (lambda c: c.methods.update(half=method(Scale)), {f"{MERGER}+half"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_cells_run_again_that_depend_on_a_change(change: str, command: Command) -> None:
    apply, expected = CHANGES[change]
    apply(command)
    assert command.run() == expected
    assert command.run() == set()


def test_a_damaged_cell_is_named_and_made_again(command: Command, caplog: Any) -> None:
    (folder,) = RESULTS.glob(f"{CELL}-*")
    for name, content in (("run.json", b""), ("items.npz", b"text"), ("lines.csv", b"")):
        (folder / name).write_bytes(content)
        assert command.run() == {CELL}
        assert f"{folder.name}/{name}" in caplog.text and "It runs again" in caplog.text
        caplog.clear()


def test_a_failed_cell_runs_again_and_the_others_do_not(command: Command, tmp_path: Path) -> None:
    command.methods["failing"] = method(Failing, until=str(tmp_path / "fixed"))
    for _ in range(2):
        with pytest.raises(CalibrationError, match=r"1 of 5 cells failed.*the flux ran dry"):
            command.run()
    (tmp_path / "fixed").touch()
    assert command.run() == {f"{MERGER}+failing"}
