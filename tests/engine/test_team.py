from itertools import chain
from typing import Any

import pytest
import torch

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.core import LinearSums
from fusion_bench_featcal.engine.processes import OneProcess
from fusion_bench_featcal.engine.task_sums import TaskSums
from fusion_bench_featcal.engine.team import Shares, Team, spread_costs


def test_dearest_work_is_dealt_out_first() -> None:
    assert spread_costs([1, 1, 1, 9], (0, 1)) == [1, 1, 1, 0]
    assert spread_costs([5, 5, 5, 5], (0, 1)) == [0, 1, 0, 1]
    assert spread_costs([2, 0, 0], (0, 1, 2)) == [0, 1, 1]
    assert spread_costs([], (0,)) == []


class Answering(OneProcess):
    """The first of two processes; what the second one says is known."""

    size = 2

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def gather(self, value: Any) -> list[Any]:
        return [value, self.answers.pop(0)]


def sums_of(names: tuple[str, ...]) -> TaskSums:
    sums = TaskSums("block", "a", (), demo_weights=False)
    sums.linear[names] = LinearSums(torch.ones(3), mix_alpha=0.0, expert_weights=None)
    return sums


def test_task_that_cannot_be_divided_is_refused() -> None:
    processes = Answering(([("q", "k")], [((3, 3), torch.float32)]))
    message = r"task a, block block: .* in process 1 than in process 0.* fabric\.devices to at most"
    with pytest.raises(CalibrationError, match=message):
        Team(processes, Shares(("a",), 0, 2)).combine(sums_of(("q", "k")), torch.device("cpu"))


def test_task_of_one_process_is_left_as_it_is() -> None:
    sums = sums_of(("q",))
    before = sums.linear[("q",)]
    assert Team(Answering(), Shares(("a", "b"), 0, 2)).combine(sums, torch.device("cpu"))
    assert sums.linear == {("q",): before}


TASKS = ("a", "b", "c")


@pytest.mark.parametrize(
    ("size", "mine"),
    [
        (1, [TASKS]),
        (2, [("a", "c"), ("b",)]),
        (3, [("a",), ("b",), ("c",)]),
        (5, [("a",), ("b",), ("c",), ("a",), ("b",)]),
    ],
)
def test_tasks_are_dealt_out_in_turn(size: int, mine: list[tuple[str, ...]]) -> None:
    assert [Shares(TASKS, rank, size).mine for rank in range(size)] == mine


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_every_batch_is_run_once(size: int) -> None:
    shares = [Shares(TASKS, rank, size) for rank in range(size)]
    for task in TASKS:
        members = shares[0].members(task)
        parts = [list(shares[rank].cut(task, range(7))) for rank in members]
        assert sorted(chain(*parts)) == list(range(7))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        for rank in set(range(size)) - set(members):
            assert not list(shares[rank].cut(task, range(7)))


def test_every_task_has_one_leader() -> None:
    shares = [Shares(TASKS, rank, 5) for rank in range(5)]
    assert shares[0].leaders == (0, 1, 2)
    assert [s.leads for s in shares] == [True, True, True, False, False]
    assert shares[0].groups() == [(0, 1, 2), (0, 3), (1, 4), (2,)]
    assert all(s.divided for s in shares)
    assert not Shares(TASKS, 0, 3).divided


def test_what_processes_say_is_collected_by_task() -> None:
    shares = Shares(TASKS, 0, 5)
    gathered = [{"a": 0}, {"b": 1}, {"c": 2}, {"a": 3}, {"b": 4}]
    assert list(shares.collected(gathered).items()) == [("a", [0, 3]), ("b", [1, 4]), ("c", [2])]
