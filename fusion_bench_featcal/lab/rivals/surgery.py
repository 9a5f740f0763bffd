"""Surgery, ProbSurgery and SurgeryV2: small trained modules per task correct features."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss, linear, relu

from fusion_bench_featcal.lab.rivals import training
from fusion_bench_featcal.lab.rivals.corrected_model import (
    LayerSurgery,
    SurgeryModule,
    clip_blocks,
    corrected_outputs,
)
from fusion_bench_featcal.lab.rivals.corrections import (
    FeatureCorrection,
    Fitted,
    Lessons,
    final_feature,
)
from fusion_bench_featcal.lab.rivals.registry import method
from fusion_bench_featcal.setting_fields import setting


@method("surgery", source="Yang et al., ICML 2024, arXiv 2402.02705")
class Surgery(FeatureCorrection):
    """Representation Surgery: a small trained module per task corrects the final feature.

    It needs the task's name at inference. The defaults are the authors'. FusionBench's version,
    which always merges by AdaMerging first, is method=surgery/adamerging_surgery.
    """

    rank: int = setting(16, "Width of each task's module.", ge=1, group="module and fit")
    learning_rate: float = setting(1e-3, "Adam's step size.", gt=0, group="module and fit")
    steps: int = setting(1000, "Updates of each task's module.", ge=1)
    optimizer: str = setting(
        "joint",
        "`joint`: one Adam for all tasks' modules, as the authors have it, so that a step of one "
        "task moves the others on by their momentum; `per_task`: one for each.",
        choices=("joint", "per_task"),
    )

    def module(self, widths: Sequence[int], generator: torch.Generator) -> nn.Module:
        """Return a task's module before training, which corrects nothing, for features' widths."""
        return initial_surgery(widths[0], self.rank, generator)

    def loss(self, module: Any, lessons: Lessons, rows: Tensor, noise: torch.Generator) -> Tensor:
        """Return the mean absolute difference of corrected and expert features, 0-dim.

        Differences of several sites are added up. `rows` are the positions of a batch's samples.
        """
        corrected = lessons.run(module, lessons.inputs[rows])
        targets = [target[rows] for target in lessons.targets]
        return torch.stack([*map(l1_loss, corrected, targets)]).sum()

    @torch.inference_mode(False)  # tensors created in inference mode cannot be trained
    @torch.enable_grad()
    def fit_all(self, lessons: Mapping[str, Lessons]) -> Fitted:
        """Train all tasks' modules by Adam, one update for each task in turn."""
        modules = {task: self._start(task, of_task) for task, of_task in lessons.items()}
        optimizers = self._optimizers(modules)
        updates = {task: self._updates(task, modules[task], of) for task, of in lessons.items()}
        losses: dict[str, list[Tensor]] = {task: [] for task in lessons}
        for _ in range(self.steps):
            for task, update in updates.items():
                loss = next(update)
                # Zeros instead of None, so that Adam also moves the other tasks' modules.
                optimizers[task].zero_grad(set_to_none=False)
                loss.backward()
                optimizers[task].step()
                losses[task].append(loss.detach())
        for task, module in modules.items():
            training.check_trained(
                module.parameters(), f"task {task!r}: training", self.learning_rate
            )
        return modules, {task: training.curve_of(values) for task, values in losses.items()}

    def _start(self, task: str, lessons: Lessons) -> nn.Module:
        widths = [target.shape[1] for target in lessons.targets]
        module = self.module(widths, training.task_generator(self.seed, task, "weights"))
        return module.to(lessons.inputs.device)

    def _optimizers(self, modules: Mapping[str, nn.Module]) -> dict[str, torch.optim.Adam]:
        """Return each task's optimizer, which may be the one of all tasks."""
        adam = partial(torch.optim.Adam, lr=self.learning_rate)
        if self.optimizer == "joint":
            return dict.fromkeys(modules, adam(nn.ModuleList(modules.values()).parameters()))
        return {task: adam(module.parameters()) for task, module in modules.items()}

    def _updates(self, task: str, module: nn.Module, lessons: Lessons) -> Iterator[Tensor]:
        """Yield the loss of each update, computed on request."""
        samples, device = len(lessons.inputs), lessons.inputs.device
        noise = training.task_generator(self.seed, task, "noise")
        for rows in training.shuffled_batches(samples, self.batch_size, self.seed, task):
            yield self.loss(module, lessons, rows.to(device), noise)


@method("prob_surgery", source="ICML 2025", without=("rank",))
class ProbSurgery(Surgery):
    """ProbSurgery: Surgery with a wider module and a correction that is random in training.

    It is sampled from a normal distribution. The method needs the task's name at inference. The
    defaults come from the authors' code.
    """

    hidden: int = setting(128, "Width of each task's module.", ge=1, group="module and fit")
    kl_weight: float = setting(1e-4, "Weight of the divergence from a standard normal.", ge=0)

    def module(self, widths: Sequence[int], generator: torch.Generator) -> nn.Module:
        """Return a module before training: U gives the mean and `spread` the log variance, 0."""
        module = initial_surgery(widths[0], self.hidden, generator)
        module.register_parameter("spread", nn.Parameter(torch.zeros_like(module.up)))
        return module

    def loss(self, module: Any, lessons: Lessons, rows: Tensor, noise: torch.Generator) -> Tensor:
        """Return the mean absolute difference under one draw of noise, plus the KL term, 0-dim."""
        before = lessons.inputs[rows]
        hidden = relu(linear(before, module.down))
        mean, log_variance = linear(hidden, module.up), linear(hidden, module.spread)
        draw = torch.randn(mean.shape, generator=noise).to(mean)
        corrected = before - (mean + (0.5 * log_variance).exp() * draw)
        # KL(N(mean, exp(log_variance)) || N(0, 1)), summed over d
        divergence = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance)
        loss = l1_loss(corrected, lessons.targets[0][rows])
        return loss + self.kl_weight * divergence.sum(dim=-1).mean()

    def fit_all(self, lessons: Mapping[str, Lessons]) -> Fitted:
        """Train all tasks' modules. The results subtract the mean of the distribution."""
        trained, curves = super().fit_all(lessons)
        modules: dict[str, Any] = trained
        return {t: SurgeryModule(m.down.data, m.up.data) for t, m in modules.items()}, curves


@method(
    "featcal_baselines/surgery_v2",
    source="arXiv 2410.14389",
    # Not for texts.
    without=("final_norm", "calibration_targets", "generated_tokens", "max_length"),
)
class SurgeryV2(Surgery):
    """SurgeryV2: a small trained module per task after every block corrects all tokens.

    Another one corrects the final projected feature. CLIP vision models only. It needs the task's
    name at inference.
    """

    texts = False

    def module(self, widths: Sequence[int], generator: torch.Generator) -> LayerSurgery:
        """Return modules before training, which correct nothing."""
        modules = [initial_surgery(width, self.rank, generator) for width in widths]
        return LayerSurgery(modules[:-1], modules[-1])

    def lessons(
        self, merged: nn.Module, expert: nn.Module, batches: Sequence[Any], site: Any
    ) -> Lessons:
        """Run the expert over a task's images.

        The merged model runs in every update, because each correction changes the input of later
        blocks.
        """
        identity, pixels = nn.Identity(), [batch["pixel_values"] for batch in batches]
        nothing = LayerSurgery([identity] * len(clip_blocks(expert)), identity)
        rows = [site_features(expert, site, nothing, batch) for batch in pixels]
        targets = [*map(torch.cat, zip(*rows, strict=True))]
        return Lessons(torch.cat(pixels), targets, partial(site_features, merged, site))


def site_features(
    model: nn.Module, projection: nn.Linear, surgery: Any, pixels: Tensor
) -> list[Tensor]:
    """Return a CLIP model's corrected token mean after each block, and final features."""
    with corrected_outputs(model, clip_blocks(model), surgery.blocks) as means:
        features = surgery(final_feature(model, {"pixel_values": pixels}, projection))
    return [*means, features]


def initial_surgery(width: int, rank: int, generator: torch.Generator) -> SurgeryModule:
    """Return a module before training, on the CPU. It corrects nothing, because U is zero.

    D is uniform within 1/sqrt(width) of zero: Kaiming's initialisation with a = sqrt(5), which both
    papers' codes use.
    """
    bound = 1 / math.sqrt(width)
    down = torch.empty(rank, width).uniform_(-bound, bound, generator=generator)
    return SurgeryModule(down, torch.zeros(width, rank))
