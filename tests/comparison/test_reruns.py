"""Finished cells are not run again, unless a change or a damage has hit them."""

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


def run(
    *, scale: float = 0.3, factor: float = 2.0, left: int = 1, more: Any = None, **choices: Any
):
    """Compare models that a config names. Return titles of the cells whose files were written."""
    before, linear = inodes(), {"_target_": "comparison_parts.linear"}
    seeds = {"_pretrained_": 0, "left": left, "right": 2}
    models: Any = OmegaConf.create({name: linear | {"seed": n} for name, n in seeds.items()})
    choices["upstream_mergers"] = {MERGER: ARITHMETIC | {"scaling_factor": scale}}
    choices["post_merging_methods"] = {"double": method(Scale, factor=factor), **(more or {})}
    comparison(Path(), **choices).run(BaseModelPool(models))
    return {name.rpartition("-")[0] for name, _ in inodes().items() - before.items()}


def inodes() -> dict[str, int]:
    """Finished cells, and the inodes of their files, which are new in each writing."""
    files = RESULTS.glob("*-*/lines.csv")
    return {file.parent.name: file.stat().st_ino for file in files}


@pytest.fixture(autouse=True)
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the command in the current folder."""
    monkeypatch.chdir(tmp_path)
    assert run() == ALL


CHANGES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "nothing": ({}, set()),
    "settings of a method": ({"factor": 3.0}, {CELL}),
    "settings of a merger": ({"scale": 0.4}, {MERGER, CELL}),
    "the seed": ({"seed": 1}, {MERGER, CELL}),
    "a model of the pool": ({"left": 7}, ALL),
    "the tasks": ({"tasks": 1}, ALL),
    "one more method": ({"more": {"half": method(Scale)}}, {f"{MERGER}+half"}),
}


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("change", CHANGES)
def test_cells_run_again_that_depend_on_a_change(change: str) -> None:
    changes, expected = CHANGES[change]
    assert run(**changes) == expected
    assert run(**changes) == set()


def test_a_damaged_cell_is_named_and_made_again(caplog: Any) -> None:
    (folder,) = RESULTS.glob(f"{CELL}-*")
    for name, content in (("run.json", b""), ("items.npz", b"text"), ("lines.csv", b"")):
        (folder / name).write_bytes(content)
        assert run() == {CELL}
        assert f"{folder.name}/{name}" in caplog.text and "It runs again" in caplog.text
        caplog.clear()


def test_a_failed_cell_runs_again_and_the_others_do_not(tmp_path: Path) -> None:
    failing = {"failing": method(Failing, until=str(tmp_path / "fixed"))}
    for _ in range(2):
        with pytest.raises(CalibrationError, match=r"1 of 5 cells failed.*the flux ran dry"):
            run(more=failing)
    (tmp_path / "fixed").touch()
    assert run(more=failing) == {f"{MERGER}+failing"}
