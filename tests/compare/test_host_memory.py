"""Peak memory of a process and its children, with a real child and with readings that are given."""

import subprocess
import sys

import pytest

from fusion_bench_featcal.compare import UNAVAILABLE
from fusion_bench_featcal.compare.host_memory import HostMemory, best_reading

MEBIBYTE = 2**20
# Says when its memory is filled, and goes when its input ends.
CHILD = f"block = bytearray(b'x') * {96 * MEBIBYTE}; print('filled', flush=True); input()"


def run_child(wait_for_sample: bool) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "filled\n"
    if wait_for_sample:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=1.0)
    child.communicate("\n")


def test_memory_of_a_child_counts() -> None:
    with HostMemory() as without:
        pass
    with HostMemory() as memory:
        run_child(wait_for_sample=True)
    assert isinstance(without.peak, int) and isinstance(memory.peak, int)
    assert memory.method == "sampled"
    assert memory.peak > without.peak + 96 * MEBIBYTE


def test_a_child_that_no_sample_saw_is_not_passed_over_as_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fusion_bench_featcal.compare.host_memory.CHILDREN_EVERY_SECONDS", 1e6)
    with HostMemory() as memory:
        block = bytearray(b"x") * (64 * MEBIBYTE)
        run_child(wait_for_sample=False)
    assert len(block) == 64 * MEBIBYTE
    assert memory.method == "sampled"


@pytest.mark.parametrize(
    ("readings", "had_children", "expected"),
    [
        # The process's record was broken inside the block: exact.
        ((100, 150, 140), False, (150, "kernel")),
        # It was not: only samples speak about the block.
        ((100, 100, 80), False, (80, "sampled")),
        # Children are in the samples alone, but the record is still a lower bound.
        ((100, 150, 170), True, (170, "sampled")),
        ((100, 150, 140), True, (150, "sampled")),
        ((100, 100, None), False, (100, "process lifetime")),
        ((None, None, 80), False, (80, "sampled")),
        ((None, None, None), True, (UNAVAILABLE, UNAVAILABLE)),
    ],
)
def test_the_best_reading_is_chosen_and_named(
    readings: tuple[int | None, int | None, int | None], had_children: bool, expected: tuple
) -> None:
    assert best_reading(*readings, had_children) == expected
