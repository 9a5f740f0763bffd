"""SurgeryV2 (arXiv 2410.14389): a small trained module per task behind every block."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.lab.rivals.corrected_clip import LayerCorrectedModel, clip_blocks
from fusion_bench_featcal.lab.rivals.corrected_model import LayerSurgery, corrected_outputs
from fusion_bench_featcal.lab.rivals.feature_correction import TaskFeatures
from fusion_bench_featcal.lab.rivals.registry import method
from fusion_bench_featcal.lab.rivals.surgery import Surgery
from fusion_bench_featcal.lab.rivals.training import initial_surgery, task_generator
from fusion_bench_featcal.settings import CalibrationError

FinalFeatures = Callable[[nn.Module, Tensor], Tensor]
"""Computes a model's final features, `[batch, d]`, of its inputs."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SiteFeatures(TaskFeatures):
    """Features behind every block, and the final ones.

    `merged` are inputs: the merged model runs in every update, for each correction changes the
    input of later blocks. `expert` are the expert's features, all sites side by side.

    Attributes:
        model: The merged model.
        blocks: Names of the blocks, in forward order.
        final: Computes final features.
        widths: Widths of the features of all sites.
    """

    model: nn.Module
    blocks: Sequence[str]
    final: FinalFeatures
    widths: Sequence[int]

    def corrected(self, rows: Tensor, module: Any) -> list[Tensor]:
        """Return the merged model's corrected features of inputs, a tensor for each site."""
        return site_features(self.model, self.blocks, self.final, rows, module)


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

    texts = False

    def _collect(
        self, merged: nn.Module, expert: nn.Module, site: Any, batches: Any, task: str
    ) -> SiteFeatures:

        def final(model: nn.Module, pixels: Tensor) -> Tensor:
            return site.features(model, {"pixel_values": pixels})

        pixels = [batch["pixel_values"] for batch in batches]
        return self.collect_sites(merged, expert, clip_blocks(merged), final, pixels, task)

    @torch.no_grad()
    def collect_sites(
        self,
        merged: nn.Module,
        expert: nn.Module,
        blocks: Sequence[str],
        final: FinalFeatures,
        batches: Iterable[Tensor],
        task: str = "",
    ) -> SiteFeatures:
        """Run an expert on its inputs, `[batch, ...]` each, and freeze the merged model.

        Raises:
            CalibrationError: If there is no input.
        """
        device = next(merged.requires_grad_(False).eval().parameters()).device
        inputs = [batch.to(device) for batch in batches]
        if not inputs:
            raise CalibrationError(f"task {task!r} has no inputs to train SurgeryV2 on")
        rows = [site_features(expert.eval(), blocks, final, batch) for batch in inputs]
        return SiteFeatures(
            merged=torch.cat(inputs),
            expert=torch.cat([torch.cat(row, dim=1) for row in rows]),
            model=merged,
            blocks=blocks,
            final=final,
            widths=[site.shape[1] for site in rows[0]],
        )

    def module(self, features: Any, name: str) -> LayerSurgery:
        """Return modules before training, which correct nothing; `name` seeds them."""
        generator = task_generator(self.seed, name, "weights")
        modules = [
            initial_surgery(w, self.scaled(self.rank, w), generator) for w in features.widths
        ]
        return LayerSurgery(modules[:-1], modules[-1])

    def _corrected(
        self, merged: nn.Module, site: Any, corrections: Mapping[str, nn.Module], **record: Any
    ) -> LayerCorrectedModel:
        return LayerCorrectedModel(merged, site.projection, corrections, **record)


def site_features(
    model: nn.Module,
    blocks: Sequence[str],
    final: FinalFeatures,
    inputs: Tensor,
    surgery: Any = None,
) -> list[Tensor]:
    """Return a model's token mean behind each block and its final features, `[batch, d]` each.

    They are corrected by a `LayerSurgery` if one is given.
    """
    identity = nn.Identity()
    surgery = surgery or LayerSurgery([identity] * len(blocks), identity)
    with corrected_outputs(model, blocks, surgery.blocks) as means:
        features = surgery.final(final(model, inputs))
    return [*means, features]
