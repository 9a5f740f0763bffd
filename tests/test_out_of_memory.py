"""Errors of lacking memory say where it ran out and which setting to lower."""

import errno
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import run_fast
from tiny_models import clip_suite, residual_suite
from torch import nn

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


def raise_in(module: nn.Module, error: Exception, calls: int = 0) -> None:
    """Let a module raise once it has run so many times."""
    ran = []

    def fail(_: nn.Module, args: tuple[Any, ...]) -> None:
        ran.append(1)
        if len(ran) > calls and not args[0].is_meta:
            raise error

    module.register_forward_pre_hook(fail)


@pytest.mark.parametrize("make", LACKING, ids=lambda make: type(make()).__name__)
def test_place_and_settings_are_named(make: Callable[[], Exception]):
    suite = clip_suite()
    error = make()
    raise_in(suite.merged.get_submodule(suite.blocks[1] + ".mlp.fc1"), error, calls=1)
    with pytest.raises(CalibrationError) as raised:
        run_fast(suite)
    message = str(raised.value)
    assert raised.value.__cause__ is error
    assert f"out of memory (cpu) at {suite.blocks[1]} · task_0" in message
    assert "method.activations=disk" in message
    assert "method.batch_size" in message
    assert "method.modules" in message


def test_features_on_disk_are_removed(tmp_path: Path):
    suite = clip_suite()
    raise_in(suite.merged.get_submodule(suite.blocks[0]), MemoryError())
    with pytest.raises(CalibrationError, match=r"method\.batch_size"):
        run_fast(suite, activations="disk", activations_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_before_any_sample_was_seen_all_settings_are_named():
    suite = residual_suite()

    class NoRoom:
        def __iter__(self) -> Iterator[Any]:
            raise MemoryError

    inputs: Any = {"task_0": NoRoom(), "task_1": NoRoom()}
    with pytest.raises(CalibrationError, match=r"inputs · task_0.*samples_per_task"):
        run_fast(replace(suite, inputs=inputs), samples_per_task=4)


def test_blocks_of_the_model_that_do_not_fit(monkeypatch: Any):
    suite = residual_suite()

    def no_room(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(WorkingModel, "tensor", no_room)
    with pytest.raises(CalibrationError, match=rf"at {suite.blocks[0]}: .*stream_experts"):
        run_fast(suite)


def test_other_errors_pass_as_they_are():
    suite = clip_suite()
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    raise_in(suite.merged.get_submodule(suite.blocks[0]), error, calls=1)
    with pytest.raises(RuntimeError) as raised:
        run_fast(suite)
    assert raised.value is error
    assert not is_out_of_memory(ValueError("memory"))


@pytest.mark.parametrize(("at_once", "parts"), [("block", [[0, 1, 2]]), ("input", [[0], [2], [1]])])
def test_largest_sums_come_first_behind_the_part_in_which_experts_run(
    at_once: str, parts: list[list[int]]
):
    assert divided([1, 2, 3], at_once, torch.device("cpu")) == parts


def test_finished_blocks_stay_whole(tmp_path: Path):
    suite = clip_suite()
    whole = run_fast(suite).model
    raise_in(suite.merged.get_submodule(suite.blocks[1]), MemoryError())
    with pytest.raises(CalibrationError, match=rf"out of memory \(cpu\) at {suite.blocks[1]}: "):
        run_fast(suite, checkpoint_dir=tmp_path)
    assert not list(tmp_path.glob("*.part"))
    resumed = run_fast(clip_suite(), checkpoint_dir=tmp_path, resume=True).model
    for name, value in resumed.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name


_LIMITED = """
import resource, sys, torch, transformers.pytorch_utils
from fusion_bench_featcal import CalibrationError, FeatCalSettings, calibrate
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(2))
    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x).repeat(1, 4000)).reshape(len(x), 4000, 256).mean(1)
        return x

torch.manual_seed(0)
model = Net()
settings = FeatCalSettings(
    samples_per_task=512, batch_size=512, family={"name": "replay", "blocks": ["blocks.*"]}
)
def data():
    yield torch.randn(512, 256)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
try:
    calibrate(model, model, {"one": model}, {"one": data()}, settings, progress=False)
except CalibrationError as error:
    print(error)
"""


@pytest.mark.slow
def test_memory_that_really_runs_out():
    done = subprocess.run([sys.executable, "-c", _LIMITED], capture_output=True, text=True)
    assert "out of memory (cpu) at blocks." in done.stdout, done.stdout + done.stderr
    assert "method." in done.stdout
