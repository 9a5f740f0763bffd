"""Rivals of FeatCal: one row each, and slow versions of how corrections are trained."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.lab import rivals


@dataclass(frozen=True)
class Rival:
    """One method of the matrix.

    Attributes:
        kind: Name of its class in `fusion_bench_featcal.lab.rivals`.
        few: Settings that make it short.
        nothing: Settings with which it changes nothing, if there are any.
        start: Share of all task vectors that it then adds to the base. Default: the merged model.
        texts: If it takes language models.
    """

    kind: str
    few: Mapping[str, Any] = field(default_factory=dict)
    nothing: Mapping[str, Any] | None = None
    start: float | None = None
    texts: bool = True

    @property
    def corrects(self) -> bool:
        return "Surgery" in self.kind

    def method(self, **settings: Any) -> Any:
        return getattr(rivals, self.kind)(**{**self.few, **settings})

    def run(self, inputs: Any, merged: Any, **settings: Any) -> tuple[Any, Any]:
        """The method, and its model of a pool: a merger makes it, others improve `merged`."""
        method = self.method(**settings)
        return method, method.merge(inputs) if self.merges else method.post_merge(merged, inputs)

    @property
    def merges(self) -> bool:
        return hasattr(getattr(rivals, self.kind), "merge")


DRAW: dict[str, Any] = {"samples_per_task": 8, "batch_size": 4}
TRAINED = DRAW | {"steps": 3}
STILL = {"learning_rate": 1e-30}
OURS = DRAW | {"stream": "calibration"}
RIVALS = {
    rival.kind: rival
    for rival in (
        Rival("AnchorOnly", {"anchor_rho": 2.0}, {"anchor_rho": 1.0}),
        Rival("FeatCal", DRAW, {"ridge_lambda": 1e12, "anchor_rho": 1.0}),
        Rival("Distillation", TRAINED, STILL),
        Rival("ProDistill", DRAW | {"epochs": 2}, STILL, start=0.3),
        Rival("RegMean", DRAW),
        Rival("RegMeanPlusPlus", DRAW),
        Rival("Lot", DRAW, {"scale": 1e-12}, start=0.0),
        Rival("RidgeSurgery", DRAW),
        Rival("Surgery", TRAINED | OURS, STILL),
        Rival("ProbSurgery", TRAINED | OURS | {"hidden": 5}, STILL),
        Rival("SurgeryV2", TRAINED | OURS | {"rank": 2}, STILL, texts=False),
    )
}


def generator(seed: int, task: str, purpose: str) -> torch.Generator:
    """The random numbers of a task, as they are documented: from its name, the seed and the use."""
    digest = hashlib.sha256(f"{seed}:{task}:{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def batches_of(samples: int, method: Any, task: str) -> list[Tensor]:
    """Positions of every update, which are shuffled again for each pass."""
    numbers, result = generator(method.seed, task, "batches"), []
    while len(result) < method.steps:
        result += torch.randperm(samples, generator=numbers).split(method.batch_size)
    return result[: method.steps]


class Adam:
    """Adam written out: one count of steps for a weight, from its first gradient on."""

    def __init__(self, rate: float) -> None:
        self.rate, self.state = rate, {}

    def step(self, weights: list[Tensor], gradients: Mapping[int, Tensor]) -> None:
        """Weights without a gradient move on by their momentum."""
        for index, w in enumerate(weights):
            count, first, second = self.state.get(index, (0, 0 * w, 0 * w))
            if count or index in gradients:
                g = gradients.get(index, torch.zeros_like(w))
                first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
                self.state[index] = count + 1, first, second
                size = (second / (1 - 0.999 ** (count + 1))).sqrt() + 1e-8
                w.data -= self.rate * first / (1 - 0.9 ** (count + 1)) / size


def trained_by_hand(features: Mapping[str, tuple[Tensor, Tensor]], method: Any) -> dict[str, Any]:
    """Surgery's and ProbSurgery's modules, `task -> (down, up)`, and the losses of every update.

    Args:
        features: Task -> features of merged model and expert on its samples, `[n, d]` each.
        method: Its settings.
    """
    random, shared = method.name == "prob_surgery", getattr(method, "shared", False)
    width = next(iter(features.values()))[0].shape[1]
    hidden = method.hidden if random else method.rank
    modules: dict[str, list[Tensor]] = {}
    for name in ["shared"] if shared else features:
        numbers, bound = generator(method.seed, name, "weights"), width**-0.5
        down = torch.empty(hidden, width).uniform_(-bound, bound, generator=numbers)
        zeros = [torch.zeros(width, hidden) for _ in range(1 + random)]
        modules[name] = [w.requires_grad_() for w in (down, *zeros)]
    positions = {t: batches_of(len(m), method, t) for t, (m, _) in features.items()}
    noise = {task: generator(method.seed, task, "noise") for task in features}
    losses: dict[str, list[float]] = {task: [] for task in features}
    joint = method.optimizer == "joint"
    optimizers = dict.fromkeys(features, Adam(method.learning_rate))
    if not joint:
        optimizers = {task: Adam(method.learning_rate) for task in features}
    for step in range(method.steps):
        for task, (merged, expert) in features.items():
            weights = modules["shared" if shared else task]
            x, target = merged[positions[task][step]], expert[positions[task][step]]
            inner = torch.relu(x @ weights[0].T)
            drift, divergence = inner @ weights[1].T, torch.zeros(())
            if random:
                mean, log_variance = drift, inner @ weights[2].T
                draw = torch.randn(mean.shape, generator=noise[task])
                drift = mean + (log_variance / 2).exp() * draw
                spread = torch.distributions.Normal(mean, (log_variance / 2).exp())
                plain = torch.distributions.Normal(0.0, 1.0)
                divergence = torch.distributions.kl_divergence(spread, plain).sum(1).mean()
                divergence = method.kl_weight * divergence
            loss = (x - drift - target).abs().mean() + divergence
            losses[task].append(loss.item())
            gradients = torch.autograd.grad(loss, weights)
            trained = [w for m in modules.values() for w in m] if joint else weights
            indices = [next(n for n, w in enumerate(trained) if w is one) for one in weights]
            optimizers[task].step(trained, dict(zip(indices, gradients, strict=True)))
    result = {t: [w.detach() for w in modules["shared" if shared else t]][:2] for t in features}
    return {"modules": result, "losses": losses}
