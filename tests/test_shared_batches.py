"""Processes that do not divide the number of tasks share the batches of each: the same result."""

import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import Overheard, assert_identical, assert_same, run_fast
from killing import finished_blocks, largest_file
from mixture_types import mixture_suite
from model_types import suite_named
from process_group import in_processes
from test_processes import assert_one_model, die, failing_after, records, together
from tiny_convs import tower_suite
from tiny_languages import NEEDS_RELEASE_5
from tiny_models import Suite, clip_suite, decoder_suite, partly_labelled_suite, t5_suite
from variations import alone, cut, size_of

from fusion_bench_featcal import Paper, Plus, TorchProcesses
from fusion_bench_featcal.errors import LostProcessError
from fusion_bench_featcal.run.processes import SMALL_BYTES, Processes, join_small

# The samples of these suites fit no task, for which FeatCal+ would use task vectors alone.
PLUS = Plus(task_vectors_only=False)
RULES = [Paper(), PLUS]


def with_tasks(suite: Suite, *tasks: str) -> Suite:
    experts, inputs = (
        {task: values[task] for task in tasks} for values in (suite.experts, suite.inputs)
    )
    return replace(suite, experts=experts, inputs=inputs)


def labels_in_one_task() -> Suite:
    return with_tasks(partly_labelled_suite("none", 1), "task_0", "task_2")


def first_of_each(suite: Suite) -> Suite:
    """One sample of each task."""
    return replace(suite, inputs={t: [cut(b[0], slice(1))] for t, b in suite.inputs.items()})


# Tests of one process against 3 and 5, over two tasks unless the suite has more.
CASES: dict[str, tuple[Callable[[], Suite], dict[str, Any]]] = {
    "images": (lambda: alone(clip_suite(tasks=2)), {}),
    "copies": (lambda: clip_suite(tasks=2), {"augment": "jitter"}),
    "texts": (lambda: alone(decoder_suite()), {}),
    "labels in one task": (labels_in_one_task, {"decoder_rows": "auto"}),
    "encoder-decoder": (lambda: alone(t5_suite(depths=(1, 2))), {}),
    "images in one task": (lambda: alone(suite_named("llava", "images")), {}),
    "batches of 1 to 40": (lambda: clip_suite(tasks=2, sizes=(40, 1, 7, 1, 16)), {}),
    "statistics": (lambda: alone(tower_suite("resnet")), {}),
    "balance": (lambda: alone(clip_suite(tasks=2)), {"rule": replace(PLUS, balance=1.0)}),
    "samples of no task": (lambda: alone(clip_suite(tasks=2)), {"rule": Plus()}),
}


def assert_as_one_process(suite: Suite, sizes: tuple[int, ...], settings: dict[str, Any]) -> None:
    """All processes end with one model and log, which are those of one process up to rounding."""
    expected = run_fast(suite, **settings)
    for size in sizes:

        def work(processes: TorchProcesses) -> Any:  # a model with hooks cannot be sent
            result = run_fast(suite, processes=processes, **settings)
            return records(result), dict(result.model.state_dict())

        results = in_processes(size, work)
        for log, model in results:
            assert log == results[0][0]
            assert all(torch.equal(value, results[0][1][name]) for name, value in model.items())
        for name, value in expected.model.state_dict().items():
            torch.testing.assert_close(results[0][1][name], value, rtol=1e-11, atol=1e-12)
        for record, other in zip(results[0][0], records(expected), strict=True):
            numbers = {k: v for k, v in other.items() if isinstance(v, float)}
            assert {k: record[k] for k in numbers} == pytest.approx(numbers, rel=1e-6, abs=1e-6)
            assert record.get("samples") == other.get("samples")
            assert record.get("rows") == other.get("rows")


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("case", "rule"),
    [(case, rule) for case in CASES for rule in ([None] if "rule" in CASES[case][1] else RULES)],
)
def test_three_and_five_processes_share_the_batches_of_two_tasks(case: str, rule: Any) -> None:
    make, more = CASES[case]
    suite = make()
    samples = max(sum(map(size_of, batches)) for batches in suite.inputs.values())
    settings = {"samples_per_task": samples, "rule": rule, **more}
    sizes = tuple(n for n in (3, 5) if len(suite.inputs) % n)
    assert_as_one_process(suite, sizes, settings)


@pytest.mark.parametrize("rule", RULES, ids=["paper", "plus"])
def test_two_processes_share_three_tasks(rule: Any) -> None:
    """Batches of two samples and of one, and one sample in each task."""
    suite = clip_suite()
    inputs = {task: [*batches, cut(batches[0], slice(1))] for task, batches in suite.inputs.items()}
    assert_as_one_process(replace(suite, inputs=inputs), (2,), {"rule": rule})
    assert_as_one_process(first_of_each(suite), (2,), {"rule": rule, "samples_per_task": 1})


@NEEDS_RELEASE_5
@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("rule", RULES, ids=["paper", "plus"])
def test_processes_share_the_tokens_of_a_task_in_a_mixture(rule: Any) -> None:
    """Some tokens of a task reach a routed expert in other processes only."""
    suite = mixture_suite("qwen3_moe", ([6, 7], [4]), ([5, 3],), slots=6)
    settings: dict[str, Any] = {"samples_per_task": 3, "rule": rule}
    expected = run_fast(suite, **settings)
    results = together(suite, 3, **settings)
    assert_one_model(results)
    assert_same(results[0].model, expected.model, 1e-11)


def test_experts_are_read_where_their_tasks_have_samples():
    suite = clip_suite(tasks=2)

    def work(processes: TorchProcesses) -> list[str]:
        experts: Any = {task: Overheard(expert) for task, expert in suite.experts.items()}
        run_fast(replace(suite, experts=experts), processes=processes, rule=Plus())
        return [task for task, expert in experts.items() if expert.read]

    assert in_processes(2, work) == [["task_0"], ["task_1"]]
    assert in_processes(3, work) == [["task_0", "task_1"]] * 3


def test_more_processes_than_batches_are_refused():
    suite = first_of_each(clip_suite(tasks=2))
    for error in together(suite, 3):
        assert "only 2 of 3 processes would get a batch of samples. Start at most 2" in str(error)
        assert "smaller batches: batch_size" in str(error)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_a_run_of_shared_batches_resumes_after_a_kill(blocks: int, tmp_path: Path) -> None:
    """Whichever process is killed, and after whichever block, the resumed run has the same bits."""
    suite = alone(t5_suite(depths=(1, 2)))
    expected = together(suite, 3)
    for rank in range(3):
        folder = tmp_path / str(rank)
        results = in_processes(3, failing_after(suite, rank, folder, die, blocks=blocks))
        assert results.pop(rank) == -signal.SIGKILL
        assert all(isinstance(error, LostProcessError) for error in results)
        assert finished_blocks(folder) == blocks + (rank > 0)  # the first process writes
        resumed = together(suite, 3, checkpoint_dir=str(folder), resume=True)
        assert_one_model(resumed)
        assert_identical(resumed[0].model, expected[0].model)


def test_a_full_disk_is_named_by_the_process_that_writes(tmp_path: Path):
    suite = alone(t5_suite(depths=(1, 2)))
    run = failing_after(suite, 0, tmp_path, lambda: largest_file(512))

    def work(processes: TorchProcesses) -> Any:
        try:
            return run(processes)
        finally:
            largest_file(resource.RLIM_INFINITY)  # the test's own files

    first, *others = in_processes(3, work)
    assert "it cannot be written" in str(first) and "are free" in str(first)
    assert all(isinstance(error, LostProcessError) for error in others)
    assert finished_blocks(tmp_path) == 1
    results = together(suite, 3, checkpoint_dir=str(tmp_path), resume=True)
    assert_identical(results[0].model, together(suite, 3)[0].model)


def test_small_tensors_of_one_dtype_travel_together():
    small, wide, large = torch.ones(3), torch.ones(2).double(), torch.ones(SMALL_BYTES)
    joined = join_small([small, large, wide, small[:2]])
    assert [[t.numel() for t in tensors] for tensors in joined] == [[SMALL_BYTES], [3, 2], [2]]

    def work(processes: TorchProcesses) -> Any:
        tensors = [torch.full((2, 3), 1.0 + processes.rank).T, torch.tensor(processes.rank)]
        processes.all_reduce_sum(tensors)
        reduced = torch.tensor([1.0, 2.0])
        processes.reduce_sum([reduced], 1)
        computed = processes.compute_all(3, lambda n: (n, processes.rank))
        return tensors, reduced, computed

    for rank, (tensors, reduced, computed) in enumerate(in_processes(2, work)):
        assert computed == [(0, 0), (1, 1), (2, 0)]
        assert torch.equal(tensors[0], torch.full((3, 2), 3.0)) and tensors[1] == 1
        assert rank == 0 or torch.equal(reduced, torch.tensor([2.0, 4.0]))
    assert Processes().sum_counts({"a": 1, "b": 0}) == {"a": 1, "b": 0}
