"""Several processes that lose one of them go on where they were, to the bit-identical model."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calibrations import assert_identical
from process_group import in_processes
from test_processes import assert_one_model, records, run
from tiny_models import Suite, clip_suite, t5_suite

from fusion_bench_featcal import CalibrationError, CalibrationResult
from fusion_bench_featcal.checkpoints.store import Checkpoints
from fusion_bench_featcal.engine.processes import LostProcessError, OneProcess, Processes


def together(suite: Suite, folder: Path, size: int, *, resume: bool = False) -> list[Any]:
    def work(processes: Processes) -> CalibrationResult:
        return run(suite, processes, checkpoint_dir=str(folder), resume=resume)

    return in_processes(size, work)


def killed(suite: Suite, folder: Path, size: int, *, rank: int, after: int) -> list[Any]:
    """Run, and kill one process when it has gone past so many blocks."""

    def work(processes: Processes) -> CalibrationResult:
        keep, kept = Checkpoints.keep, []

        def die(self: Checkpoints, block: str, *rest: Any) -> None:
            if len(kept) == after and processes.rank == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            keep(self, block, *rest)
            kept.append(block)

        setattr(Checkpoints, "keep", die)  # noqa: B010 - a method is not for assigning to
        return run(suite, processes, checkpoint_dir=str(folder))

    return in_processes(size, work)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "size", "rank", "after"),
    [(clip_suite, 4, 0, 1), (t5_suite, 2, 1, 3)],
)
def test_resumed_run_ends_with_the_same_bits(
    make: Callable[[], Suite], size: int, rank: int, after: int, tmp_path: Path
):
    suite = make()
    wanted = together(suite, tmp_path / "whole", size)
    assert_one_model(wanted)
    lost = killed(suite, tmp_path / "lost", size, rank=rank, after=after)
    assert lost.pop(rank) == -signal.SIGKILL
    assert all(isinstance(error, LostProcessError) for error in lost)
    kept = len(list((tmp_path / "lost").glob("block-*.json")))
    assert kept == after
    found = together(suite, tmp_path / "lost", size, resume=True)
    assert_one_model(found)
    assert_identical(found[0].model, wanted[0].model)
    (resumed,) = found[0].log.of_kind("resumed")
    assert resumed["blocks"] == kept
    found[0].log.records.pop()
    assert records(found[0]) == records(wanted[0])


def test_checkpoints_hold_what_those_of_one_process_hold(tmp_path: Path):
    suite = clip_suite()
    run(suite, OneProcess(), checkpoint_dir=str(tmp_path / "one"))
    together(suite, tmp_path / "five", 5)

    def kept(folder: str, name: str) -> dict[str, Any]:
        return json.loads((tmp_path / folder / name).read_text())

    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert sorted(path.name for path in (tmp_path / "five").iterdir()) == names
    one, several = kept("one", "run.json"), kept("five", "run.json")
    assert (one.pop("processes"), several.pop("processes")) == (1, 5)
    del one["checksum"], several["checksum"]
    assert several == one
    assert list(several["samples"]) == list(one["samples"])
    for name in ("block-0000.json", "block-0001.json"):
        one, several = kept("one", name)["reads"], kept("five", name)["reads"]
        assert several == one
        assert list(several) == list(one)


def test_another_number_of_processes_is_refused(tmp_path: Path):
    suite = clip_suite()
    together(suite, tmp_path, 2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    message = r"number of processes \(fabric.devices x fabric.num_nodes\) \(2 then, {} now\)"
    with pytest.raises(CalibrationError, match=message.format(1)):
        run(suite, OneProcess(), checkpoint_dir=str(tmp_path), resume=True)
    for error in together(suite, tmp_path, 3, resume=True):
        with pytest.raises(CalibrationError, match=message.format(3)):
            raise error
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_folder_that_processes_do_not_share_is_refused(tmp_path: Path):
    suite = clip_suite()
    together(suite, tmp_path / "0", 2)

    def own_folder(given: dict[str, Any], processes: Processes) -> None:
        folder = tmp_path / str(processes.rank)
        given["settings"] = given["settings"].replace(checkpoint_dir=folder, resume=True)

    for error in in_processes(2, lambda processes: run(suite, processes, own_folder)):
        assert isinstance(error, CalibrationError)
        assert "sees other checkpoints in method.checkpoint_dir" in str(error)


def test_changed_expert_and_samples_of_another_process_end_all(tmp_path: Path):
    suite = clip_suite()
    together(suite, tmp_path, 2)

    def other_expert(given: dict[str, Any], _: Processes) -> None:
        given["experts"]["task_1"] = clip_suite(seed=3).experts["task_1"]

    def other_samples(given: dict[str, Any], _: Processes) -> None:
        given["batches"]["task_1"] = clip_suite(seed=3).inputs["task_1"]

    for change, message in (
        (other_expert, "weights of task_1"),
        (other_samples, r"calibration samples of the tasks \['task_1'\]"),
    ):
        for error in in_processes(
            2,
            lambda processes, change=change: run(
                suite, processes, change, checkpoint_dir=str(tmp_path), resume=True
            ),
        ):
            with pytest.raises(CalibrationError, match=message):
                raise error


def test_checkpoint_that_cannot_be_written_ends_all(tmp_path: Path):
    suite = clip_suite()

    def work(processes: Processes) -> CalibrationResult:
        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        os.replace = fail  # in this process only
        return run(suite, processes, checkpoint_dir=str(tmp_path))

    for error in in_processes(2, work):
        with pytest.raises(CalibrationError, match="No space left on device"):
            raise error
