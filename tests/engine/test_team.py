from typing import Any

import pytest
import torch

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.core import LinearSums
from fusion_bench_featcal.engine.processes import OneProcess
from fusion_bench_featcal.engine.shares import Shares
from fusion_bench_featcal.engine.task_sums import TaskSums
from fusion_bench_featcal.engine.team import Team, spread_costs


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
