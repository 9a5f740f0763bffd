"""Errors of lacking memory say where it ran out and which setting to lower."""

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import assert_identical, run_fast
from tiny_models import Suite, clip_suite, residual_suite

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.experts.working_model import WorkingModel
from fusion_bench_featcal.memory import divided, is_out_of_memory

ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
)
LACKING: list[Callable[[], Exception]] = [
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    lambda: RuntimeError(ALLOCATOR),
    MemoryError,
    lambda: OSError(errno.ENOMEM, "Cannot allocate memory"),
]


def failing(error: Exception, name: str, calls: int = 0) -> Suite:
    """A suite of which one of the merged model's modules raises once it has run so many times."""
    suite, ran = clip_suite(), []

    def fail(_: Any, args: tuple[Any, ...]) -> None:
        ran.append(1)
        if len(ran) > calls and not args[0].is_meta:
            raise error

    suite.merged.get_submodule(name).register_forward_pre_hook(fail)
    return suite


FIRST, SECOND = clip_suite().blocks


@pytest.mark.parametrize("make", LACKING, ids=lambda make: type(make()).__name__)
def test_place_and_settings_are_named(make: Callable[[], Exception]):
    error = make()
    with pytest.raises(CalibrationError) as raised:
        run_fast(failing(error, f"{SECOND}.mlp.fc1", calls=1))
    message = str(raised.value)
    assert raised.value.__cause__ is error
    for words in (f"out of memory (cpu) at {SECOND} · task_0", "method.activations=disk",
                  "method.batch_size", "method.modules"):  # fmt: skip
        assert words in message


def test_before_any_sample_was_seen_all_settings_are_named():
    class NoRoom:
        def __iter__(self) -> Iterator[Any]:
            raise MemoryError

    inputs: Any = {"task_0": NoRoom(), "task_1": NoRoom()}
    with pytest.raises(CalibrationError, match=r"inputs · task_0.*samples_per_task"):
        run_fast(replace(residual_suite(), inputs=inputs), samples_per_task=4)


def test_blocks_of_the_model_that_do_not_fit(monkeypatch: Any):
    def no_room(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(WorkingModel, "tensor", no_room)
    with pytest.raises(CalibrationError, match=r"at layers\.0: .*stream_experts"):
        run_fast(residual_suite())


def test_other_errors_pass_as_they_are():
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError) as raised:
        run_fast(failing(error, FIRST, calls=1))
    assert raised.value is error
    assert not is_out_of_memory(ValueError("memory"))


@pytest.mark.parametrize(("at_once", "parts"), [("block", [[0, 1, 2]]), ("input", [[0], [2], [1]])])
def test_largest_sums_come_first_behind_the_part_in_which_experts_run(
    at_once: str, parts: list[list[int]]
):
    assert divided([1, 2, 3], at_once, torch.device("cpu")) == parts


def test_features_on_disk_are_removed_and_finished_blocks_stay(tmp_path: Path):
    blocks, activations = tmp_path / "blocks", tmp_path / "activations"
    disk: dict[str, Any] = {"activations": "disk", "activations_dir": activations}
    with pytest.raises(CalibrationError, match=rf"out of memory \(cpu\) at {SECOND}: "):
        run_fast(failing(MemoryError(), SECOND), checkpoint_dir=blocks, **disk)
    assert not list(blocks.glob("*.part")) and not list(activations.iterdir())
    resumed = run_fast(clip_suite(), checkpoint_dir=blocks, resume=True)
    assert resumed.log.of_kind("resumed")
    assert_identical(resumed.model, run_fast(clip_suite()).model)
