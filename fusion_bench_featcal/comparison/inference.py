"""How long a model takes for one test sample when it is deployed."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from fusion_bench import BaseTaskPool
from torch import Tensor, nn

from fusion_bench_featcal.baselines.features import pooled_output, project, to_unit_norm
from fusion_bench_featcal.boundary.evaluation import task_names
from fusion_bench_featcal.compare import UNAVAILABLE

BATCH = 16
REPEATS = 15
# A large model on a CPU is timed less often.
BUDGET_SECONDS = 0.3


class InferenceTimer:
    """Times models, one after the other, on the same images: the first of the first task.

    What is timed is the way from pixel values to final image features, which ends with the
    correction where a model has one; reading images and comparing features with the text's are
    not part of it.
    """

    def __init__(self, taskpool: BaseTaskPool, fabric: Any) -> None:
        """Nothing is read yet.

        Args:
            taskpool: The pool; times are known for FusionBench's CLIP task pools and ours.
            fabric: Lightning Fabric: the device and the precision.
        """
        self._taskpool: Any = taskpool
        self._fabric = fabric
        self._pixels: Tensor | None = None

    def seconds_per_sample(self, model: nn.Module) -> float | str:
        """Median time of a batch, divided by its size.

        Args:
            model: A model that the task pool has just evaluated.

        Returns:
            Seconds; "unavailable" where the task pool has no images and visual projection.
        """
        task = next(iter(task_names(self._taskpool) or []), None)
        projection = getattr(getattr(self._taskpool, "clip_model", None), "visual_projection", None)
        if self._pixels is None and task is not None:
            self._pixels = _first_pixels(self._taskpool.test_dataloaders[task])
        if task is None or projection is None or self._pixels is None:
            return UNAVAILABLE
        device = self._fabric.device
        pixels = self._pixels.to(device)
        model, projection = model.to(device).eval(), projection.to(device)
        times: list[float] = []
        # The first one warms up; there is a second one, however long it takes.
        while len(times) <= REPEATS and (len(times) < 2 or sum(times[1:]) < BUDGET_SECONDS):
            _wait_for(device)
            start = time.perf_counter()
            with torch.no_grad(), self._fabric.autocast():
                _final_features(model, projection, pixels, task)
            _wait_for(device)
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:]) / len(pixels)


def _final_features(model: Any, projection: nn.Module, pixels: Tensor, task: str) -> Tensor:
    """What a classifier compares with the text's features."""

    def uncorrected(tower: nn.Module) -> Tensor:
        return to_unit_norm(project(pooled_output(tower(pixels), tower), projection))

    if not getattr(model, "is_surgery_model", False):
        return uncorrected(model)
    if hasattr(model, "features"):
        # One pass, where FusionBench's protocol may need two.
        return to_unit_norm(model.features(task, pixels))
    return model.compute_surgery_features(uncorrected, dataset_name=task)[0]


def _first_pixels(loader: Any) -> Tensor | None:
    """The first test images as pixel values `[batch, ...]`; None where items are something else."""
    items = getattr(loader, "dataset", None)
    if items is None or len(items) == 0:
        return None
    pixels = []
    for index in range(min(BATCH, len(items))):
        item = items[index]
        if not isinstance(item, Sequence) or not isinstance(item[0], Tensor):
            return None
        pixels.append(item[0])
    return torch.stack(pixels) if len({part.shape for part in pixels}) == 1 else None


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
