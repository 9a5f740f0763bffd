"""A calibration in several processes is that of one: the same model, the same log."""

import copy
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calibrations import Overheard, assert_identical, assert_same, samples_in, with_rule
from golden.golden_models import MAKERS
from process_group import in_processes
from tiny_convs import net_suite, tower_suite
from tiny_models import Suite, clip_suite

from fusion_bench_featcal import CalibrationError, CalibrationResult, FeatCalSettings
from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.processes import LostProcessError, Processes, TorchProcesses
from fusion_bench_featcal.rules.paper import Paper
from fusion_bench_featcal.rules.plus import Plus
from fusion_bench_featcal.team import Team

Change = Callable[[Any, Processes], Any]
RULES: dict[str, Any] = {"paper": Paper(), "plus": Plus()}


def golden(name: str) -> Suite:
    suite = MAKERS[name]()
    return Suite(suite.merged, suite.base, suite.experts, suite.batches, [], suite.family)


def few_samples() -> Suite:
    suite = clip_suite()
    suite.inputs["task_0"] = suite.inputs["task_0"][:1]
    return suite


def run(
    suite: Suite,
    rule: Any,
    processes: Processes | None = None,
    change: Change | None = None,
    **more: Any,
) -> CalibrationResult:
    """Calibrate. `change` may change what one of the processes hands over."""
    handed = copy.copy(suite)
    handed.experts, handed.inputs = dict(suite.experts), dict(suite.inputs)
    if change is not None and processes is not None:
        change(handed, processes)
    settings = FeatCalSettings(
        **{"samples_per_task": samples_in(suite), "family": suite.family, **more}
    )
    models = handed.merged, handed.base, handed.experts
    return calibrate(*models, handed.inputs, with_rule(settings, rule), processes=processes)


def together(
    suite: Suite, rule: Any, size: int, change: Change | None = None, **more: Any
) -> list[CalibrationResult | Any]:
    """Each process's result, or its error."""
    return in_processes(
        size, lambda processes: run(suite, rule, processes, change, **more), join=TorchProcesses
    )


def records(result: CalibrationResult) -> list[dict[str, Any]]:
    """The log without times."""
    return [{k: v for k, v in r.items() if k != "seconds"} for r in result.log.records]


def assert_alike(found: Any, wanted: Any, bound: float) -> None:
    """Compare logs: numbers up to a bound, all else and all order exactly."""
    assert [list(record) for record in found] == [list(record) for record in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        for key, value in theirs.items():
            is_number = isinstance(value, float)
            assert ours[key] == (pytest.approx(value, rel=bound, abs=bound) if is_number else value)


def assert_one_model(found: list[CalibrationResult]) -> None:
    """All processes end with the same bits."""
    for result in found[1:]:
        assert records(result) == records(found[0])
        assert_identical(result.model, found[0].model)


CASES: dict[str, tuple[Callable[[], Suite], dict[str, Any], tuple[int, ...]]] = {
    "clip": (clip_suite, {}, (2, 5)),
    "few samples": (few_samples, {"samples_per_task": 99}, (5,)),
    "one task": (lambda: clip_suite(tasks=1), {}, (3,)),
    "held out, copies": (clip_suite, {"held_out": 2, "augment": "jitter"}, (2, 5)),
    "t5": (lambda: golden("t5"), {}, (2, 5)),
    "gemma2": (lambda: golden("gemma2"), {}, (3,)),
    "gpt2": (lambda: golden("gpt2"), {}, (2,)),
    "convolutions": (net_suite, {}, (2, 5)),
    "statistics": (lambda: tower_suite("resnet"), {}, (2,)),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_model_and_log_are_those_of_one_process(case: Any, rule: Any):
    make, more, sizes = case
    suite = make()
    wanted = run(suite, rule, **more)
    for size in sizes:
        found = together(suite, rule, size, **more)
        assert_one_model(found)
        # Other sizes of batches alone move what Plus solves in one process by 3e-12.
        assert_same(found[0].model, wanted.model, 1e-11 if isinstance(rule, Plus) else 1e-12)
        assert_alike(records(found[0]), records(wanted), 1e-6)


def test_output_folder_of_several_processes_is_gone_on_with(tmp_path: Path):
    suite = golden("t5")
    settings = FeatCalSettings(
        samples_per_task=samples_in(suite),
        family=suite.family,
        checkpoint_dir=str(tmp_path),
        resume=True,
    )

    def work(processes: Processes) -> CalibrationResult:
        models, rule = (suite.merged, suite.base, suite.experts), RULES["paper"]
        return calibrate(*models, suite.inputs, with_rule(settings, rule), processes=processes)

    first = in_processes(2, work, join=TorchProcesses)
    manifest = json.loads((tmp_path / "blocks.json").read_text())
    assert_one_model(first)
    file = sorted(tmp_path.glob("block-*.safetensors"))[-1]
    file.unlink()
    again = in_processes(2, work, join=TorchProcesses)
    assert file.exists()
    assert_identical(again[0].model, first[0].model)
    assert_identical(again[1].model, first[0].model)
    assert list(manifest["run"]["samples"]) == list(suite.inputs)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 40])
@pytest.mark.parametrize("counts", [(3,), (4, 4, 4), (1, 9, 2, 5, 3)])
def test_every_batch_is_dealt_once_in_contiguous_runs(size: int, counts: tuple[int, ...]):
    tasks = [f"task {number}" for number in range(len(counts))]
    batches = {
        task: [SimpleNamespace(samples=2, start=2 * n) for n in range(count)]
        for task, count in zip(tasks, counts, strict=True)
    }
    dealt: list[Any] = []
    for rank in range(size):
        team = Team(team_process(rank, size), tasks, torch.device("cpu"))
        mine = team.tasks
        assert mine == tasks[tasks.index(mine[0]) : tasks.index(mine[-1]) + 1]
        assert all(len(team.members(task)) == 1 for task in mine[1:-1])
        for task in tasks:
            cut = team.cut(task, batches[task])
            assert task in mine or not cut
            dealt += cut
    assert dealt == [batch for task in tasks for batch in batches[task]]


def team_process(rank: int, size: int) -> Processes:
    processes = Processes()
    processes.rank, processes.size = rank, size
    return processes


def test_experts_and_samples_of_other_processes_are_never_read():
    suite = clip_suite()
    suite.inputs = {f"task_{n}": suite.inputs["task_0"] for n in range(4)}
    suite.experts = {task: suite.experts["task_0"] for task in suite.inputs}

    class Asked:
        def __init__(self, batches: list[Any]) -> None:
            self.batches, self.asked = batches, False

        def __iter__(self) -> Iterator[Any]:
            self.asked = True
            return iter(self.batches)

    def touched(processes: Processes) -> tuple[list[str], list[str]]:
        experts = {task: Overheard(expert) for task, expert in suite.experts.items()}
        batches = {task: Asked(batches) for task, batches in suite.inputs.items()}
        handed: Any = copy.copy(suite)
        handed.experts, handed.inputs = experts, batches
        settings = FeatCalSettings(samples_per_task=7)
        calibrate(
            handed.merged,
            handed.base,
            experts,
            handed.inputs,
            with_rule(settings, RULES["paper"]),
            processes=processes,
        )
        return [t for t in experts if experts[t].read], [t for t in batches if batches[t].asked]

    first, second = in_processes(2, touched, join=TorchProcesses)
    assert first == (["task_0", "task_1"],) * 2
    assert second == (["task_2", "task_3"],) * 2


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_groups_are_solved_in_the_process_that_has_the_least_to_do(rule: Any):
    suite = clip_suite()

    def factorised(processes: Processes) -> int:
        calls: list[int] = []
        original = torch.linalg.cholesky_ex

        def counted(system: torch.Tensor, **more: Any) -> Any:
            calls.append(1)
            return original(system, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.linalg, "cholesky_ex", counted)
            run(suite, rule, processes)
        return len(calls)

    alone = factorised(Processes())
    counts = in_processes(2, factorised, join=TorchProcesses)
    assert sum(counts) == alone and min(counts) >= alone // 5


def spoil_the_last_task(suite: Suite, _: Processes) -> None:
    suite.inputs["task_2"][-1]["pixel_values"][0] = float("nan")


def take_all_samples_away(suite: Suite, _: Processes) -> None:
    suite.inputs["task_2"] = []


def fail_oddly(suite: Suite, _: Processes) -> None:
    def broken() -> Iterator[Any]:
        raise KeyError("pixels")
        yield

    suite.inputs["task_2"] = broken()  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil_the_last_task, r"task task_2: calibration batch \d, input 'pixel_values', has NaN"),
        (take_all_samples_away, r"task task_2 has 0 calibration samples"),
        (fail_oddly, r"pixels"),
    ],
)
def test_failing_process_ends_all_with_its_error(change: Change, message: str):
    first, second = map(str, together(clip_suite(), Paper(), 2, change))
    assert re.search(message, first) and re.search(message, second)
    assert re.search(r"\(process 1 of 2", first)


def test_dead_process_ends_the_others():
    def lose(suite: Suite, processes: Processes) -> None:
        def dying() -> Iterator[Any]:
            os.kill(os.getpid(), signal.SIGKILL)
            yield

        if processes.rank == 1:
            suite.inputs["task_1"] = dying()  # type: ignore[assignment]

    first, second, third = together(clip_suite(), Paper(), 3, lose)
    assert second == -signal.SIGKILL
    for error in (first, third):
        assert isinstance(error, LostProcessError)
        assert re.search("process [02] of 3 has lost contact", str(error))
        assert "method.resume=true" in str(error)


def test_hanging_process_ends_the_others():
    def work(processes: Processes) -> None:
        if processes.rank == 1:
            time.sleep(5.0)
            return
        run(clip_suite(), Paper(), processes)

    first = in_processes(2, work, join=TorchProcesses, patience=2.0)[0]
    assert isinstance(first, LostProcessError)


def other_merged(suite: Suite, processes: Processes) -> None:
    suite.merged = clip_suite(seed=processes.rank).merged


def fewer_tasks(suite: Suite, processes: Processes) -> None:
    if processes.rank:
        del suite.experts["task_2"], suite.inputs["task_2"]


@pytest.mark.parametrize(("change", "what"), [(other_merged, "weights"), (fewer_tasks, "tasks")])
def test_processes_that_were_not_started_alike_are_refused(change: Change, what: str):
    for error in together(clip_suite(), Paper(), 2, change):
        assert isinstance(error, CalibrationError)
        assert f"process 1 was started with other {what} than process 0" in str(error)


def test_other_settings_are_refused():
    def work(processes: Processes) -> CalibrationResult:
        return run(clip_suite(), Paper(ridge_lambda=1.0 + processes.rank), processes)

    for error in in_processes(2, work, join=TorchProcesses):
        assert "process 1 was started with other settings than process 0" in str(error)


def test_same_processes_go_on_after_a_calibration_that_failed():
    suite = clip_suite()

    def twice(processes: Processes) -> CalibrationResult:
        with pytest.raises(CalibrationError):
            run(suite, Paper(), processes, take_all_samples_away)
        return run(suite, Paper(), processes)

    assert_one_model(in_processes(2, twice, join=TorchProcesses))
