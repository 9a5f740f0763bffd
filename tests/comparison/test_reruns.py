"""Finished cells are not run again, unless a change or a damage has hit them."""

from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from comparison_parts import Failing, Scale, comparison, linear, method
from fusion_bench import BaseModelPool
from omegaconf import OmegaConf
from safetensors.torch import save_file
from tiny_pools import ARITHMETIC

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.contents import digest_local
from fusion_bench_featcal.files import suite_paths
from fusion_bench_featcal.fusionbench.report import with_contents
from fusion_bench_featcal.results import read_run

MERGER, RESULTS = "task_arithmetic", Path("results")
CELL = f"{MERGER}+double"
ALL = {"base", "experts", MERGER, CELL}


def run(
    *,
    scale: float = 0.3,
    factor: float = 2.0,
    left: int = 1,
    folder: str | None = None,
    more: Any = None,
    **choices: Any,
):
    """Compare models that a config names. Return titles of the cells whose files were written."""
    before, target = inodes(), {"_target_": "comparison_parts.linear"}
    seeds = {"_pretrained_": 0, "left": left, "right": 2}
    models: Any = OmegaConf.create({name: target | {"seed": n} for name, n in seeds.items()})
    if folder is not None:
        models.left.folder = folder
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


def write_model(seed: int) -> None:
    """Write a model to the folder `expert`."""
    Path("expert").mkdir(exist_ok=True)
    Path("expert/config.json").write_text("{}")
    save_file(linear(seed).state_dict(), "expert/model.safetensors")


def conditions() -> set[object]:
    """Digests of models and data in all records."""
    rows = (row for file in RESULTS.glob("*-*/run.json") for row in read_run(file.parent).rows)
    return {row.conditions["inputs"] for row in rows}


def test_an_expert_that_was_trained_again_under_its_name_is_another_one() -> None:
    write_model(1)
    first = conditions()
    assert run(folder="expert") == ALL
    Path("expert/log.txt").write_text("no input")
    assert run(folder="expert") == set()
    second = conditions() - first
    write_model(7)
    assert run(folder="expert") == ALL
    assert len(second) == 1 and len(conditions()) == len(first) + 2
    write_model(1)
    assert run(folder="expert") == set()


def test_data_with_other_content_are_other_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in settings of a method. Names of suites stand for their content."""
    config = {"calibration_data": {"left": {"path": "left.jsonl"}}, "split": "left.jsonl"}
    config["more"] = ["text: ", "", ".", "/", "org/data", 3, None]
    Path("left.jsonl").write_text("{}")
    before = with_contents(config, digest_local)
    assert before == config | {"calibration_data": {"left": {"path": ["left.jsonl", ANY]}}}
    Path("left.jsonl").write_text("{ }")
    assert with_contents(config, digest_local) != before
    monkeypatch.setenv(suite_paths.WEIGHTS_VARIABLE, str(Path.cwd()))
    fetched = [str(Path("left.jsonl").absolute())]
    assert with_contents(fetched, digest_local) == fetched


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
        with pytest.raises(CalibrationError, match=r"1 of 5 runs failed.*the flux ran dry"):
            run(more=failing)
    (tmp_path / "fixed").touch()
    assert run(more=failing) == {f"{MERGER}+failing"}
