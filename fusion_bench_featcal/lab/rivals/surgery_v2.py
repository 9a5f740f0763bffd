"""SurgeryV2 (arXiv 2410.14389): a small trained module per task after every block."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.lab.rivals.corrected_clip import LayerCorrectedModel, clip_blocks
from fusion_bench_featcal.lab.rivals.corrected_model import LayerSurgery, corrected_outputs
from fusion_bench_featcal.lab.rivals.registry import method
from fusion_bench_featcal.lab.rivals.surgery import Surgery
from fusion_bench_featcal.lab.rivals.training import TaskFeatures, initial_surgery, task_generator
from fusion_bench_featcal.settings import CalibrationError

Sites = Callable[..., list[Tensor]]
"""Computes features at all sites from a model, inputs and corrections: see `site_features`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SiteFeatures(TaskFeatures):
    """Features after every block, and final features.

    `merged` are the inputs of the merged model, which runs in every update, because each correction
    changes the input of later blocks. `expert` are its features of all sites, concatenated.

    Attributes:
        model: The merged model.
        sites: Computes a model's features at all sites.
        widths: The widths of these features.
    """

    model: nn.Module
    sites: Sites
    widths: Sequence[int]

    def corrected(self, rows: Tensor, module: nn.Module) -> list[Tensor]:
        """Return the merged model's corrected features for inputs, a tensor for each site."""
        return self.sites(self.model, rows, module)


@method(
    "featcal_baselines/surgery_v2",
    source="arXiv 2410.14389",
    # Not for texts, and the merged model runs in every update anyway.
    without=("final_norm", "calibration_targets", "generated_tokens", "max_length"),
)
class SurgeryV2(Surgery):
    """SurgeryV2: a small trained module per task after every block corrects all tokens.

    Another one corrects the final projected feature. CLIP vision models only. It needs the task's
    name at inference.
    """

    texts = False

    def _collect(
        self, merged: nn.Module, expert: nn.Module, site: Any, batches: Any, task: str
    ) -> SiteFeatures:
        def final(model: nn.Module, pixels: Tensor) -> Tensor:
            return site.features(model, {"pixel_values": pixels})

        sites = partial(site_features, clip_blocks(merged), final)
        pixels = [batch["pixel_values"] for batch in batches]
        return _expert_features(merged, expert, sites, pixels, task)

    def fit_blocks(
        self,
        merged: nn.Module,
        expert: nn.Module,
        blocks: Sequence[str],
        final: Callable[[nn.Module, Tensor], Tensor],
        batches: Iterable[Tensor],
        task: str = "",
    ) -> Any:
        """Train the modules of one task.

        Args:
            merged: The merged model. It is frozen, not changed.
            expert: The task's expert, on the same device.
            blocks: Names of the blocks with a module after them, in forward order.
            final: Computes a model's final features of inputs.
            batches: The task's inputs, `[batch, ...]` each.
            task: The task's name, for seeds and messages.

        Returns:
            The trained modules, a `LayerSurgery`.

        Raises:
            CalibrationError: If there is no input, or the training diverges.
        """
        sites = partial(site_features, blocks, final)
        return self.fit_all({task: _expert_features(merged, expert, sites, batches, task)})[task]

    def module(self, features: Any, name: str) -> LayerSurgery:
        """Return modules before training, which correct nothing, seeded by `name`."""
        generator = task_generator(self.seed, name, "weights")
        modules = [initial_surgery(width, self.rank, generator) for width in features.widths]
        return LayerSurgery(modules[:-1], modules[-1])

    def _corrected(
        self, merged: nn.Module, site: Any, corrections: Mapping[str, nn.Module], **record: Any
    ) -> LayerCorrectedModel:
        return LayerCorrectedModel(merged, site.projection, corrections, **record)


@torch.no_grad()
def _expert_features(
    merged: nn.Module, expert: nn.Module, sites: Sites, batches: Iterable[Tensor], task: str
) -> SiteFeatures:
    """Run an expert on inputs, and freeze the merged model."""
    device = next(merged.requires_grad_(False).eval().parameters()).device
    inputs = [batch.to(device) for batch in batches]
    if not inputs:
        raise CalibrationError(f"task {task!r} has no inputs to train SurgeryV2 on")
    rows = [sites(expert.eval(), batch) for batch in inputs]
    targets = torch.cat([torch.cat(row, dim=1) for row in rows])
    widths = [site.shape[1] for site in rows[0]]
    return SiteFeatures(
        merged=torch.cat(inputs), expert=targets, model=merged, sites=sites, widths=widths
    )


def site_features(
    blocks: Sequence[str],
    final: Callable[[nn.Module, Tensor], Tensor],
    model: nn.Module,
    inputs: Tensor,
    surgery: Any = None,
) -> list[Tensor]:
    """Return a model's token mean after each block and its final features, `[batch, d]` each.

    Args:
        blocks: Names of the blocks, in forward order.
        final: Computes a model's final features of inputs.
        model: The model.
        inputs: Its inputs, `[batch, ...]`.
        surgery: A `LayerSurgery` that corrects the features, or None.
    """
    identity = nn.Identity()
    surgery = surgery or LayerSurgery([identity] * len(blocks), identity)
    with corrected_outputs(model, blocks, surgery.blocks) as means:
        features = surgery.final(final(model, inputs))
    return [*means, features]
