"""Surgery, ProbSurgery and SurgeryV2: small trained modules per task correct features."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss, linear, relu
from torch.nn.utils.rnn import pad_sequence

from fusion_bench_featcal.lab.rivals import training
from fusion_bench_featcal.lab.rivals.corrected_features import all_features, blocks_of
from fusion_bench_featcal.lab.rivals.correction_modules import SurgeryModule
from fusion_bench_featcal.lab.rivals.corrections import (
    CorrectionData,
    FeatureCorrection,
    FittedCorrections,
)
from fusion_bench_featcal.lab.rivals.sites import CorrectedFeature
from fusion_bench_featcal.run.devices import isolated_torch_state
from fusion_bench_featcal.settings.fields import setting


class Surgery(
    FeatureCorrection, option="surgery", source="Yang et al., ICML 2024, arXiv 2402.02705"
):
    """Representation Surgery: a small trained module per task corrects the final feature.

    It needs the task's name at inference. The defaults are the authors'. FusionBench's version,
    which always merges by AdaMerging first, is method=surgery/adamerging_surgery.
    """

    rank: int = setting(16, "Width of each task's module.", ge=1)
    learning_rate: float = setting(1e-3, "Adam's step size.", gt=0)
    steps: int = setting(1000, "Number of updates of each task's module.", ge=1)
    optimizer: str = setting(
        "joint",
        "`joint`: one Adam for the modules of all tasks, as in the authors' code, so that a step "
        "of one task also moves the others through their momentum. `per_task`: one Adam per task.",
        choices=("joint", "per_task"),
    )

    def module(self, width: int, generator: torch.Generator) -> nn.Module:
        """Return a module before training, which corrects nothing, for features of a width."""
        return initial_surgery(width, self.rank, generator)

    def loss(
        self, modules: Any, data: CorrectionData, indices: Tensor, noise: torch.Generator
    ) -> Tensor:
        """Return the mean absolute difference of corrected and expert features, 0-dim.

        Differences of several features are added up. `indices` are those of a batch's samples.
        """
        corrected = data.run(modules, data.inputs[indices])
        targets = [target[indices] for target in data.targets]
        return torch.stack([*map(l1_loss, corrected, targets)]).sum()

    @isolated_torch_state()
    @torch.enable_grad()
    def fit_all(self, training_data: Mapping[str, CorrectionData]) -> FittedCorrections:
        """Train all tasks' modules by Adam, one update for each task in turn."""
        modules = dict[str, nn.ModuleList]()
        for task, data in training_data.items():
            generator = training.task_generator(self.seed, task, "weights")
            corrections = [self.module(target.shape[1], generator) for target in data.targets]
            modules[task] = nn.ModuleList(corrections).to(data.inputs.device)
        adam = partial(torch.optim.Adam, lr=self.learning_rate)
        joint = adam(nn.ModuleList(modules.values()).parameters())
        is_joint = self.optimizer == "joint"
        optimizers = {t: joint if is_joint else adam(m.parameters()) for t, m in modules.items()}
        batches = {
            task: training.shuffled_batches(len(data.inputs), self.batch_size, self.seed, task)
            for task, data in training_data.items()
        }
        noise = {t: training.task_generator(self.seed, t, "noise") for t in training_data}
        losses: dict[str, list[Tensor]] = {task: [] for task in training_data}
        for _ in range(self.steps):
            for task, data in training_data.items():
                indices = next(batches[task]).to(data.inputs.device)
                loss = self.loss(modules[task], data, indices, noise[task])
                # Zeros instead of None, so that Adam also moves the other tasks' modules.
                optimizers[task].zero_grad(set_to_none=False)
                loss.backward()
                optimizers[task].step()
                losses[task].append(loss.detach())
        for task, task_modules in modules.items():
            name = f"task {task!r}: training"
            training.check_trained(task_modules.parameters(), name, self.learning_rate)
        curves = {task: training.curve_of(values) for task, values in losses.items()}
        return {task: [*task_modules] for task, task_modules in modules.items()}, curves


class ProbSurgery(Surgery, option="prob_surgery", source="ICML 2025", without=("rank",)):
    """ProbSurgery: Surgery with a wider module and a correction that is random in training.

    It is sampled from a normal distribution. The method needs the task's name at inference. The
    defaults come from the authors' code.
    """

    hidden: int = setting(128, "Width of each task's module.", ge=1)
    kl_weight: float = setting(
        1e-4, "Weight of the KL divergence from a standard normal distribution.", ge=0
    )

    def module(self, width: int, generator: torch.Generator) -> nn.Module:
        """Return a module before training: U gives the mean and `spread` the log variance, 0."""
        module = initial_surgery(width, self.hidden, generator)
        module.register_parameter("spread", nn.Parameter(torch.zeros_like(module.up)))
        return module

    def loss(
        self, modules: Any, data: CorrectionData, indices: Tensor, noise: torch.Generator
    ) -> Tensor:
        """Return the mean absolute difference for one sample of noise plus the KL term, 0-dim."""
        features, module = data.inputs[indices], modules[0]
        hidden = relu(linear(features, module.down))
        mean, log_variance = linear(hidden, module.up), linear(hidden, module.spread)
        sample = torch.randn(mean.shape, generator=noise, dtype=torch.float32).to(mean)
        corrected = features - (mean + (0.5 * log_variance).exp() * sample)
        # KL(N(mean, exp(log_variance)) || N(0, 1)), summed over d
        divergence = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance)
        loss = l1_loss(corrected, data.targets[0][indices])
        return loss + self.kl_weight * divergence.sum(dim=-1).mean()

    def fit_all(self, training_data: Mapping[str, CorrectionData]) -> FittedCorrections:
        """Train all tasks' modules. The results subtract the mean of the distribution."""
        trained, curves = super().fit_all(training_data)
        modules: Any = {task: module for task, (module,) in trained.items()}
        return {t: [SurgeryModule(m.down.data, m.up.data)] for t, m in modules.items()}, curves


class SurgeryV2(
    Surgery,
    option="featcal_baselines/surgery_v2",
    source="arXiv 2410.14389",
    # Settings of language models, and a limit that an encoder has.
    without=("final_norm", "calibration_targets", "generated_tokens", "max_length"),
):
    """SurgeryV2: a small trained module per task after every block corrects all tokens.

    Another one corrects the final feature. CLIP vision models and encoders only. It needs the
    task's name at inference.
    """

    corrects_language_models = False

    def training_data(
        self, merged: nn.Module, expert: nn.Module, batches: Sequence[Any], site: CorrectedFeature
    ) -> CorrectionData:
        """Run the expert over a task's samples.

        The merged model runs in every update, because each correction changes the input of later
        blocks.
        """
        unchanged = [nn.Identity()] * (len(blocks_of(expert)) + 1)
        features = [all_features(expert, site, unchanged, batch) for batch in batches]
        targets = [*map(torch.cat, zip(*features, strict=True))]
        # Texts are padded on the right to one length, with 0 in the attention mask.
        inputs = {
            name: pad_sequence([x for batch in batches for x in batch[name]], batch_first=True)
            for name in batches[0]
        }

        def run(corrections: Sequence[nn.Module], indices: Tensor) -> list[Tensor]:
            batch = {name: tensor[indices] for name, tensor in inputs.items()}
            return all_features(merged, site, corrections, batch)

        return CorrectionData(torch.arange(len(targets[0]), device=targets[0].device), targets, run)


def initial_surgery(width: int, rank: int, generator: torch.Generator) -> SurgeryModule:
    """Return a module before training, on the CPU. It corrects nothing, because U is zero.

    D is uniform within 1/sqrt(width) of zero: Kaiming's initialisation with a = sqrt(5), which both
    papers' codes use.
    """
    bound, down = 1 / math.sqrt(width), torch.empty(rank, width, dtype=torch.float32)
    down.uniform_(-bound, bound, generator=generator)
    return SurgeryModule(down, down.new_zeros(width, rank))
