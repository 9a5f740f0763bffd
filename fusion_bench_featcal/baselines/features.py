"""Final features of the merged model and the experts, each sample passed once."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from fusion_bench import BaseModelPool
from torch import Tensor, nn

from fusion_bench_featcal.baselines.settings import CorrectionSettings
from fusion_bench_featcal.calibration_data import calibration_batches
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.image_cache import ImageCache
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings


class FeatureSite(Protocol):
    """The place where a model's final feature is taken, and its rows that count."""

    def features(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """The rows that count, `[rows, d]`, of inputs on the model's device."""
        ...


class TaskFeatures(NamedTuple):
    """Final features of one task's samples, `[n, d]` float32 each, of the same samples."""

    merged: Tensor
    expert: Tensor


def to_unit_norm(features: Tensor) -> Tensor:
    """Features `[..., d]` divided by their Euclidean norm."""
    return features / features.norm(dim=-1, keepdim=True)


@torch.no_grad()
def all_features(
    model: nn.Module,
    site: FeatureSite,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    normalize: str,
    device: torch.device,
) -> Tensor:
    """Final features of all samples of a task.

    Args:
        model: The model; moved to the device and set to evaluate.
        site: Where its features are.
        batches: The model's inputs.
        normalize: `pre` for features of norm 1, `none` for those as they are.
        device: Where to compute.

    Returns:
        `[n, d]` float32, on the device.
    """
    model = model.to(device).eval()
    parts = [
        site.features(model, {name: part.to(device) for name, part in batch.items()}).float()
        for batch in batches
    ]
    features = torch.cat(parts)
    return to_unit_norm(features) if normalize == "pre" else features


def task_features(
    merged: nn.Module,
    expert: nn.Module,
    site: FeatureSite,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    normalize: str,
    device: torch.device,
) -> TaskFeatures:
    """Features of a task's samples on both sides; a batch is read once and not kept.

    Args:
        merged: The merged model.
        expert: The task's expert.
        site: As for `all_features`, like the rest.
        batches: The models' inputs.
        normalize: `pre` or `none`.
        device: Where to compute.

    Returns:
        Both sides' features.
    """
    parts = [
        [
            all_features(model, site, [batch], normalize=normalize, device=device)
            for model in (merged, expert)
        ]
        for batch in batches
    ]
    return TaskFeatures(*(torch.cat(side) for side in zip(*parts, strict=True)))


def open_stream(
    modelpool: BaseModelPool,
    settings: CorrectionSettings,
    processor: Any,
    *,
    device: torch.device | None = None,
    images: ImageCache | None = None,
) -> dict[str, Any]:
    """Draw the samples that a method's settings ask for; nothing is read yet.

    The draw is FeatCal's: with the same seed, split and number, the same samples. A task with fewer
    than `samples_per_task` is taken whole.

    Targets of texts in the test stream are the expert's own greedy answers, whatever the settings
    say: the data's would be the answers that the model is tested on.

    Args:
        modelpool: The pool, whose experts are the tasks.
        settings: `stream`, `calibration_split`, `samples_per_task`, `batch_size` and `seed` are
            used; for texts `calibration_targets`, `generated_tokens` and `max_length` besides.
        processor: The pool's processor or tokenizer.
        device: Where experts write answers, if they do; None: where they are loaded.
        images: Keeps processed images for other methods on the same pool; None: none are kept.

    Returns:
        Task -> batches, as `calibration_batches` gives them.

    Raises:
        CalibrationError: If the pool lacks the split for a task, or has no samples.
    """
    split, on_test = stream_split(settings), settings.stream == "test_tta"
    _check_stream(modelpool, settings, split)
    answers = on_test and text_kind(modelpool) is not None
    wanted = FeatCalSettings(
        samples_per_task=settings.samples_per_task,
        batch_size=settings.batch_size,
        seed=settings.seed,
        calibration_split=split,
        calibration_targets="generated" if answers else settings.calibration_targets,
        generated_tokens=settings.generated_tokens,
        max_length=settings.max_length,
    )
    tasks = modelpool.model_names
    return calibration_batches(modelpool, tasks, wanted, processor, device=device, images=images)


def stream_split(settings: CorrectionSettings) -> str:
    """The split that the settings' stream comes from: `test`, or `calibration_split`."""
    return "test" if settings.stream == "test_tta" else settings.calibration_split


def _check_stream(modelpool: BaseModelPool, settings: CorrectionSettings, split: str) -> None:
    available = list(getattr(modelpool, f"{split}_dataset_names"))
    for task in modelpool.model_names:
        if task not in available:
            setting = "" if split == "test" else f" and method.calibration_split={split}"
            raise CalibrationError(
                f"task {task!r} has no data for method.stream={settings.stream}{setting}: set "
                f"modelpool.{split}_datasets.{task}, or choose another stream. The pool's "
                f"{split}_datasets are: {', '.join(available) or 'none'}"
            )
