import pytest

from fusion_bench_featcal.engine.shares import Shares, interleaved

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
        assert interleaved(parts) == list(range(7))
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
    told = [{"a": 0}, {"b": 1}, {"c": 2}, {"a": 3}, {"b": 4}]
    assert list(shares.collected(told).items()) == [("a", [0, 3]), ("b", [1, 4]), ("c", [2])]
