"""Time per sample, with a clock that models move."""

from contextlib import nullcontext
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion_bench_featcal.lab.compare import inference
from fusion_bench_featcal.lab.compare.inference import BATCH, REPEATS, InferenceTimer, on_one_clock

FABRIC = SimpleNamespace(device=torch.device("cpu"), autocast=nullcontext)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake = SimpleNamespace(perf_counter=lambda: fake.now, now=0.0)
    monkeypatch.setattr(inference, "time", fake)
    return fake


class Tower(nn.Module):
    """Returns its input as pooled output and takes the given times, the last one repeatedly."""

    def __init__(self, clock: Any, *seconds: float) -> None:
        super().__init__()
        self.clock, self.times = clock, chain(seconds, repeat(seconds[-1]))

    def forward(self, pixels: Tensor) -> Tensor:
        self.clock.now += next(self.times)
        return pixels


def timed(model: Tower, images: int = 100, reference: Any = (1.0,)) -> Any:
    """Time a model whose reference takes the given times."""
    loader = SimpleNamespace(dataset=[(torch.ones(4), 0)] * images)
    clip = SimpleNamespace(visual_projection=nn.Linear(4, 4))
    pool: Any = SimpleNamespace(test_dataloaders={"first": loader}, clip_model=clip)
    return InferenceTimer(pool, FABRIC, lambda: Tower(model.clock, *reference)).time(model)


def test_the_time_of_a_sample_is_that_of_a_median_batch(clock: Any) -> None:
    """The first batch warms up, and a slow model runs only twice."""
    assert timed(Tower(clock, 0.2, 0.016, 0.004, 0.008)).seconds == pytest.approx(0.008 / BATCH)
    assert timed(Tower(clock, 9.0, 7.0, 900.0), images=2).seconds == pytest.approx(7.0 / 2)


def test_a_machine_that_slows_down_changes_no_ratio(clock: Any) -> None:
    slowing = [0.002 * 1.2**n for n in range(1 + REPEATS)]
    fast = timed(Tower(clock, *slowing), reference=slowing)
    slow = timed(Tower(clock, 1.0), reference=[0.5])
    assert (fast.relative, slow.relative) == pytest.approx((1, 2))
    first, second = on_one_clock([fast, slow])
    assert second / first == pytest.approx(2)
