"""Freed memory is held while a calibration runs on the CPU, and let go when it ends."""

import os

import pytest
import torch

from fusion_bench_featcal.engine import heap
from fusion_bench_featcal.engine.heap import holding_freed_memory

CPU = torch.device("cpu")


class Library:
    """A C library that writes down what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def mallopt(self, option: int, value: int) -> int:
        self.asked.append((option, value))
        return 1

    def malloc_trim(self, left: int) -> int:
        self.asked.append((left,))
        return 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setattr(heap, "glibc", lambda: found)
    for name in [n for n in os.environ if n.startswith("MALLOC_") or n == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)
    return found


def test_memory_is_held_and_let_go_after_an_error_too(library: Library):
    held: list[tuple[int, ...]] = []
    with pytest.raises(KeyError), holding_freed_memory(CPU):
        held += library.asked
        assert {option for option, _ in held} == {-1, -3}
        assert dict(held) == {-1: -1, -3: 2**30}  # type: ignore[arg-type]
        raise KeyError
    after = library.asked[len(held) :]
    assert after[-1] == (0,)
    assert dict(after[:-1]) == {-1: 2**26, -3: 2**25}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "1000"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1000")],
)
def test_who_says_how_memory_is_allocated_is_heeded(
    library: Library, name: str, value: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(name, value)
    with holding_freed_memory(CPU):
        assert not library.asked
    assert not library.asked


def test_other_devices_and_libraries_are_left_alone(
    library: Library, monkeypatch: pytest.MonkeyPatch
):
    with holding_freed_memory(torch.device("cuda")):
        pass
    monkeypatch.setattr(heap, "glibc", lambda: None)
    with holding_freed_memory(CPU):
        pass
    assert not library.asked


@pytest.mark.skipif(heap.glibc() is None, reason="needs glibc")
def test_glibc_takes_the_settings():
    libc = heap.glibc()
    try:
        assert libc.mallopt(-3, 2**30) == 1 or libc.mallopt(-3, 2**25) == 1
        assert libc.mallopt(-1, -1) == 1
    finally:
        libc.mallopt(-3, 2**25)
        libc.mallopt(-1, 2**26)


def test_an_older_glibc_holds_what_it_can(library: Library, monkeypatch: pytest.MonkeyPatch):
    def mallopt(option: int, value: int) -> int:
        library.asked.append((option, value))
        return int(value <= 2**25)

    monkeypatch.setattr(library, "mallopt", mallopt)
    with holding_freed_memory(CPU):
        assert library.asked == [(-3, 2**30), (-3, 2**25), (-1, -1)]
