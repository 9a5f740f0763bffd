"""Several processes that lose one of them go on where they were, to the bit-identical model."""

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import assert_identical, run_fast
from killing import finished_blocks
from process_group import in_processes
from safetensors.torch import save_model
from test_processes import Change, assert_one_model, records, run, together
from tiny_models import Suite, clip_suite, t5_suite

from fusion_bench_featcal import CalibrationError, SafetensorsExpert
from fusion_bench_featcal.experts import hollow_copy
from fusion_bench_featcal.json_files import read_json
from fusion_bench_featcal.output.folder import OutputFolder
from fusion_bench_featcal.processes import LostProcessError, Processes
from fusion_bench_featcal.rules.paper import Paper

PROCESSES = "number of processes (fabric.devices x fabric.num_nodes)"


def kept(
    suite: Suite, folder: Path, size: int, change: Change | None = None, *, resume: bool = False
) -> list[Any]:
    return together(suite, Paper(), size, change, checkpoint_dir=str(folder), resume=resume)


def killed(suite: Suite, folder: Path, size: int, *, rank: int, after: int) -> list[Any]:
    """Run, and kill one process when it has gone past so many blocks."""

    write, done = OutputFolder.write, []

    def dying(_: Suite, processes: Processes) -> None:
        def die(self: OutputFolder, block: str, *rest: Any) -> Any:
            if len(done) == after and processes.rank == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            tensors = write(self, block, *rest)
            done.append(block)
            return tensors

        setattr(OutputFolder, "write", die)  # noqa: B010 - a method is not for assigning to

    return kept(suite, folder, size, dying)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "size", "rank", "after"),
    [(clip_suite, 5, 0, 1), (t5_suite, 2, 1, 2), (t5_suite, 5, 3, 1)],
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
    written = after + (rank > 0)  # the first process writes, and has not missed this one yet
    assert finished_blocks(tmp_path / "lost") == written
    found = kept(suite, tmp_path / "lost", size, resume=True)
    assert_one_model(found)
    assert_identical(found[0].model, wanted[0].model)
    (resumed,) = found[0].log.of_kind("resumed")
    assert resumed["blocks"] == written
    found[0].log.records.pop()
    assert records(found[0]) == records(wanted[0])


def test_folder_holds_what_that_of_one_process_holds(tmp_path: Path):
    suite = clip_suite()
    run(suite, Paper(), checkpoint_dir=str(tmp_path / "one"))
    kept(suite, tmp_path / "five", 5)
    folders = [tmp_path / "one", tmp_path / "five"]
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    one, several = (read_json(folder / "blocks.json", sealed=True) for folder in folders)
    assert [content["run"]["run"].pop(PROCESSES) for content in (one, several)] == [1, 5]
    samples = [content["run"].pop("samples") for content in (one, several)]
    assert list(samples[0]) == list(samples[1])  # digests are of each process's part
    assert several["run"] == one["run"]
    assert list(several["blocks"]) == list(one["blocks"])


def test_another_number_of_processes_is_refused(tmp_path: Path):
    suite = clip_suite()
    kept(suite, tmp_path, 2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    message = re.escape(PROCESSES) + r" \(2 then, {} now\)"
    with pytest.raises(CalibrationError, match=message.format(1)):
        run(suite, Paper(), checkpoint_dir=str(tmp_path), resume=True)
    for error in kept(suite, tmp_path, 3, resume=True):
        with pytest.raises(CalibrationError, match=message.format(3)):
            raise error
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_folder_that_processes_do_not_share_is_refused(tmp_path: Path):
    suite = clip_suite()
    kept(suite, tmp_path / "0", 2)

    def own_folder(suite: Suite, processes: Processes) -> None:
        folder = tmp_path / str(processes.rank)
        run(suite, Paper(), processes, checkpoint_dir=str(folder), resume=True)

    for error in together(suite, Paper(), 2, own_folder):
        assert isinstance(error, CalibrationError)
        assert "sees other files in method.checkpoint_dir" in str(error)


def test_changed_expert_and_samples_of_another_process_end_all(tmp_path: Path):
    suite = clip_suite()
    kept(suite, tmp_path, 2)

    def other_expert(suite: Suite, _: Processes) -> None:
        suite.experts["task_1"] = clip_suite(seed=3).experts["task_1"]

    def other_samples(suite: Suite, _: Processes) -> None:
        suite.inputs["task_1"] = clip_suite(seed=3).inputs["task_1"]

    for change, message in (
        (other_expert, "weights of expert task_1"),
        (other_samples, "samples of task task_1"),
    ):
        for error in kept(suite, tmp_path, 2, change, resume=True):
            with pytest.raises(CalibrationError, match=message):
                raise error


def test_block_that_cannot_be_written_ends_all(tmp_path: Path):
    def full_disk(*_: Any) -> None:
        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        os.replace = fail  # in this process only

    for error in kept(clip_suite(), tmp_path, 2, full_disk):
        with pytest.raises(CalibrationError, match="No space left on device"):
            raise error


def test_model_in_files_is_calibrated_by_several_processes_as_one_in_memory(tmp_path: Path):
    suite = clip_suite()
    wanted = in_processes(2, lambda processes: run_fast(suite, processes=processes))[0].model
    save_model(suite.merged, str(tmp_path / "merged.safetensors"))
    structure = replace(suite, merged=hollow_copy(suite.merged))
    weights, out = SafetensorsExpert(tmp_path / "merged.safetensors"), tmp_path / "out"

    def streamed(processes: Processes) -> Any:
        more = {"merged_weights": weights, "checkpoint_dir": str(out)}
        return run_fast(structure, processes=processes, **more)

    for result in in_processes(2, streamed):
        assert all(parameter.is_meta for parameter in result.model.parameters())
    found = SafetensorsExpert(out)
    assert found.names() == dict(wanted.named_parameters()).keys()
    for name, tensor in wanted.named_parameters():
        assert torch.equal(found.tensor(name), tensor), name
