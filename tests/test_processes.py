"""A calibration in several processes is that of one: the same model, the same log."""

import copy
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from calibrations import PLUS, Overheard, assert_identical, assert_same, run_fast
from process_group import in_processes
from tiny_models import ROUNDING, Suite, clip_suite, gpt2_suite, t5_suite
from tricky_models import Remembering, net_suite

from fusion_bench_featcal import CalibrationError, CalibrationResult
from fusion_bench_featcal.core import LinearSystem
from fusion_bench_featcal.processes import LostProcessError, Processes

Change = Callable[[Suite, Processes], Any]


def run(
    suite: Suite, processes: Processes, change: Change | None = None, **more: Any
) -> CalibrationResult:
    """Calibrate; `change` may change what one of the processes hands over."""
    own = copy.copy(suite)
    own.experts, own.inputs = dict(suite.experts), dict(suite.inputs)
    if change is not None:
        change(own, processes)
    return run_fast(own, processes=processes, **more)


def together(
    suite: Suite, size: int, change: Change | None = None, **more: Any
) -> list[CalibrationResult | Any]:
    """Each process's result, or its error."""
    return in_processes(size, lambda processes: run(suite, processes, change, **more))


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
        for ours, theirs in zip(found, wanted, strict=True):
            assert_alike(ours, theirs, bound)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=bound, abs=bound)
    else:
        assert found == wanted


def assert_one_model(found: list[CalibrationResult]) -> None:
    """All processes end with the same bits."""
    for result in found[1:]:
        assert records(result) == records(found[0])
        assert_identical(result.model, found[0].model)


def few_samples() -> Suite:
    suite = clip_suite()
    suite.inputs["task_0"] = suite.inputs["task_0"][:1]
    return suite


CASES: dict[str, tuple[Callable[[], Suite], dict[str, Any], tuple[int, ...], float]] = {
    # more processes than tasks: a task's batches are divided, and one process may have none
    "clip": (clip_suite, {}, (2, 5), 1e-12),
    "few samples": (few_samples, {"samples_per_task": 99}, (2, 5), 1e-12),
    "one task": (lambda: clip_suite(tasks=1), {}, (3,), 1e-12),
    "float32": (lambda: clip_suite().to(torch.float32), {}, (2,), 1e-5),
    "no expert features": (clip_suite, {"mix_alpha": 0.0, "log_drift": False}, (4,), 1e-12),
    "t5": (t5_suite, {}, (2,), ROUNDING),
    "gpt2": (gpt2_suite, {"modules": ["h.1.*"]}, (2,), 1e-12),
    "stack": (lambda: replace(gpt2_suite(), family="auto"), PLUS, (3,), 1e-9),
    "stack, replayed": (lambda: net_suite(Remembering()), {}, (3,), 1e-12),
    "plus": (few_samples, PLUS | {"samples_per_task": 99, "augment": "auto"}, (2, 5), 1e-9),
    "held out": (clip_suite, {"held_out": 2}, (5,), 1e-9),
    "trials": (
        clip_suite,
        PLUS | {"held_out": 2, "trials": 3, "task_weights": "drift"},
        (2,),
        1e-9,
    ),
    "plus, t5": (t5_suite, PLUS, (2,), 10 * ROUNDING),
}
SLOW = ("plus, t5", "few samples", "no expert features")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES],
)
def test_model_and_log_are_those_of_one_process(name: str):
    make, more, sizes, bound = CASES[name]
    suite = make()
    wanted = run(suite, Processes(), **more)
    for size in sizes:
        found = together(suite, size, **more)
        assert_one_model(found)
        assert_same(found[0].model, wanted.model, bound)
        assert_alike(records(found[0]), records(wanted), 10 * bound)


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
        suite.experts, suite.inputs = dict(experts), dict(batches)  # type: ignore[arg-type]
        run(suite, processes, samples_per_task=7)
        return [t for t in experts if experts[t].read], [t for t in batches if batches[t].asked]

    assert in_processes(2, touched) == [(["task_0", "task_2"],) * 2, (["task_1"],) * 2]


def spoil_task_1(suite: Suite, _: Processes) -> None:
    suite.inputs["task_1"][-1]["pixel_values"][0] = float("nan")


def take_all_samples_away(suite: Suite, _: Processes) -> None:
    suite.inputs["task_1"] = []


def fail_oddly(suite: Suite, _: Processes) -> None:
    def broken() -> Iterator[Any]:
        raise KeyError("pixels")
        yield

    suite.inputs["task_1"] = broken()  # type: ignore[assignment]


def run_out_of_memory(_: Suite, processes: Processes) -> None:
    def failing(self: Any) -> Any:
        raise MemoryError("no room for the sums")

    if processes.rank == 1:
        LinearSystem.tensors = failing  # type: ignore[method-assign]  # in this process alone


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (run_out_of_memory, r"no room for the sums|out of memory"),
        (
            spoil_task_1,
            r"task task_1: calibration batch \d, input 'pixel_values', has NaN or infinite",
        ),
        (take_all_samples_away, r"task task_1 has 0 calibration samples"),
        (fail_oddly, r"pixels"),
    ],
)
def test_failing_process_ends_all_with_its_error(change: Change, message: str):
    first, second = map(str, together(clip_suite(), 2, change))
    assert re.search(message, first) and re.search(message, second)
    assert re.search(r"\(process [1-9] of", first)


def test_lost_process_ends_the_others():
    def lose(suite: Suite, processes: Processes) -> None:
        def dying() -> Iterator[Any]:
            os.kill(os.getpid(), signal.SIGKILL)
            yield

        if processes.rank == 1:
            suite.inputs["task_1"] = dying()  # type: ignore[assignment]

    first, second, third = together(clip_suite(), 3, lose)
    assert second == -signal.SIGKILL
    for error in (first, third):
        assert isinstance(error, LostProcessError)
        assert "lost contact" in str(error) and "method.resume=true" in str(error)


def other_setting(suite: Suite, processes: Processes) -> CalibrationResult:
    return run(suite, processes, ridge_lambda=1.0 + processes.rank)


def other_merged(suite: Suite, processes: Processes) -> None:
    suite.merged = clip_suite(seed=processes.rank).merged


def other_order(suite: Suite, processes: Processes) -> None:
    if processes.rank:
        suite.experts = dict(reversed(suite.experts.items()))


@pytest.mark.parametrize(
    ("change", "what"),
    [(other_setting, "settings"), (other_merged, "weights"), (other_order, "tasks")],
)
def test_processes_that_were_not_started_alike_are_refused(change: Change, what: str):
    for error in together(clip_suite(), 2, change):
        assert isinstance(error, CalibrationError)
        assert f"process 1 was started with other {what} than process 0" in str(error)


def test_same_processes_go_on_after_a_calibration_that_failed():
    suite = clip_suite()

    def twice(processes: Processes) -> CalibrationResult:
        with pytest.raises(CalibrationError):
            run(suite, processes, take_all_samples_away)
        return run(suite, processes)

    assert_one_model(in_processes(2, twice))


@pytest.mark.parametrize("order", ["module", "block"])
def test_modules_are_factorised_in_the_process_that_has_the_least_to_do(order: str):
    suite = clip_suite()
    settings: dict[str, Any] = PLUS | {"order": order}

    def factorised(processes: Processes) -> tuple[int, dict[str, Any]]:
        calls: list[torch.Size] = []
        original = torch.linalg.cholesky_ex

        def counted(system: torch.Tensor, **more: Any) -> Any:
            calls.append(system.shape)
            return original(system, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.linalg, "cholesky_ex", counted)
            result = run(suite, processes, **settings)
        return len(calls), result.reads["totals"] | {"places": result.reads["base"]}

    alone, reads = factorised(Processes())
    counts, found = zip(*in_processes(2, factorised), strict=True)
    assert sum(counts) == alone and min(counts) >= alone // 5
    assert found == (reads, reads)
