"""How well a classifier does on one task, item by item."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.tasks.pixels import Batch


class Score(NamedTuple):
    """Accuracy (0 to 1) and mean cross-entropy over the items, and which items were right.

    `correct` is a bool tensor `[items]` on the CPU.
    """

    accuracy: float
    loss: float
    correct: Tensor


@torch.no_grad()
def score(
    classifier: nn.Module,
    batches: Iterable[Batch],
    task: str,
    to_device: Callable[[Tensor], Tensor],
) -> Score:
    """Classify a task's items.

    Args:
        classifier: FusionBench's `HFCLIPClassifier` with the task's head set.
        batches: Pixel values `[batch, channels, height, width]` and labels `[batch]`.
        task: The task's name.
        to_device: Moves a tensor to where the classifier is.

    Returns:
        The score; the loss is averaged over items (FusionBench averages over batches).

    Raises:
        CalibrationError: If a logit is not finite, or there are no items.
    """
    correct: list[Tensor] = []
    loss_sum = 0.0
    for pixels, labels in batches:
        output = classifier(
            to_device(pixels), return_image_embeds=True, return_dict=True, task_name=task
        )
        logits: Tensor = output["logits"].float()
        if not torch.isfinite(logits).all():
            raise CalibrationError(
                f"task {task!r}: the evaluated model gives logits that are not finite. Look for "
                "NaN or infinite values in its weights, or raise fabric.precision."
            )
        targets = to_device(labels)
        loss_sum += functional.cross_entropy(logits, targets, reduction="sum").item()
        correct.append((logits.argmax(dim=-1) == targets).cpu())
    if not correct:
        raise CalibrationError(
            f"task {task!r} has no test items. Check taskpool.tasks.{task}.data."
        )
    right = torch.cat(correct)
    return Score(right.double().mean().item(), loss_sum / len(right), right)
