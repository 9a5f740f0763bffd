"""Work in threads: the same results in the same order, no more at a time than was allowed."""

import os
import random
import threading
import time
from typing import Any

import pytest

from fusion_bench_featcal.data.read_ahead import automatic_workers, in_order


def identity(value: Any) -> Any:
    return value


def helpers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("featcal-images")]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_results_come_in_order(workers):
    pauses = random.Random(0)

    def work(value: int) -> int:
        time.sleep(pauses.random() / 500)
        return value * value

    found = in_order(identity, work, range(50), workers=workers, ahead=7)
    assert list(found) == [value * value for value in range(50)]
    assert not helpers()


def test_reading_stays_in_the_callers_thread_and_work_does_not():
    readers, workers = set(), set()

    def read(value: int) -> int:
        readers.add(threading.get_ident())
        return value

    def work(value: int) -> int:
        workers.add(threading.get_ident())
        return value

    list(in_order(read, work, range(20), workers=2, ahead=4))
    assert readers == {threading.get_ident()}
    assert threading.get_ident() not in workers


def test_no_more_results_wait_than_allowed():
    begun: list[int] = []
    found = in_order(lambda key: begun.append(key), identity, range(100), workers=2, ahead=5)
    for taken in range(1, 11):
        next(found)
        assert len(begun) <= taken + 5
    found.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_error_comes_when_its_result_is_due(workers):
    def fails(value: int) -> int:
        if value == 6:
            raise ValueError(f"item {value}")
        if value == 9:
            raise OSError("a later one")
        return value

    found = in_order(identity, fails, range(20), workers=workers, ahead=4)
    assert [next(found) for _ in range(6)] == list(range(6))
    with pytest.raises(ValueError, match="item 6"):
        next(found)
    assert not helpers()


def test_closing_drops_what_was_not_begun():
    done: list[int] = []

    def work(value: int) -> None:
        time.sleep(0.002)
        done.append(value)

    found = in_order(identity, work, range(1000), workers=2, ahead=500)
    next(found)
    found.close()
    assert not helpers()
    assert len(done) < 500


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_failing_read_stops_at_once_and_leaves_no_thread(kind):
    def read(value: int) -> int:
        if value == 10:
            raise kind
        return value

    with pytest.raises(kind):
        list(in_order(read, identity, range(20), workers=2, ahead=4))
    assert not helpers()


@pytest.mark.parametrize(("cores", "workers"), [(1, 0), (2, 2), (64, 8)])
@pytest.mark.parametrize("has_affinity", [True, False])
def test_automatic_number_is_one_per_core_up_to_eight(monkeypatch, cores, workers, has_affinity):
    if has_affinity:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    else:
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert automatic_workers() == workers
