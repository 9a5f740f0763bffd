"""Surgery, ProbSurgery and ridge surgery over any merged model and model pool."""

import logging
from typing import Any

import torch
from fusion_bench import BaseModelPool
from torch import nn

from fusion_bench_featcal.baselines.features import (
    TaskFeatures,
    check_projection,
    load_projection,
    open_stream,
    stream_split,
    task_features,
)
from fusion_bench_featcal.baselines.prob_surgery import train_prob_surgery
from fusion_bench_featcal.baselines.ridge_surgery import fit_ridge_surgery
from fusion_bench_featcal.baselines.settings import (
    CorrectionSettings,
    ProbSurgerySettings,
    SurgerySettings,
)
from fusion_bench_featcal.baselines.surgery import train_surgery
from fusion_bench_featcal.baselines.training import Curve, Losses, OnStep
from fusion_bench_featcal.baselines.wrapper import CorrectedModel, Correction
from fusion_bench_featcal.boundary.pool_models import load_pool_model

log = logging.getLogger(__name__)


def check_post_merging(
    modelpool: BaseModelPool,
    settings: CorrectionSettings,
    processor: Any,
    clip_model: nn.Module | str | None = None,
) -> None:
    """Refuse what cannot work, before a model is loaded.

    Args:
        modelpool: As for `post_merge`, like the others.
        settings: The method's settings.
        processor: The pool's processor.
        clip_model: Whose visual projection is used.

    Raises:
        CalibrationError: If there is no visual projection, or a task lacks images.
    """
    check_projection(modelpool, clip_model)
    open_stream(modelpool, settings, processor)


def post_merge(
    merged: nn.Module,
    modelpool: BaseModelPool,
    settings: CorrectionSettings,
    processor: Any,
    clip_model: nn.Module | str | None = None,
    *,
    device: torch.device | None = None,
    losses: dict[str, list[float]] | None = None,
) -> CorrectedModel:
    """Correct a merged model's final features, task by task, from each task's expert.

    Merged model and experts are frozen and the images few: every image passes through both once,
    and the corrections are fitted to the features. One expert is in memory at a time.

    Args:
        merged: A merged CLIP vision model, which the result holds (not a copy); it is frozen.
        modelpool: Experts and images, by task.
        settings: `SurgerySettings`, `ProbSurgerySettings` or `RidgeSurgerySettings`, which choose
            the method.
        processor: Turns an image into a tensor.
        clip_model: CLIP model, or its checkpoint, whose visual projection is used; None: the
            checkpoint of the pool's base model.
        device: Where to compute; None: where the merged model is.
        losses: Filled with task -> loss of every update; the result's `curves` are thinned.

    Returns:
        The merged model with its corrections.

    Raises:
        CalibrationError: If there are no projected features, a task lacks images, or a training
            diverges.
    """
    device = device or next(merged.parameters()).device
    batches = open_stream(modelpool, settings, processor)
    projection = load_projection(modelpool, clip_model).to(device)
    corrections: dict[str, Correction] = {}
    curves: dict[str, Curve] = {}
    for task in modelpool.model_names:
        expert = load_pool_model(modelpool, task)
        features = task_features(
            merged,
            expert,
            projection,
            batches[task],
            normalize=settings.normalize,
            device=device,
        )
        del expert
        kept = Losses()
        corrections[task] = fit_correction(features, settings, task, kept)
        if every := kept.every():
            curves[task] = kept.curve()
            if losses is not None:
                losses[task] = every
        log.info("%s: %s", task, _gain(features, corrections[task]))
    split = stream_split(settings)
    drawn = {t: {"samples": len(part.indices), "split": split} for t, part in batches.items()}
    return CorrectedModel(
        merged,
        projection,
        corrections,
        normalize=settings.normalize,
        samples=drawn,
        curves=curves,
    )


def fit_correction(
    features: TaskFeatures, settings: CorrectionSettings, task: str, on_step: OnStep | None = None
) -> Correction:
    """Fit one task's correction by the method whose settings they are.

    Args:
        features: Of the merged model and the expert.
        settings: Choose the method.
        task: The task's name.
        on_step: Called after every update, where there are updates.

    Returns:
        What is deployed.

    Raises:
        CalibrationError: If the features do not fit, or the training diverges.
    """
    merged, expert = features
    if isinstance(settings, SurgerySettings):
        return train_surgery(merged, expert, settings, task=task, on_step=on_step)
    if isinstance(settings, ProbSurgerySettings):
        trained = train_prob_surgery(merged, expert, settings, task=task, on_step=on_step)
        return trained.deployed()
    return fit_ridge_surgery(merged, expert, settings, task=task)


def _gain(features: TaskFeatures, correction: Correction) -> str:
    before = (features.merged - features.expert).abs().mean()
    after = (correction(features.merged) - features.expert).abs().mean()
    return f"mean absolute difference to the expert {before:.4f}, corrected {after:.4f}"
