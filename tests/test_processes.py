"""A calibration in several processes is that of one: the same model, the same log."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from calibrations import PAPER, assert_same, cast, settings_of
from process_group import in_processes
from tiny_models import ROUNDING, Suite, clip_suite, gpt2_suite, t5_suite

from fusion_bench_featcal import CalibrationError, CalibrationResult, calibrate
from fusion_bench_featcal.core import LinearSystem
from fusion_bench_featcal.engine.processes import LostProcessError, OneProcess, Processes
from fusion_bench_featcal.experts import InMemoryExpert

Change = Callable[[dict[str, Any], Processes], None]


def run(
    suite: Suite, processes: Processes, change: Change | None = None, **more: Any
) -> CalibrationResult:
    """Calibrate; `change` may change what one of the processes hands over."""
    given = {
        "merged": suite.merged,
        "base": suite.base,
        "experts": dict(suite.experts),
        "batches": cast(suite.inputs, next(suite.merged.parameters()).dtype),
        "settings": settings_of(PAPER, suite, **({"family": suite.family} | more)),
    }
    if change is not None:
        change(given, processes)
    return calibrate(*given.values(), progress=False, processes=processes)


def records(result: CalibrationResult) -> list[dict[str, Any]]:
    """The log without times."""
    return [{k: v for k, v in r.items() if k != "seconds"} for r in result.log.records]


def assert_alike(found: Any, wanted: Any, bound: float) -> None:
    """Compare nested values: numbers up to a bound, all else, and all order, exactly."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        found, wanted = list(found.values()), list(wanted.values())
    if isinstance(wanted, list):
        assert len(found) == len(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            assert_alike(ours, theirs, bound)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=bound, abs=bound)
    else:
        assert found == wanted


def assert_one_model(found: list[CalibrationResult]) -> None:
    """All processes end with the same bits."""
    first = found[0].model.state_dict()
    for result in found[1:]:
        assert records(result) == records(found[0])
        for name, value in result.model.state_dict().items():
            assert torch.equal(value, first[name]), name


CASES: dict[str, tuple[Callable[[], Suite], dict[str, Any], tuple[int, ...], float]] = {
    # more processes than tasks: a task's batches are divided, and one process may have none
    "clip": (clip_suite, {}, (2, 5), 1e-12),
    "one task": (lambda: clip_suite(tasks=1), {}, (3,), 1e-12),
    "float32": (lambda: clip_suite().to(torch.float32), {}, (2,), 1e-5),
    "no expert features": (clip_suite, {"mix_alpha": 0.0, "log_drift": False}, (4,), 1e-12),
    "t5": (t5_suite, {}, (2,), ROUNDING),
    "gpt2": (gpt2_suite, {"modules": ["h.1.*"]}, (2,), 1e-12),
}


@pytest.mark.parametrize("name", CASES)
def test_model_and_log_are_those_of_one_process(name: str):
    make, more, sizes, bound = CASES[name]
    suite = make()
    wanted = run(suite, OneProcess(), **more)
    for size in sizes:
        found = in_processes(size, lambda processes: run(suite, processes, **more))
        assert_one_model(found)
        assert_same(found[0].model, wanted.model, bound)
        assert_alike(records(found[0]), records(wanted), 10 * bound)


class Overheard(InMemoryExpert):
    """An expert that remembers whether it was read."""

    read = False

    def tensor(self, name: str) -> torch.Tensor:
        self.read = True
        return super().tensor(name)


class Asked:
    """Batches that remember whether they were asked for."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.asked = batches, False

    def __iter__(self) -> Iterator[Any]:
        self.asked = True
        return iter(self.batches)


def test_other_processes_experts_and_samples_are_left_alone():
    suite = clip_suite()

    def touched(processes: Processes) -> tuple[list[str], list[str]]:
        experts = {task: Overheard(expert) for task, expert in suite.experts.items()}
        batches = {task: Asked(batches) for task, batches in suite.inputs.items()}

        def change(given: dict[str, Any], _: Processes) -> None:
            given |= {"experts": experts, "batches": batches}

        run(suite, processes, change)
        return [t for t in experts if experts[t].read], [t for t in batches if batches[t].asked]

    assert in_processes(2, touched) == [(["task_0", "task_2"],) * 2, (["task_1"],) * 2]


@pytest.mark.parametrize("size", [2, 5])
def test_task_with_few_samples_in_several_processes(size: int) -> None:
    """With 5 processes some have no batch of their own."""
    suite = clip_suite()
    suite.inputs["task_0"] = suite.inputs["task_0"][:1]
    wanted = run(suite, OneProcess(), samples_per_task=99)
    found = in_processes(size, lambda processes: run(suite, processes, samples_per_task=99))
    assert_one_model(found)
    assert_same(found[0].model, wanted.model, 1e-5)


def spoil_task_1(given: dict[str, Any], _: Processes) -> None:
    given["batches"]["task_1"][-1]["pixel_values"][0] = float("nan")


def take_all_samples_away(given: dict[str, Any], _: Processes) -> None:
    given["batches"]["task_1"] = []


def fail_oddly(given: dict[str, Any], processes: Processes) -> None:
    def broken() -> Iterator[Any]:
        raise KeyError("pixels")
        yield

    given["batches"]["task_1"] = broken()


def run_out_of_memory(given: dict[str, Any], processes: Processes) -> None:
    def failing(self: Any) -> Any:
        raise MemoryError("no room for the sums")

    if processes.rank == 1:
        LinearSystem.tensors = failing  # type: ignore[method-assign]  # in this process alone


@pytest.mark.parametrize(
    ("size", "change", "message"),
    [
        (2, run_out_of_memory, r"no room for the sums|out of memory"),
        (
            2,
            spoil_task_1,
            r"task task_1: calibration batch \d, input 'pixel_values', has NaN or infinite",
        ),
        (2, take_all_samples_away, r"task task_1 has 0 calibration samples"),
        (2, fail_oddly, r"pixels"),
    ],
)
def test_failing_process_ends_all_with_its_error(size: int, change: Change, message: str):
    suite = clip_suite()
    found = in_processes(size, lambda processes: run(suite, processes, change))
    for rank, error in enumerate(found):
        assert isinstance(error, Exception), error
        with pytest.raises(type(error), match=message):
            raise error
        if rank == 0:
            assert re.search(r"\(process [1-9] of", str(error))


def test_lost_process_ends_the_others():
    suite = clip_suite()

    def lose(given: dict[str, Any], processes: Processes) -> None:
        def dying() -> Iterator[Any]:
            os.kill(os.getpid(), signal.SIGKILL)
            yield

        if processes.rank == 1:
            given["batches"]["task_1"] = dying()

    first, second, third = in_processes(3, lambda processes: run(suite, processes, lose))
    assert second == -signal.SIGKILL
    for error in (first, third):
        assert isinstance(error, LostProcessError)
        assert "lost contact" in str(error) and "method.resume=true" in str(error)


def other_setting(given: dict[str, Any], processes: Processes) -> None:
    given["settings"] = given["settings"].replace(ridge_lambda=1.0 + processes.rank)


def other_merged(given: dict[str, Any], processes: Processes) -> None:
    given["merged"] = clip_suite(seed=processes.rank).merged


def other_order(given: dict[str, Any], processes: Processes) -> None:
    if processes.rank:
        given["experts"] = dict(reversed(given["experts"].items()))


@pytest.mark.parametrize(
    ("change", "what"),
    [(other_setting, "settings"), (other_merged, "weights"), (other_order, "tasks")],
)
def test_processes_that_were_not_started_alike_are_refused(change: Change, what: str):
    for error in in_processes(2, lambda processes: run(clip_suite(), processes, change)):
        assert isinstance(error, CalibrationError)
        assert f"process 1 was started with other {what} than process 0" in str(error)


def test_same_processes_go_on_after_a_calibration_that_failed():
    suite = clip_suite()

    def twice(processes: Processes) -> CalibrationResult:
        with pytest.raises(CalibrationError):
            run(suite, processes, take_all_samples_away)
        return run(suite, processes)

    assert_one_model(in_processes(2, twice))
