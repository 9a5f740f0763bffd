"""Rivals of FeatCal: a run of one of them, and slow versions of how they are trained."""

import hashlib
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.fusionbench.method import run_method
from fusion_bench_featcal.lab import rivals

DRAW: dict[str, Any] = {"samples_per_task": 8, "batch_size": 4}
"""Settings that every rival with data takes."""


def applied(kind: str, inputs: Any, merged: Any, **settings: Any) -> tuple[Any, Any]:
    """A method and its result: mergers merge the pool's experts, others improve `merged`."""
    method = getattr(rivals, kind)(**settings)
    return method, run_method(method, None if hasattr(method, "merge") else merged, inputs)


def generator(seed: int, task: str, purpose: str) -> torch.Generator:
    """The random numbers of a task, as they are documented: from its name, the seed and the use."""
    digest = hashlib.sha256(f"{seed}:{task}:{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def trained_by_hand(features: Mapping[str, tuple[Tensor, Tensor]], method: Any) -> dict[str, Any]:
    """Modules `task -> (down, up)` and losses, from features `[n, d]` of merged and expert."""
    width = next(iter(features.values()))[0].shape[1]
    modules = {task: _start(task, width, method) for task in features}
    positions = {
        task: _batches(len(merged), method, task) for task, (merged, _) in features.items()
    }
    noise = {task: generator(method.seed, task, "noise") for task in features}
    losses: dict[str, list[float]] = {task: [] for task in features}
    adam = torch.optim.Adam(chain(*modules.values()), lr=method.learning_rate)
    for step in range(method.steps):
        for task, (merged, expert) in features.items():
            weights, rows = modules[task], positions[task][step]
            loss = _loss(weights, merged[rows], expert[rows], method, noise[task])
            losses[task].append(loss.item())
            adam.zero_grad(set_to_none=False)  # the other tasks' modules move by their momentum
            loss.backward()
            adam.step()
    result = {t: [w.detach() for w in weights[:2]] for t, weights in modules.items()}
    return {"modules": result, "losses": losses}


def _start(name: str, width: int, method: Any) -> list[Tensor]:
    """A random map down, and maps up that are zero: ProbSurgery has a second one."""
    random = method.name == "prob_surgery"
    hidden, bound = method.hidden if random else method.rank, width**-0.5
    numbers = generator(method.seed, name, "weights")
    down = torch.empty(hidden, width).uniform_(-bound, bound, generator=numbers)
    zeros = [torch.zeros(width, hidden) for _ in range(1 + random)]
    return [weight.requires_grad_() for weight in (down, *zeros)]


def _batches(samples: int, method: Any, task: str) -> list[Tensor]:
    """Positions of every update, which are shuffled again for each pass."""
    numbers, result = generator(method.seed, task, "batches"), []
    while len(result) < method.steps:
        result += torch.randperm(samples, generator=numbers).split(method.batch_size)
    return result


def _loss(weights: list[Tensor], x: Tensor, target: Tensor, method: Any, noise: Any) -> Tensor:
    inner = torch.relu(x @ weights[0].T)
    drift = inner @ weights[1].T
    if method.name != "prob_surgery":
        return (x - drift - target).abs().mean()
    mean, deviation = drift, (inner @ weights[2].T / 2).exp()
    drift = mean + deviation * torch.randn(mean.shape, generator=noise)
    noisy, plain = torch.distributions.Normal(mean, deviation), torch.distributions.Normal(0.0, 1.0)
    divergence = torch.distributions.kl_divergence(noisy, plain).sum(1).mean()
    return (x - drift - target).abs().mean() + method.kl_weight * divergence
