"""Time per sample, with a clock that models move."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion_bench_featcal.lab.compare import inference
from fusion_bench_featcal.lab.compare.inference import (
    BATCH,
    REPEATS,
    InferenceTimer,
    Timed,
    on_one_clock,
)
from fusion_bench_featcal.lab.rivals import CorrectedModel, SurgeryModule

FABRIC = SimpleNamespace(device=torch.device("cpu"), autocast=nullcontext)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(perf_counter=lambda: made.now, now=0.0)
    monkeypatch.setattr(inference, "time", made)
    return made


class Tower(nn.Module):
    """Gives its input as pooled output and takes the given times, the last one again and again."""

    def __init__(self, clock: Any, *seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds, self.calls, self.seen = clock, seconds, 0, 0

    def forward(self, pixels: Tensor) -> Tensor:
        self.clock.now += self.seconds[min(self.calls, len(self.seconds) - 1)]
        self.calls += 1
        self.seen = len(pixels)
        return pixels


def images(number: int, *sizes: int) -> Any:
    return [(torch.ones(sizes[i % len(sizes)]), 0) for i in range(number)]


def pool(items: Any, **changes: Any) -> Any:
    loaders = {"first": SimpleNamespace(dataset=items), "second": None}
    clip = SimpleNamespace(visual_projection=nn.Linear(4, 4))
    return SimpleNamespace(**{"test_dataloaders": loaders, "clip_model": clip} | changes)


def timer(clock: SimpleNamespace, taskpool: Any, *seconds: float) -> InferenceTimer:
    """A timer whose reference takes the given times; nothing by default."""
    return InferenceTimer(taskpool, FABRIC, lambda: Tower(clock, *(seconds or [1.0])))


def seconds_of(timed: Timed | None) -> float:
    assert timed is not None
    return timed.seconds


def test_median_without_the_first_call_divided_by_the_batch(clock: SimpleNamespace) -> None:
    model = Tower(clock, 0.2, 0.016, 0.004, 0.008)
    timed = seconds_of(timer(clock, pool(images(100, 4))).time(model))
    assert timed == pytest.approx(0.008 / BATCH)
    assert (model.calls, model.seen) == (1 + REPEATS, BATCH)


def test_a_machine_that_slows_down_changes_no_ratio(clock: SimpleNamespace) -> None:
    slowing = [0.002 * 1.2**n for n in range(1 + REPEATS)]
    taskpool = pool(images(100, 4))
    fast = timer(clock, taskpool, *slowing).time(Tower(clock, *slowing))
    slow = timer(clock, taskpool, 0.5).time(Tower(clock, 1.0))
    assert fast is not None and slow is not None
    assert (fast.relative, slow.relative) == pytest.approx((1, 2))
    assert fast.relative is not None and slow.relative is not None
    first, second = on_one_clock([(fast.seconds, fast.relative), (slow.seconds, slow.relative)])
    assert second / first == pytest.approx(2)


def test_a_device_without_room_for_the_reference_times_the_model_alone(
    clock: SimpleNamespace,
) -> None:
    def too_large() -> nn.Module:
        raise torch.OutOfMemoryError

    timed = InferenceTimer(pool(images(100, 4)), FABRIC, too_large).time(Tower(clock, 0.016))
    assert timed == pytest.approx(Timed(0.001, None))


def test_a_slow_model_runs_twice(clock: SimpleNamespace) -> None:
    model = Tower(clock, 9.0, 7.0)
    timed = seconds_of(timer(clock, pool(images(2, 4))).time(model))
    assert timed == pytest.approx(7.0 / 2)
    assert model.calls == 2


@pytest.mark.parametrize("normalize", ["none", "pre"])
def test_a_correction_is_part_of_it(clock: SimpleNamespace, normalize: str) -> None:
    class Slow(SurgeryModule):
        def forward(self, features: Tensor) -> Tensor:
            clock.now += 0.016
            return super().forward(features)

    projection = nn.Linear(4, 4, bias=False)
    correction = Slow(torch.zeros(2, 4), torch.zeros(4, 2))
    model = CorrectedModel(
        Tower(clock, 0.032), projection, {"first": correction}, normalize=normalize
    )
    timed = timer(clock, pool(images(100, 4)), 0.032)
    assert seconds_of(timed.time(model.model)) == pytest.approx(0.032 / BATCH)
    assert timed.time(model) == pytest.approx(Timed(0.048 / BATCH, 1.5))


def test_surgery_models_of_others_are_asked_as_fusion_bench_does(clock: SimpleNamespace) -> None:
    class Other(Tower):
        is_surgery_model = True

        def compute_surgery_features(self, compute: Any, dataset_name: str) -> tuple[Tensor, ...]:
            assert dataset_name == "first"
            clock.now += 0.016
            return (compute(self),)

    timed = timer(clock, pool(images(100, 4))).time(Other(clock, 0.016))
    assert seconds_of(timed) == pytest.approx(0.032 / BATCH)


@pytest.mark.parametrize(
    "taskpool",
    [
        SimpleNamespace(),
        pool(images(20, 4), clip_model=None),
        pool([]),
        pool([{"text": "no image"}]),
        pool([("text", 0)]),
        pool(images(20, 4, 5)),
        pool(None),
    ],
)
def test_what_cannot_be_timed_is_unavailable(clock: SimpleNamespace, taskpool: Any) -> None:
    model = Tower(clock, 1.0)
    assert timer(clock, taskpool).time(model) is None
    assert model.calls == 0
