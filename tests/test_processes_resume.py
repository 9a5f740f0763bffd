"""Several processes that lose one of them go on where they were, to the bit-identical model."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calibrations import assert_identical
from test_processes import Change, assert_one_model, records, run, together
from tiny_models import Suite, clip_suite, t5_suite

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.checkpoints.store import Checkpoints
from fusion_bench_featcal.json_files import read_json
from fusion_bench_featcal.processes import LostProcessError, Processes


def kept(
    suite: Suite, folder: Path, size: int, change: Change | None = None, *, resume: bool = False
) -> list[Any]:
    return together(suite, size, change, checkpoint_dir=str(folder), resume=resume)


def killed(suite: Suite, folder: Path, size: int, *, rank: int, after: int) -> list[Any]:
    """Run, and kill one process when it has gone past so many blocks."""

    keep, done = Checkpoints.keep, []

    def dying(_: Suite, processes: Processes) -> None:
        def die(self: Checkpoints, block: str, *rest: Any) -> None:
            if len(done) == after and processes.rank == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            keep(self, block, *rest)
            done.append(block)

        setattr(Checkpoints, "keep", die)  # noqa: B010 - a method is not for assigning to

    return kept(suite, folder, size, dying)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "size", "rank", "after"),
    [(clip_suite, 4, 0, 1), (t5_suite, 2, 1, 3)],
)
def test_resumed_run_ends_with_the_same_bits(
    make: Callable[[], Suite], size: int, rank: int, after: int, tmp_path: Path
):
    suite = make()
    wanted = kept(suite, tmp_path / "whole", size)
    assert_one_model(wanted)
    lost = killed(suite, tmp_path / "lost", size, rank=rank, after=after)
    assert lost.pop(rank) == -signal.SIGKILL
    assert all(isinstance(error, LostProcessError) for error in lost)
    assert len(list((tmp_path / "lost").glob("block-*.json"))) == after
    found = kept(suite, tmp_path / "lost", size, resume=True)
    assert_one_model(found)
    assert_identical(found[0].model, wanted[0].model)
    (resumed,) = found[0].log.of_kind("resumed")
    assert resumed["blocks"] == after
    found[0].log.records.pop()
    assert records(found[0]) == records(wanted[0])


def test_checkpoints_hold_what_those_of_one_process_hold(tmp_path: Path):
    suite = clip_suite()
    run(suite, Processes(), checkpoint_dir=str(tmp_path / "one"))
    kept(suite, tmp_path / "five", 5)

    def read(folder: str, name: str) -> dict[str, Any]:
        return read_json(tmp_path / folder / name, sealed=True)

    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert sorted(path.name for path in (tmp_path / "five").iterdir()) == names
    one, several = read("one", "run.json"), read("five", "run.json")
    assert (one.pop("processes"), several.pop("processes")) == (1, 5)
    assert several == one
    assert list(several["samples"]) == list(one["samples"])
    for name in ("block-0000.json", "block-0001.json"):
        one, several = read("one", name)["reads"], read("five", name)["reads"]
        assert several == one
        assert list(several) == list(one)


def test_another_number_of_processes_is_refused(tmp_path: Path):
    suite = clip_suite()
    kept(suite, tmp_path, 2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    message = r"number of processes \(fabric.devices x fabric.num_nodes\) \(2 then, {} now\)"
    with pytest.raises(CalibrationError, match=message.format(1)):
        run(suite, Processes(), checkpoint_dir=str(tmp_path), resume=True)
    for error in kept(suite, tmp_path, 3, resume=True):
        with pytest.raises(CalibrationError, match=message.format(3)):
            raise error
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_folder_that_processes_do_not_share_is_refused(tmp_path: Path):
    suite = clip_suite()
    kept(suite, tmp_path / "0", 2)

    def own_folder(suite: Suite, processes: Processes) -> None:
        folder = tmp_path / str(processes.rank)
        run(suite, processes, checkpoint_dir=folder, resume=True)

    for error in together(suite, 2, own_folder):
        assert isinstance(error, CalibrationError)
        assert "sees other checkpoints in method.checkpoint_dir" in str(error)


def test_changed_expert_and_samples_of_another_process_end_all(tmp_path: Path):
    suite = clip_suite()
    kept(suite, tmp_path, 2)

    def other_expert(suite: Suite, _: Processes) -> None:
        suite.experts["task_1"] = clip_suite(seed=3).experts["task_1"]

    def other_samples(suite: Suite, _: Processes) -> None:
        suite.inputs["task_1"] = clip_suite(seed=3).inputs["task_1"]

    for change, message in (
        (other_expert, "weights of task_1"),
        (other_samples, r"calibration samples of the tasks \['task_1'\]"),
    ):
        for error in kept(suite, tmp_path, 2, change, resume=True):
            with pytest.raises(CalibrationError, match=message):
                raise error


def test_checkpoint_that_cannot_be_written_ends_all(tmp_path: Path):
    def full_disk(*_: Any) -> None:
        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        os.replace = fail  # in this process only

    for error in kept(clip_suite(), tmp_path, 2, full_disk):
        with pytest.raises(CalibrationError, match="No space left on device"):
            raise error
