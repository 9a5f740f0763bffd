"""Work of several processes: dealt out evenly, every batch once."""

from itertools import chain

import pytest
import torch

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.core import LinearSums
from fusion_bench_featcal.engine.task_sums import TaskSums
from fusion_bench_featcal.engine.team import Shares, Team, spread_costs
from fusion_bench_featcal.processes import Processes


def test_dearest_work_is_dealt_out_first() -> None:
    assert spread_costs([1, 1, 1, 9], (0, 1)) == [1, 1, 1, 0]
    assert spread_costs([5, 5, 5, 5], (0, 1)) == [0, 1, 0, 1]
    assert spread_costs([2, 0, 0], (0, 1, 2)) == [0, 1, 1]
    assert spread_costs([], (0,)) == []


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_every_batch_is_run_once_and_every_task_has_one_leader(size: int) -> None:
    tasks = ("a", "b", "c")
    shares = [Shares(tasks, rank, size) for rank in range(size)]
    assert [share.mine[0] for share in shares] == [tasks[rank % 3] for rank in range(size)]
    counts = [len(share.mine) for share in shares]
    assert max(counts) - min(counts) <= 1
    for task in tasks:
        pieces = [list(share.cut(task, range(7))) for share in shares if task in share.mine]
        assert sorted(chain(*pieces)) == list(range(7))
        assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
        assert sum(share.leads and task in share.mine for share in shares) == 1


class BesideAnother(Processes):
    """The first of two processes; what the second one says is known."""

    size = 2

    def gather(self, value: object) -> list[object]:
        return [value, ([("q", "k")], [((3, 3), torch.float32)])]


def test_task_that_cannot_be_divided_is_refused() -> None:
    sums = TaskSums("block", "a", (), demo_weights=False)
    sums.linear[("q", "k")] = LinearSums(torch.ones(3), mix_alpha=0.0, expert_weights=None)
    message = r"task a, block block: .* in process 1 than in process 0.* fabric\.devices to at most"
    with pytest.raises(CalibrationError, match=message):
        Team(BesideAnother(), Shares(("a",), 0, 2)).combine(sums, torch.device("cpu"))
