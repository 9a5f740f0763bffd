"""SurgeryV2 (arXiv 2410.14389): a small trained module per task behind every block."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.lab.rivals.corrected_clip import (
    LayerCorrectedModel,
    clip_blocks,
    corrected_blocks,
)
from fusion_bench_featcal.lab.rivals.corrected_model import LayerSurgery
from fusion_bench_featcal.lab.rivals.projection import ProjectedFeatures, project
from fusion_bench_featcal.lab.rivals.registry import method
from fusion_bench_featcal.lab.rivals.surgery import Surgery
from fusion_bench_featcal.lab.rivals.training import Training, initial_surgery, task_generator
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

FinalFeatures = Callable[[Any], Tensor]
"""From what a model returns to its final features, `[batch, d]`."""


@method(
    "featcal_baselines/surgery_v2",
    source="arXiv 2410.14389",
    # Texts have no part, and the merged model always runs in every update.
    without=(
        "final_norm", "normalize", "calibration_targets", "generated_tokens", "max_length",
        "recompute",
    ),
)  # fmt: skip
class SurgeryV2(Surgery):
    """SurgeryV2: a small trained module per task after every block corrects all tokens.

    Another corrects the final projected feature. CLIP vision models only. It needs the task's name
    at inference.
    """

    def check(self, inputs: MethodInputs) -> None:
        """Refuse what cannot work, before a model is loaded.

        Raises:
            CalibrationError: If the models are no CLIP vision models, or a task lacks images.
        """
        if text_kind(inputs.modelpool) is not None:
            kind = type(inputs.modelpool).__name__
            raise CalibrationError(
                f"SurgeryV2 corrects CLIP vision models, and {kind} holds language models: leave "
                "it out, or use surgery, prob_surgery or ridge_surgery"
            )
        super().check(inputs)

    def fit_blocks(
        self,
        merged: nn.Module,
        expert: nn.Module,
        blocks: Sequence[str],
        final_features: FinalFeatures,
        batches: Iterable[Tensor],
        task: str = "",
        losses: list[Tensor] | None = None,
    ) -> LayerSurgery:
        """Train one task's modules, all together: the sum over sites of mean absolute differences.

        A block's site is compared by its token mean. The expert runs once: its features are kept.
        The merged model runs in every update, for each correction changes what later blocks
        receive.

        Args:
            merged: The merged model; it is frozen, not changed.
            expert: The task's expert, on the same device.
            blocks: Names of the blocks behind which there are modules, in forward order.
            final_features: Gives a model's final features from what it returns.
            batches: The task's inputs, `[batch, ...]` each.
            task: The task's name, for seeds and messages.
            losses: Filled with the loss of every update.

        Returns:
            The trained modules, frozen, on the merged model's device.

        Raises:
            CalibrationError: If there is no input, or the training diverges.
        """
        found: dict[str, list[Tensor]] = {}
        sites = (blocks, final_features)
        training = self.block_training(merged, expert, *sites, batches, task)
        surgery: Any = self.train({task: training}, found)[task]
        if losses is not None:
            losses += found[task]
        return surgery

    def block_training(
        self,
        merged: nn.Module,
        expert: nn.Module,
        blocks: Sequence[str],
        final_features: FinalFeatures,
        batches: Iterable[Tensor],
        task: str = "",
    ) -> Training:
        """Run the expert, and prepare the training of one task's modules; as `fit_blocks`."""
        device = next(merged.parameters()).device
        inputs = [batch.to(device) for batch in batches]
        if not inputs:
            raise CalibrationError(f"task {task!r} has no inputs to train SurgeryV2 on")
        merged.requires_grad_(False).eval()
        with torch.no_grad():
            sites = [
                site_features(expert.eval(), blocks, batch, final_features) for batch in inputs
            ]
        targets = [torch.cat(column) for column in zip(*sites, strict=True)]
        widths = [target.shape[1] for target in targets]
        surgery = self.initial_modules(widths, task).to(device)

        def loss(batch: Tensor, expert_features: Tensor) -> Tensor:
            with corrected_blocks(merged, blocks, surgery.blocks) as means:
                final = surgery.final(final_features(merged(batch)))
            pairs = zip((*means, final), expert_features.split(widths, dim=1), strict=True)
            return torch.stack([functional.l1_loss(*pair) for pair in pairs]).sum()

        return Training(surgery, loss, torch.cat(inputs), torch.cat(targets, dim=1))

    def initial_modules(self, widths: Sequence[int], task: str = "") -> LayerSurgery:
        """Modules before training, which correct nothing: every U is zero.

        Widths are those of each block's hidden features and, the last, of the final features.
        """
        generator = task_generator(self.seed, task, "weights")
        modules = [
            initial_surgery(width, self.scaled(self.rank, width), generator) for width in widths
        ]
        return LayerSurgery(modules[:-1], modules[-1])

    def _corrections(
        self,
        merged: nn.Module,
        site: ProjectedFeatures,
        batches: Mapping[str, Any],
        inputs: MethodInputs,
        losses: dict[str, list[Tensor]],
    ) -> dict[str, nn.Module]:
        """Train all modules; the images of tasks that are trained together are in memory."""
        blocks = clip_blocks(merged)

        def final_features(output: Any) -> Tensor:
            return project(output, merged, site.projection)

        def training(task: str) -> Training:
            pixels = [batch["pixel_values"] for batch in batches[task]]
            expert = load_pool_model(inputs.modelpool, task).to(inputs.fabric.device)
            return self.block_training(merged, expert, blocks, final_features, pixels, task)

        corrections: dict[str, nn.Module] = {}
        for group in self.together(inputs.modelpool.model_names):
            log.info("training the modules of %s", ", ".join(group))
            corrections |= self.train({task: training(task) for task in group}, losses)
        return corrections

    def _corrected(
        self,
        merged: nn.Module,
        site: ProjectedFeatures,
        corrections: Mapping[str, nn.Module],
        **record: Any,
    ) -> LayerCorrectedModel:
        return LayerCorrectedModel(merged, site.projection, corrections, **record)


def site_features(
    model: nn.Module, blocks: Sequence[str], inputs: Tensor, final_features: FinalFeatures
) -> list[Tensor]:
    """Features that corrections are compared by: each block's token mean, then the final ones.

    Args:
        model: The model, uncorrected.
        blocks: Names of its blocks, in forward order.
        inputs: Its inputs, `[batch, ...]`.
        final_features: Gives its final features from what it returns.
    """
    with corrected_blocks(model, blocks, [nn.Identity() for _ in blocks]) as means:
        final = final_features(model(inputs))
    return [*means, final]
