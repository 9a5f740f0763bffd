"""Final projected features of the merged model and the experts, each image passed once."""

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from fusion_bench import BaseModelPool
from torch import Tensor, nn
from transformers import CLIPModel

from fusion_bench_featcal.baselines.settings import CorrectionSettings
from fusion_bench_featcal.boundary.pool_models import BASE_MODEL, pool_source
from fusion_bench_featcal.calibration_data import TaskBatches, calibration_batches, draw_samples
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

log = logging.getLogger(__name__)

_PROJECTION = "visual_projection.weight"


class TaskFeatures(NamedTuple):
    """Projected features of one task's images, `[n, d]` float32 each, of the same images."""

    merged: Tensor
    expert: Tensor


def projected_features(model: nn.Module, projection: nn.Module, pixels: Tensor) -> Tensor:
    """What the zero-shot head is given, before it normalises.

    Args:
        model: A CLIP vision tower.
        projection: CLIP's visual projection.
        pixels: `[batch, channels, height, width]`.

    Returns:
        `[batch, d]` in the projection's dtype.

    Raises:
        CalibrationError: If the model has no pooled output.
    """
    return project(pooled_output(model(pixels), model), projection)


def pooled_output(output: Any, model: nn.Module) -> Tensor:
    """The pooled output among what a vision tower returns.

    Args:
        output: What the model returned.
        model: The model, for the message.

    Returns:
        `[batch, width]`.

    Raises:
        CalibrationError: If there is none.
    """
    pooled = output if isinstance(output, Tensor) else getattr(output, "pooler_output", None)
    if pooled is None or pooled.ndim != 2:
        raise CalibrationError(
            f"{type(model).__name__} has no pooled output, so there are no projected features to "
            "correct: surgery methods work on CLIP vision models"
        )
    return pooled


def project(pooled: Tensor, projection: nn.Module) -> Tensor:
    """Pooled outputs `[batch, width]` as features `[batch, d]`, in the projection's dtype.

    Raises:
        CalibrationError: If the projection takes another width.
    """
    weight = next(projection.parameters())
    if pooled.shape[-1] != weight.shape[-1]:
        raise CalibrationError(
            f"a model's pooled output is {pooled.shape[-1]} wide, the visual projection takes "
            f"{weight.shape[-1]}: check modelpool.models and method.clip_model"
        )
    return projection(pooled.to(weight.dtype))


def to_unit_norm(features: Tensor) -> Tensor:
    """Features `[..., d]` divided by their Euclidean norm."""
    return features / features.norm(dim=-1, keepdim=True)


@torch.no_grad()
def all_features(
    model: nn.Module,
    projection: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    normalize: str,
    device: torch.device,
) -> Tensor:
    """Features of all images of a task.

    Args:
        model: A CLIP vision tower; moved to the device and set to evaluate.
        projection: CLIP's visual projection, on the device.
        batches: Mappings with `pixel_values` `[batch, channels, height, width]`.
        normalize: `pre` for features of norm 1, `none` for those as they are.
        device: Where to compute.

    Returns:
        `[n, d]` float32, on the device.
    """
    model = model.to(device).eval()
    dtype = next(model.parameters()).dtype
    parts = [
        projected_features(model, projection, batch["pixel_values"].to(device, dtype)).float()
        for batch in batches
    ]
    features = torch.cat(parts)
    return to_unit_norm(features) if normalize == "pre" else features


def task_features(
    merged: nn.Module,
    expert: nn.Module,
    projection: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    normalize: str,
    device: torch.device,
) -> TaskFeatures:
    """Features of a task's images on both sides; a batch is read once and not kept.

    Args:
        merged: The merged CLIP vision tower.
        expert: The task's expert.
        projection: As for `all_features`, like the rest.
        batches: Mappings with `pixel_values`.
        normalize: `pre` or `none`.
        device: Where to compute.

    Returns:
        Both sides' features.
    """
    parts = [
        [
            all_features(model, projection, [batch], normalize=normalize, device=device)
            for model in (merged, expert)
        ]
        for batch in batches
    ]
    return TaskFeatures(*(torch.cat(side) for side in zip(*parts, strict=True)))


def open_stream(
    modelpool: BaseModelPool, settings: CorrectionSettings, processor: Any
) -> dict[str, TaskBatches]:
    """Draw the images that a method's settings ask for; nothing is read yet.

    The draw is FeatCal's: with the same seed, split and number, the same images. A test stream with
    fewer images than `samples_per_task` is taken whole, as when it is cycled through; fewer
    calibration images than asked for are refused, as by FeatCal.

    Args:
        modelpool: The pool, whose experts are the tasks.
        settings: `stream`, `calibration_split`, `samples_per_task`, `batch_size` and `seed` are
            used.
        processor: Turns an image into a tensor.

    Returns:
        Task -> batches `{"pixel_values": [batch, channels, height, width]}`.

    Raises:
        CalibrationError: If the pool lacks the split for a task, or has too few images.
    """
    split = stream_split(settings)
    _check_stream(modelpool, settings, split)
    wanted = FeatCalSettings(
        samples_per_task=settings.samples_per_task,
        batch_size=settings.batch_size,
        seed=settings.seed,
        calibration_split=split,
    )
    tasks = modelpool.model_names
    if settings.stream == "calibration":
        return calibration_batches(modelpool, tasks, wanted, processor)
    one_each = calibration_batches(modelpool, tasks, wanted.replace(samples_per_task=1), processor)
    return {task: _up_to(batches, wanted) for task, batches in one_each.items()}


def stream_split(settings: CorrectionSettings) -> str:
    """The split that the settings' stream comes from: `test`, or `calibration_split`."""
    return "test" if settings.stream == "test_tta" else settings.calibration_split


def _up_to(batches: TaskBatches, wanted: FeatCalSettings) -> TaskBatches:
    """A task's batches with as many samples as wanted, or all."""
    available = len(batches.items)
    number = min(available, wanted.samples_per_task)
    if number < wanted.samples_per_task:
        log.info("%s has %d test images: all are used", batches.task, available)
    indices = draw_samples(available, batches.task, wanted.replace(samples_per_task=number))
    return dataclasses.replace(batches, indices=indices)


def _check_stream(modelpool: BaseModelPool, settings: CorrectionSettings, split: str) -> None:
    available = list(getattr(modelpool, f"{split}_dataset_names"))
    for task in modelpool.model_names:
        if task not in available:
            setting = "" if split == "test" else f" and method.calibration_split={split}"
            raise CalibrationError(
                f"task {task!r} has no images for method.stream={settings.stream}{setting}: set "
                f"modelpool.{split}_datasets.{task}, or choose another stream. The pool's "
                f"{split}_datasets are: {', '.join(available) or 'none'}"
            )


def check_projection(modelpool: BaseModelPool, clip_model: nn.Module | str | None) -> None:
    """Find CLIP's visual projection before any model is loaded, where files tell.

    Args:
        modelpool: The pool.
        clip_model: As for `load_projection`.

    Raises:
        CalibrationError: If there is none.
    """
    if isinstance(clip_model, nn.Module):
        _projection_of(clip_model)
    elif clip_model is None:
        location = _base_location(modelpool)
        source = pool_source(modelpool, BASE_MODEL, stream_experts="auto")
        if not isinstance(source, nn.Module) and _PROJECTION not in source.names():
            raise _no_projection(location)


def load_projection(modelpool: BaseModelPool, clip_model: nn.Module | str | None) -> nn.Linear:
    """CLIP's visual projection, which turns pooled outputs into features.

    Args:
        modelpool: The pool; its base model's checkpoint is the default.
        clip_model: A CLIP model that has one, or the folder or hub id of its checkpoint; None: the
            pool's base model's.

    Returns:
        A frozen copy, float32.

    Raises:
        CalibrationError: If there is none.
    """
    if isinstance(clip_model, nn.Module):
        weight = _projection_of(clip_model).weight
    else:
        location = _base_location(modelpool) if clip_model is None else clip_model
        try:
            loaded: Any = CLIPModel.from_pretrained(location, output_loading_info=True)
        except (OSError, ValueError) as error:
            raise CalibrationError(
                f"{location!r} cannot be loaded for its visual projection: {error}. Set "
                "method.clip_model to a CLIP checkpoint"
            ) from error
        model, info = loaded
        if _PROJECTION in info["missing_keys"]:
            raise _no_projection(location)
        weight = model.visual_projection.weight
    projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    projection.weight = nn.Parameter(weight.detach().float().clone(), requires_grad=False)
    return projection


def _projection_of(clip_model: nn.Module) -> nn.Linear:
    projection = getattr(clip_model, "visual_projection", None)
    if not isinstance(projection, nn.Linear):
        raise _no_projection(type(clip_model).__name__)
    return projection


def _base_location(modelpool: BaseModelPool) -> str:
    """Folder or hub id of the base model's checkpoint."""
    entry: Any = modelpool._models.get(BASE_MODEL)
    if isinstance(entry, Mapping):
        entry = entry.get("pretrained_model_name_or_path")
    if not isinstance(entry, str):
        raise CalibrationError(
            f"the pool's base model (modelpool.models.{BASE_MODEL}) is no checkpoint whose visual "
            "projection could be read: set method.clip_model to a CLIP checkpoint, which surgery "
            "methods need for the projected features that they correct"
        )
    return entry


def _no_projection(location: str) -> CalibrationError:
    return CalibrationError(
        f"{location} has no {_PROJECTION}, so there are no projected features to correct: surgery "
        "methods need a CLIP model. Set method.clip_model to a checkpoint that has it"
    )
