"""Chains of errors that contain a cycle end."""

import errno

import pytest
from hydra.errors import InstantiationException

from fusion_bench_featcal.errors.block import causes, error_block, first_line
from fusion_bench_featcal.models.hub import hub_cause, hub_error


def cycle(first: Exception, second: Exception) -> Exception:
    """Two errors of which each was raised from or while handling the other."""
    first.__cause__, second.__context__ = second, first
    return first


def test_a_cycle_of_errors_is_walked_once():
    first, second = ValueError("first"), ValueError("second")
    assert list(causes(cycle(first, second))) == [first, second]
    assert list(causes(None)) == []


@pytest.mark.parametrize(
    ("second", "of_hub"), [(ValueError("second"), False), (TimeoutError("away"), True)]
)
def test_errors_of_the_hub_are_found_in_a_cycle(second: Exception, of_hub: bool):
    error = cycle(RuntimeError("first"), second)
    assert (hub_cause(error) is not None) == of_hub
    reason = "does not answer" if of_hub else "--base one: first"
    assert reason in str(hub_error(error, "--base one"))


def test_a_full_disk_is_found_behind_a_cycle():
    inner = cycle(RuntimeError("first"), OSError(errno.ENOSPC, "no space"))
    outer = RuntimeError("outer")
    outer.__cause__ = inner
    assert "no room on the disk" in str(hub_error(outer, "--base one"))


def test_a_wrapper_of_hydra_is_described_by_its_cause_also_in_a_cycle():
    error = cycle(InstantiationException("wrapper"), ValueError("the cause"))
    assert first_line(error) == "the cause"
    assert "the cause" in error_block(error)
    alone = cycle(InstantiationException("one"), InstantiationException("two"))
    assert first_line(alone) == "one"
