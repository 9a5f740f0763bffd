"""What a training leaves of its losses."""

import pytest
import torch

from fusion_bench_featcal.methods import SurgerySettings
from fusion_bench_featcal.methods.surgery import train_surgery
from fusion_bench_featcal.methods.training import CURVE_WINDOW, Losses


def curve_of(*values: float) -> list[tuple[int, float]]:
    losses = Losses()
    for step, value in enumerate(values, start=1):
        losses(step, torch.tensor(value))
    return losses.curve()


def test_a_point_before_training_and_one_for_every_window() -> None:
    first = [8.0, *[2.0] * (CURVE_WINDOW - 1)]
    assert curve_of(*first, 1.0, 3.0) == [
        (0, 8.0),
        (CURVE_WINDOW, (8.0 + 2.0 * (CURVE_WINDOW - 1)) / CURVE_WINDOW),
        (CURVE_WINDOW + 2, 2.0),
    ]
    assert curve_of() == []


def test_the_first_point_is_the_untrained_module_s_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    merged, expert = (torch.randn(6, 4, generator=generator) for _ in range(2))
    losses = Losses()
    # One batch holds all samples, and the untrained module corrects nothing.
    settings = SurgerySettings(rank=2, steps=45, batch_size=6, learning_rate=0.05)
    train_surgery(merged, expert, settings, on_step=losses)
    curve = losses.curve()
    assert [step for step, _ in curve] == [0, 20, 40, 45]
    assert curve[0][1] == pytest.approx(float((merged - expert).abs().mean()), rel=1e-5)
    assert curve[-1][1] < 0.9 * curve[0][1]
    assert len(losses.every()) == 45
