"""SurgeryV2 (arXiv 2410.14389): a small trained module per task behind every block."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.methods.corrected_clip import (
    LayerCorrectedModel,
    LayerSurgery,
    clip_blocks,
    corrected_blocks,
)
from fusion_bench_featcal.methods.corrected_model import SurgeryModule
from fusion_bench_featcal.methods.feature_correction import (
    TEXT_SETTINGS,
    FeatureCorrection,
    open_stream,
    samples_of,
)
from fusion_bench_featcal.methods.interface import MethodInputs
from fusion_bench_featcal.methods.projection import load_projection, pooled_output, project
from fusion_bench_featcal.methods.surgery import SurgerySettings
from fusion_bench_featcal.methods.training import (
    Curve,
    Losses,
    OnStep,
    initial_weight,
    task_generator,
    train,
)
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

FinalFeatures = Callable[[Any], Tensor]
"""From what a model returns to its final features, `[batch, d]`."""


class SurgeryV2(FeatureCorrection):
    """SurgeryV2 over any merged CLIP vision model; images' features are corrected as they are."""

    name = "surgery_v2"
    kind = SurgerySettings
    site = ("clip_model",)
    left_out = ("normalize", *TEXT_SETTINGS)

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

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> LayerCorrectedModel:
        """Train the modules of each task, behind every block of the merged model."""
        pool, settings, device = inputs.modelpool, self._settings, inputs.fabric.device
        assert isinstance(settings, SurgerySettings)
        batches = open_stream(pool, settings, inputs.processor, images=inputs.images)
        projection = load_projection(pool, self._site["clip_model"]).to(device)
        merged = merged.to(device)

        def final_features(output: Any) -> Tensor:
            return project(pooled_output(output, merged), projection)

        corrections: dict[str, LayerSurgery] = {}
        curves: dict[str, Curve] = {}
        for task in pool.model_names:
            pixels = [batch["pixel_values"] for batch in batches[task]]
            expert = load_pool_model(pool, task).to(device)
            log.info("training the modules of %s", task)
            losses = Losses()
            corrections[task] = train_surgery_v2(
                merged,
                expert,
                clip_blocks(merged),
                final_features,
                pixels,
                settings,
                task=task,
                on_step=losses,
            )
            curves[task] = losses.curve()
        options: Any = {"samples": samples_of(settings, batches), "curves": curves}
        return LayerCorrectedModel(merged, projection, corrections, **options)


def initial_layer_surgery(
    widths: Sequence[int], final_width: int, settings: SurgerySettings, task: str = ""
) -> LayerSurgery:
    """Modules before training, which correct nothing: every U is zero.

    Widths are those of each block's hidden features and of the final features; `rank` and `seed` of
    the settings are used.
    """
    generator = task_generator(settings.seed, task, "weights")
    modules = [
        SurgeryModule(
            initial_weight(settings.rank, width, generator), torch.zeros(width, settings.rank)
        )
        for width in (*widths, final_width)
    ]
    return LayerSurgery(modules[:-1], modules[-1])


def site_features(
    model: nn.Module, blocks: Sequence[str], inputs: Tensor, final_features: FinalFeatures
) -> list[Tensor]:
    """Features that corrections are compared by: each block's token mean, then the final ones.

    Args:
        model: The model, uncorrected.
        blocks: Names of its blocks, in forward order.
        inputs: A batch of its inputs.
        final_features: Gives its final features.
    """
    with corrected_blocks(model, blocks, [nn.Identity() for _ in blocks]) as means:
        final = final_features(model(inputs))
    return [*means, final]


def train_surgery_v2(
    merged: nn.Module,
    expert: nn.Module,
    blocks: Sequence[str],
    final_features: FinalFeatures,
    batches: Iterable[Tensor],
    settings: SurgerySettings,
    *,
    task: str = "",
    on_step: OnStep | None = None,
) -> LayerSurgery:
    """Train one task's modules, all together: the sum over sites of mean absolute differences.

    A block's site is compared by its token mean. The expert runs once: its features are kept. The
    merged model runs in every update, for each correction changes what later blocks receive.

    Args:
        merged: The merged model; it is frozen, not changed.
        expert: The task's expert, on the same device.
        blocks: Names of the blocks behind which there are modules, in forward order.
        final_features: Gives a model's final features from what it returns.
        batches: The task's inputs, `[batch, ...]` each.
        settings: Rank, learning rate, steps, batch size and seed are used.
        task: The task's name, for seeds and messages.
        on_step: Called after every update with its number and loss.

    Returns:
        The trained modules, frozen, on the merged model's device.

    Raises:
        CalibrationError: If there is no input, or the training diverges.
    """
    device = next(merged.parameters()).device
    inputs = [batch.to(device) for batch in batches]
    if not inputs:
        raise CalibrationError(f"task {task!r} has no inputs to train SurgeryV2 on")
    merged.requires_grad_(False).eval()
    with torch.no_grad():
        sites = [site_features(expert.eval(), blocks, batch, final_features) for batch in inputs]
    targets = [torch.cat(column) for column in zip(*sites, strict=True)]
    widths = [target.shape[1] for target in targets]
    surgery = initial_layer_surgery(widths[:-1], widths[-1], settings, task).to(device)

    def loss(batch: Tensor, expert_features: Tensor) -> Tensor:
        with corrected_blocks(merged, blocks, surgery.blocks) as means:
            final = surgery.final(final_features(merged(batch)))
        pairs = zip((*means, final), expert_features.split(widths, dim=1), strict=True)
        return torch.stack([functional.l1_loss(*pair) for pair in pairs]).sum()

    sides = torch.cat(inputs), torch.cat(targets, dim=1)
    train(surgery, loss, *sides, settings, task=task, on_step=on_step)
    return surgery
