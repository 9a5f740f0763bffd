"""The training loop that all bundled suites share."""

import zlib
from collections import deque
from collections.abc import Callable
from statistics import fmean

import torch
from torch import Tensor, nn

Log = Callable[[str], None]
Weights = dict[str, Tensor]


def stage_generator(seed: int, stage: str) -> torch.Generator:
    """Return a separate generator for each stage, so that stages are independent."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{stage}".encode()))


def tensors_of(model: nn.Module) -> Weights:
    """Return the tensors that a model stores, tied tensors under their first name only."""
    stored = set(model.state_dict())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return {name: p.detach() for name, p in model.named_parameters()} | buffers


def train(
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    steps: int,
    gradient_clip: float,
    loss_and_accuracy: Callable[[], tuple[Tensor, float]],
    log: Log,
) -> None:
    """Take optimiser steps, and report every 100 of them.

    Args:
        optimiser: Holds the trained parameters, in one group.
        schedule: Its learning rate.
        steps: Number of steps.
        gradient_clip: Largest norm of the gradient.
        loss_and_accuracy: Gives the loss on a new batch, and the share of right answers.
        log: Called with each line of progress.
    """
    parameters: list[nn.Parameter] = optimiser.param_groups[0]["params"]
    recent: deque[float] = deque(maxlen=100)
    for step in range(1, steps + 1):
        loss, accuracy = loss_and_accuracy()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, gradient_clip)
        optimiser.step()
        schedule.step()
        recent.append(accuracy)
        if step % 100 == 0 or step == steps:
            log(f"  step {step}/{steps}: accuracy {fmean(recent):.3f} over the last steps")
