"""A calibration in several processes is that of one: the same model, log and output folder."""

import copy
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import Overheard, assert_identical, assert_same, run_fast, samples_in
from killing import finished_blocks
from process_group import in_processes
from safetensors.torch import save_model
from tiny_convs import batched_suite, net_suite
from tiny_models import Suite, clip_suite, gpt2_suite, t5_suite

from fusion_bench_featcal import CalibrationError, CalibrationResult, SafetensorsExpert
from fusion_bench_featcal.experts import hollow_copy
from fusion_bench_featcal.json_files import read_json
from fusion_bench_featcal.output.folder import OutputFolder
from fusion_bench_featcal.processes import LostProcessError, Processes
from fusion_bench_featcal.rules.paper import Paper
from fusion_bench_featcal.rules.plus import Plus

Change = Callable[[Suite, Processes], Any]
PAPER, PLUS = Paper(), Plus()
PROCESSES = "number of processes (fabric.devices x fabric.num_nodes)"


def few_samples() -> Suite:
    suite = clip_suite()
    suite.inputs["task_0"] = suite.inputs["task_0"][:1]
    return suite


def together(
    suite: Suite, size: int, change: Change | None = None, rule: Any = PAPER, **more: Any
) -> list[Any]:
    """Each process's result or error. `change` may change the arguments of one of them."""

    def work(processes: Processes) -> CalibrationResult:
        arguments = replace(suite, experts={**suite.experts}, inputs={**suite.inputs})
        if change is not None:
            change(arguments, processes)
        settings: dict[str, Any] = {"samples_per_task": samples_in(suite), "rule": rule, **more}
        return run_fast(arguments, processes=processes, **settings)

    return in_processes(size, work)


def into(folder: Path, suite: Suite, size: int, *change: Change, **more: Any) -> list[Any]:
    return together(suite, size, *change, checkpoint_dir=str(folder), **more)


def records(result: CalibrationResult) -> list[dict[str, Any]]:
    """The log without times."""
    return [{k: v for k, v in r.items() if k != "seconds"} for r in result.log.records]


def assert_alike(log: Any, expected_log: Any, bound: float) -> None:
    """Compare logs: numbers up to a bound, all else and all order exactly."""
    assert [list(record) for record in log] == [list(record) for record in expected_log]
    for record, expected in zip(log, expected_log, strict=True):
        numbers = {k: v for k, v in expected.items() if isinstance(v, float)}
        assert {k: record[k] for k in numbers} == pytest.approx(numbers, rel=bound, abs=bound)
        assert {**record, **numbers} == expected


def assert_one_model(results: list[CalibrationResult]) -> None:
    """All processes end with the same bits."""
    for result in results[1:]:
        assert records(result) == records(results[0])
        assert_identical(result.model, results[0].model)


def assert_all_raise(errors: list[Any], message: str, kind: type[Exception]) -> None:
    for error in errors:
        assert isinstance(error, kind) and re.search(message, str(error)), error


# Tasks that are split, processes without a sample, copies, padding, and each kind of module.
CASES: dict[str, tuple[Callable[[], Suite], int, Any, dict[str, Any]]] = {
    "clip": (clip_suite, 4, PLUS, {}),
    "few samples": (few_samples, 4, PAPER, {"samples_per_task": 99}),
    "one task": (lambda: clip_suite(tasks=1, sizes=(4, 4)), 2, PLUS, {}),
    "held out, copies": (clip_suite, 2, PAPER, {"held_out": 2, "augment": "jitter"}),
    "t5": (lambda: t5_suite(depths=(1, 1)), 2, PLUS, {}),
    "gpt2": (gpt2_suite, 2, PAPER, {}),
    "convolutions": (net_suite, 3, PLUS, {}),
    "statistics": (batched_suite, 2, PAPER, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_model_and_log_are_those_of_one_process(case: str):
    make, size, rule, more = CASES[case]
    suite = make()
    settings: dict[str, Any] = {"samples_per_task": samples_in(suite), "rule": rule, **more}
    expected = run_fast(suite, **settings)
    results = together(suite, size, **settings)
    assert_one_model(results)
    # Other sizes of batches alone move what Plus solves in one process by 3e-12.
    assert_same(results[0].model, expected.model, 1e-11 if rule is PLUS else 1e-12)
    assert_alike(records(results[0]), records(expected), 1e-6)


def test_experts_and_samples_of_other_processes_are_never_read():
    suite, tasks = clip_suite(), [f"task_{n}" for n in range(4)]

    class Watched:
        is_read = False

        def __iter__(self) -> Iterator[Any]:
            self.is_read = True
            return iter(suite.inputs["task_0"])

    def touched(processes: Processes) -> tuple[list[str], list[str]]:
        experts: Any = {task: Overheard(suite.experts["task_0"]) for task in tasks}
        batches: Any = {task: Watched() for task in tasks}
        watched = replace(suite, experts=experts, inputs=batches)
        run_fast(watched, processes=processes, samples_per_task=7)
        return [t for t in tasks if experts[t].read], [t for t in tasks if batches[t].is_read]

    assert in_processes(2, touched) == [(tasks[:2],) * 2, (tasks[2:],) * 2]


def test_groups_are_solved_in_the_process_that_has_the_least_to_do():
    suite = clip_suite(tasks=2)

    def factorised(processes: Processes) -> int:
        calls, original = [], torch.linalg.cholesky_ex

        def counted(system: torch.Tensor, **more: Any) -> Any:
            calls.append(1)
            return original(system, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.linalg, "cholesky_ex", counted)
            run_fast(suite, rule=PLUS, processes=processes)
        return len(calls)

    alone = factorised(Processes())
    counts = in_processes(2, factorised)
    assert sum(counts) == alone and min(counts) >= alone // 5


def spoil_samples(suite: Suite, _: Processes) -> None:
    suite.inputs["task_2"] = copy.deepcopy(suite.inputs["task_2"])
    suite.inputs["task_2"][-1]["pixel_values"][0] = float("nan")


def other_merged(suite: Suite, processes: Processes) -> None:
    suite.merged = clip_suite(seed=processes.rank).merged


def unreadable_samples(suite: Suite, _: Processes) -> None:
    batches: Any = map({}.__getitem__, ["pixels"])
    suite.inputs["task_2"] = batches


def full_disk(*_: Any) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    os.replace = fail  # in this process only


STARTED = "process 1 was started with other {} than process 0"
ERRORS: dict[str, tuple[Change, str]] = {
    "spoilt": (
        spoil_samples, r"task task_2: calibration batch \d, input 'pixel_values', has NaN.*"),
    "other error": (unreadable_samples, "pixels"),
    "other model": (other_merged, STARTED.format("weights")),
    "full disk": (full_disk, "No space left on device"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), ERRORS.values(), ids=list(ERRORS))
def test_failing_process_ends_all_with_its_error(change: Change, message: str, tmp_path: Path):
    errors = into(tmp_path, clip_suite(), 2, change)
    assert_all_raise(errors, message, Exception)
    if "task_2" in message:
        assert re.search(r"\(process 1 of 2", str(errors[0]))


def test_other_settings_are_refused_and_a_failure_does_not_end_the_processes():
    def work(processes: Processes) -> Any:
        with pytest.raises(CalibrationError, match=STARTED.format("settings")):
            rule = Paper(ridge_lambda=1.0 + processes.rank)
            run_fast(clip_suite(), rule=rule, processes=processes)
        return run_fast(clip_suite(), processes=processes)

    assert_one_model(in_processes(2, work))


def test_dead_process_ends_the_others():
    def lose(suite: Suite, processes: Processes) -> None:
        if processes.rank == 1:
            dying = (os.kill(os.getpid(), signal.SIGKILL) for _ in range(1))
            suite.inputs["task_1"] = dying  # type: ignore[assignment]

    first, second, third = together(clip_suite(), 3, lose)
    assert second == -signal.SIGKILL
    assert_all_raise([first, third], "process [02] of 3 has lost contact", LostProcessError)
    assert_all_raise([first, third], r"method\.resume=true", LostProcessError)


def test_hanging_process_ends_the_others():
    def work(processes: Processes) -> None:
        if processes.rank == 1:
            time.sleep(1.2)
        else:
            run_fast(clip_suite(), processes=processes)

    assert isinstance(in_processes(2, work, patience=0.5)[0], LostProcessError)


def killed(suite: Suite, folder: Path, size: int, *, rank: int, after: int) -> list[Any]:
    """Run, and kill one process when it has gone past so many blocks."""
    write, finished = OutputFolder.write, []

    def dying(_: Suite, processes: Processes) -> None:
        def die(self: OutputFolder, block: str, *rest: Any) -> Any:
            if len(finished) == after and processes.rank == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            finished.append(block)
            return write(self, block, *rest)

        setattr(OutputFolder, "write", die)  # noqa: B010 - a method is not for assigning to

    return into(folder, suite, size, dying)


def test_resumed_run_ends_with_the_same_bits(tmp_path: Path):
    suite, size, rank, after = t5_suite(depths=(1, 2)), 2, 1, 1
    expected = into(tmp_path / "whole", suite, size)
    lost = killed(suite, tmp_path / "lost", size, rank=rank, after=after)
    assert lost.pop(rank) == -signal.SIGKILL
    assert all(isinstance(error, LostProcessError) for error in lost)
    written = after + 1  # the first process writes, and has not missed this one yet
    assert finished_blocks(tmp_path / "lost") == written
    results = into(tmp_path / "lost", suite, size, resume=True)
    assert_one_model(expected)
    assert_one_model(results)
    assert_identical(results[0].model, expected[0].model)
    (resumed,) = results[0].log.of_kind("resumed")
    assert resumed["blocks"] == written
    results[0].log.records.pop()
    assert records(results[0]) == records(expected[0])


def test_folder_is_that_of_one_process_and_another_run_is_refused(tmp_path: Path):
    def other_expert(suite: Suite, _: Processes) -> None:
        suite.experts["task_1"] = clip_suite(seed=3).experts["task_1"]

    def other_samples(suite: Suite, _: Processes) -> None:
        suite.inputs["task_1"] = clip_suite(seed=3).inputs["task_1"]

    suite, folder, alone = clip_suite(), tmp_path / "0", tmp_path / "alone"
    run_fast(suite, checkpoint_dir=str(alone))
    into(folder, suite, 2)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert before.keys() == {path.name for path in alone.iterdir()}
    one, two = (read_json(path / "blocks.json", sealed=True) for path in (alone, folder))
    assert [content["run"]["run"].pop(PROCESSES) for content in (one, two)] == [1, 2]
    digests = [content["run"].pop("samples") for content in (one, two)]
    assert list(digests[0]) == list(digests[1])  # digests are of each process's part
    assert list(two["blocks"]) == list(one["blocks"])
    with pytest.raises(CalibrationError, match=re.escape(PROCESSES) + r" \(2 then, 1 now\)"):
        run_fast(suite, checkpoint_dir=str(folder), resume=True)
    for words, change in (
        ("weights of expert task_1", other_expert),
        ("samples of task task_1", other_samples),
    ):
        errors = into(folder, suite, 2, change, resume=True)
        assert_all_raise(errors, words, CalibrationError)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    def in_two_folders(processes: Processes) -> None:
        path = str(tmp_path / str(processes.rank))
        run_fast(suite, processes=processes, resume=True, rule=PAPER, checkpoint_dir=path)

    words = r"sees other files in method\.checkpoint_dir"
    assert_all_raise(in_processes(2, in_two_folders), words, CalibrationError)


def test_model_in_files_is_calibrated_by_several_processes_as_one_in_memory(tmp_path: Path):
    suite = clip_suite()
    expected = together(suite, 2)[0].model
    save_model(suite.merged, str(tmp_path / "merged.safetensors"))
    structure = replace(suite, merged=hollow_copy(suite.merged))
    more: dict[str, Any] = {"merged_weights": SafetensorsExpert(tmp_path / "merged.safetensors")}
    for result in into(tmp_path / "out", structure, 2, **more):
        assert all(parameter.is_meta for parameter in result.model.parameters())
    written = SafetensorsExpert(tmp_path / "out")
    assert written.names() == dict(expected.named_parameters()).keys()
    for name, tensor in expected.named_parameters():
        assert torch.equal(written.tensor(name), tensor), name
