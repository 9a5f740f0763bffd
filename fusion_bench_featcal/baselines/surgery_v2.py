"""SurgeryV2 (arXiv 2410.14389): a small trained module per task behind every block."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion_bench_featcal.baselines.settings import SurgerySettings
from fusion_bench_featcal.baselines.surgery import SurgeryModule, initial_weight
from fusion_bench_featcal.baselines.training import (
    OnStep,
    task_generator,
    train,
)
from fusion_bench_featcal.families.base import hidden_output
from fusion_bench_featcal.settings import CalibrationError

FinalFeatures = Callable[[Any], Tensor]
"""From what a model returns to its final features, `[batch, d]`."""


class LayerSurgery(nn.Module):
    """One task's corrections: one behind each block, for all tokens, and one of final features.

    Attributes:
        blocks: In forward order.
        final: Of the final features.
    """

    def __init__(self, blocks: Iterable[SurgeryModule], final: SurgeryModule) -> None:
        """Take over the modules."""
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.final = final


def initial_layer_surgery(
    widths: Sequence[int], final_width: int, settings: SurgerySettings, task: str = ""
) -> LayerSurgery:
    """Modules before training, which correct nothing: every U is zero.

    Args:
        widths: Width of each block's hidden features.
        final_width: Width of the final features.
        settings: `rank` and `seed` are used.
        task: The task's name; with the seed it seeds every D.

    Returns:
        The modules, float32, on the CPU.
    """
    generator = task_generator(settings.seed, task, "weights")
    modules = [
        SurgeryModule(
            initial_weight(settings.rank, width, generator), torch.zeros(width, settings.rank)
        )
        for width in (*widths, final_width)
    ]
    return LayerSurgery(modules[:-1], modules[-1])


@contextmanager
def corrected_blocks(
    model: nn.Module, blocks: Sequence[str], corrections: Iterable[nn.Module]
) -> Iterator[list[Tensor]]:
    """Context in which every block's hidden output is corrected.

    Args:
        model: The model.
        blocks: Names of its blocks, in forward order.
        corrections: A module for each block (nn.Identity corrects nothing).

    Yields:
        A list to which each block that runs adds its corrected hidden output, averaged over
        tokens, `[batch, d]`.
    """
    means: list[Tensor] = []

    def hook(correction: nn.Module) -> Any:
        def correct(_: nn.Module, __: Any, output: Any) -> Any:
            hidden = hidden_output(output)
            corrected = correction(hidden)
            means.append(corrected.flatten(1, -2).mean(1) if corrected.ndim > 2 else corrected)
            if isinstance(output, Tensor):
                return corrected
            return (corrected, *output[1:])

        return correct

    handles = [
        model.get_submodule(name).register_forward_hook(hook(correction))
        for name, correction in zip(blocks, corrections, strict=True)
    ]
    try:
        yield means
    finally:
        for handle in handles:
            handle.remove()


def site_features(
    model: nn.Module, blocks: Sequence[str], inputs: Tensor, final_features: FinalFeatures
) -> list[Tensor]:
    """Features that corrections are compared by: each block's token mean, then the final ones.

    Args:
        model: The model, uncorrected.
        blocks: Names of its blocks, in forward order.
        inputs: A batch of its inputs.
        final_features: Gives its final features.

    Returns:
        `[batch, d]` for each block, and `[batch, d_final]`.
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
    kept = [batch.to(device) for batch in batches]
    if not kept:
        raise CalibrationError(f"task {task!r} has no inputs to train SurgeryV2 on")
    merged.requires_grad_(False).eval()
    with torch.no_grad():
        sites = [site_features(expert.eval(), blocks, batch, final_features) for batch in kept]
    wanted = [torch.cat(column) for column in zip(*sites, strict=True)]
    widths = [part.shape[1] for part in wanted]
    surgery = initial_layer_surgery(widths[:-1], widths[-1], settings, task).to(device)

    def loss(inputs: Tensor, expert_features: Tensor) -> Tensor:
        with corrected_blocks(merged, blocks, surgery.blocks) as means:
            final = surgery.final(final_features(merged(inputs)))
        found = zip((*means, final), expert_features.split(widths, dim=1), strict=True)
        return torch.stack([functional.l1_loss(ours, theirs) for ours, theirs in found]).sum()

    train(
        surgery,
        loss,
        torch.cat(kept),
        torch.cat(wanted, dim=1),
        settings,
        task=task,
        on_step=on_step,
    )
    return surgery
