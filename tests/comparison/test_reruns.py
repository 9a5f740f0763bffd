"""Finished cells are not run again, unless a change or a damage has hit them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from comparison_parts import MERGERS, Failing, Forgetful, Scale, comparison, finished_cells, method
from fusion_bench import BaseModelPool
from omegaconf import OmegaConf

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.results import join_folders, read_run, summary

MERGER = "task_arithmetic"
RESULTS = Path("results")
ALL = {"base", "experts", MERGER, f"{MERGER}+double"}


class Command:
    """A comparison in the current folder, on models that a config names."""

    def __init__(self) -> None:
        self.choices: dict[str, Any] = {
            "upstream_mergers": {MERGER: dict(MERGERS[MERGER])},
            "post_merging_methods": {"double": method(Scale)},
        }
        names = ("_pretrained_", "left", "right")
        linear = {"_target_": "comparison_parts.linear"}
        self.models: Any = {name: linear | {"seed": seed} for seed, name in enumerate(names)}

    def run(self) -> set[str]:
        """Run it. Return titles of the cells whose files were written."""
        before = finished_cells(RESULTS)
        algorithm = comparison(Path(), **self.choices)
        models: Any = OmegaConf.create(self.models)
        algorithm.run(BaseModelPool(models))
        written = finished_cells(RESULTS).items() - before.items()
        return {name.rpartition("-")[0] for name, _ in written}


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command beside its finished results."""
    monkeypatch.chdir(tmp_path)
    command = Command()
    assert command.run() == ALL
    return command


def test_a_repeated_command_runs_nothing(command: Command) -> None:
    assert command.run() == set()


CHANGES: dict[str, tuple[Callable[[Command], Any], set[str]]] = {
    "settings of a method": (
        lambda c: c.choices["post_merging_methods"]["double"].update(factor=3.0),
        {f"{MERGER}+double"},
    ),
    "settings of a merger": (
        lambda c: c.choices["upstream_mergers"][MERGER].update(scaling_factor=0.4),
        {MERGER, f"{MERGER}+double"},
    ),
    "the seed": (lambda c: c.choices.update(seed=1), {MERGER, f"{MERGER}+double"}),
    "a model of the pool": (lambda c: c.models["left"].update(seed=7), ALL),
    "the tasks": (lambda c: c.choices.update(tasks=1), ALL),
    "one more method": (
        lambda c: c.choices["post_merging_methods"].update(half=method(Scale, factor=0.5)),
        {f"{MERGER}+half"},
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_cells_run_again_that_depend_on_a_change(change: str, command: Command) -> None:
    apply, expected = CHANGES[change]
    apply(command)
    assert command.run() == expected
    assert command.run() == set()


def test_the_last_command_counts_after_a_change_is_taken_back(command: Command) -> None:
    command.choices["upstream_mergers"][MERGER].update(iteration=1)  # a key that changes nothing
    command.run()
    del command.choices["upstream_mergers"][MERGER]["iteration"]
    command.run()
    newest = max(RESULTS.glob(f"{MERGER}+double-*/run.json"), key=lambda f: f.stat().st_mtime_ns)
    assert "iteration" not in read_run(newest.parent).rows[0].conditions


def test_a_method_that_returns_nothing_is_named(command: Command) -> None:
    command.choices["post_merging_methods"]["forgetful"] = method(Forgetful)
    with pytest.raises(CalibrationError, match=r"Forgetful\.post_merge returned no model"):
        command.run()


def test_settings_of_mergers_are_points_of_their_rows(command: Command) -> None:
    command.choices["upstream_mergers"][MERGER].update(scaling_factor=1.5)
    command.run()
    results = join_folders([RESULTS])
    accuracies = {row.conditions["scaling_factor"]: row.accuracy["average"]
                  for row in results.rows if row.name == "double"}  # fmt: skip
    assert accuracies[0.3] != accuracies[1.5]
    rows = [row for row in summary(results).to_dict("records") if row["row"] == "double"]
    points = {row["scaling_factor"]: row["accuracy.average"] for row in rows}
    assert points == pytest.approx(accuracies)


def test_cells_that_differ_in_their_pools_are_not_joined_silently(
    command: Command, caplog: Any
) -> None:
    command.models["left"].update(seed=7)
    command.run()
    results = join_folders([RESULTS])
    assert "left out: newer rows with the same settings" in caplog.text and not results.labels
    assert len(results.rows) == len(ALL)


def test_a_damaged_cell_is_named_and_made_again(command: Command, caplog: Any) -> None:
    (folder,) = RESULTS.glob(f"{MERGER}+double-*")
    for name, content in (("run.json", b""), ("items.npz", b"text"), ("lines.csv", b"")):
        (folder / name).write_bytes(content)
        assert command.run() == {f"{MERGER}+double"}
        assert f"{folder.name}/{name}" in caplog.text and "It runs again" in caplog.text
        caplog.clear()
    shutil.rmtree(folder)
    folder.mkdir()  # as if its files were removed
    assert command.run() == {f"{MERGER}+double"}
    assert not list(RESULTS.glob(".*"))


def test_a_failed_cell_runs_again_and_the_others_do_not(command: Command, tmp_path: Path) -> None:
    until = tmp_path / "fixed"
    command.choices["post_merging_methods"]["failing"] = method(Failing, until=str(until))
    for _ in range(2):
        with pytest.raises(CalibrationError, match=r"1 of 5 cells failed.*the flux ran dry"):
            command.run()
    until.touch()
    assert command.run() == {f"{MERGER}+failing"}
