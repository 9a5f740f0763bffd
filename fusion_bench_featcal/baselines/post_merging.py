"""Surgery, ProbSurgery and ridge surgery over any merged model and model pool."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from fusion_bench import BaseModelPool
from torch import nn

from fusion_bench_featcal.baselines.corrections import Correction
from fusion_bench_featcal.baselines.features import (
    TaskFeatures,
    open_stream,
    stream_split,
    task_features,
)
from fusion_bench_featcal.baselines.final_states import FinalStates, find_final_norm
from fusion_bench_featcal.baselines.language_model import CorrectedLanguageModel
from fusion_bench_featcal.baselines.prob_surgery import train_prob_surgery
from fusion_bench_featcal.baselines.projection import (
    ProjectedFeatures,
    check_projection,
    load_projection,
)
from fusion_bench_featcal.baselines.ridge_surgery import fit_ridge_surgery
from fusion_bench_featcal.baselines.settings import (
    CorrectionSettings,
    ProbSurgerySettings,
    SurgerySettings,
)
from fusion_bench_featcal.baselines.surgery import train_surgery
from fusion_bench_featcal.baselines.training import Curve, Losses, OnStep
from fusion_bench_featcal.baselines.wrapper import CorrectedModel
from fusion_bench_featcal.calibration_text import TextBatches
from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.image_cache import ImageCache
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

Corrected = CorrectedModel | CorrectedLanguageModel


def check_post_merging(
    modelpool: BaseModelPool,
    settings: CorrectionSettings,
    processor: Any,
    clip_model: nn.Module | str | None = None,
    final_norm: str | None = None,
) -> None:
    """Refuse what cannot work, before a model is loaded.

    Args:
        modelpool: As for `post_merge`, like the others.
        settings: The method's settings.
        processor: The pool's processor or tokenizer.
        clip_model: Whose visual projection is used.
        final_norm: The module that language models are corrected behind.

    Raises:
        CalibrationError: If there is no feature to correct, or a task lacks data.
    """
    if text_kind(modelpool) is None:
        check_projection(modelpool, clip_model)
    else:
        find_final_norm(modelpool, final_norm)
        if settings.normalize != "none":
            raise CalibrationError(
                f"method.normalize={settings.normalize} is for CLIP: the head of a language model "
                "reads features as they are. Set method.normalize=none"
            )
    open_stream(modelpool, settings, processor)


def post_merge(
    merged: nn.Module,
    modelpool: BaseModelPool,
    settings: CorrectionSettings,
    processor: Any,
    clip_model: nn.Module | str | None = None,
    final_norm: str | None = None,
    *,
    device: torch.device | None = None,
    losses: dict[str, list[float]] | None = None,
    images: ImageCache | None = None,
) -> Corrected:
    """Correct a merged model's final features, task by task, from each task's expert.

    Merged model and experts are frozen and the samples few: every sample passes through both once,
    and the corrections are fitted to the features. One expert is in memory at a time.

    Args:
        merged: A merged CLIP vision model or language model, which the result holds (not a copy);
            it is frozen.
        modelpool: Experts and data, by task.
        settings: `SurgerySettings`, `ProbSurgerySettings` or `RidgeSurgerySettings`, which choose
            the method.
        processor: The pool's processor or tokenizer.
        clip_model: CLIP model, or its checkpoint, whose visual projection is used; None: the
            checkpoint of the pool's base model.
        final_norm: The module that language models are corrected behind; None: found.
        device: Where to compute; None: where the merged model is.
        images: Keeps processed images for other methods on the same pool; None: none are kept.
        losses: Filled with task -> loss of every update; the result's `curves` are thinned.

    Returns:
        The merged model with its corrections.

    Raises:
        CalibrationError: If there is no feature to correct, a task lacks data, or a training
            diverges.
    """
    device = device or next(merged.parameters()).device
    batches = open_stream(modelpool, settings, processor, device=device, images=images)
    site: ProjectedFeatures | FinalStates
    if text_kind(modelpool) is None:
        site = ProjectedFeatures(load_projection(modelpool, clip_model).to(device))
    else:
        site = FinalStates(find_final_norm(modelpool, final_norm))
    corrections: dict[str, Correction] = {}
    curves: dict[str, Curve] = {}
    for task in modelpool.model_names:
        features = _features_of(task, merged, modelpool, site, batches[task], settings, device)
        kept = Losses()
        corrections[task] = fit_correction(features, settings, task, kept)
        if every := kept.every():
            curves[task] = kept.curve()
            if losses is not None:
                losses[task] = every
        log.info("%s: %s", task, _gain(features, corrections[task]))
    split = stream_split(settings)
    drawn = {t: {"samples": len(part.indices), "split": split} for t, part in batches.items()}
    return _corrected(merged, site, corrections, settings.normalize, samples=drawn, curves=curves)


def _features_of(
    task: str,
    merged: nn.Module,
    modelpool: BaseModelPool,
    site: ProjectedFeatures | FinalStates,
    batches: Any,
    settings: CorrectionSettings,
    device: torch.device,
) -> TaskFeatures:
    """Both sides' features of one task, whose expert is in memory meanwhile."""
    if isinstance(batches, TextBatches):
        # Few tokens: kept, so that an expert that writes answers has left before it is loaded.
        batches = batches.checked(merged)
    expert = load_pool_model(modelpool, task)
    try:
        features = task_features(
            merged, expert, site, batches, normalize=settings.normalize, device=device
        )
    except CalibrationError as error:
        raise CalibrationError(f"task {task!r}: {error}") from error
    if not len(features.merged):
        raise CalibrationError(
            f"task {task!r}: no position predicts a target token, so there is nothing to correct: "
            "its targets are empty. Give the rows targets, or set "
            "method.calibration_targets=generated"
        )
    return features


def _corrected(
    merged: nn.Module,
    site: ProjectedFeatures | FinalStates,
    corrections: Mapping[str, Correction],
    normalize: str,
    **kept: Any,
) -> Corrected:
    if isinstance(site, FinalStates):
        return CorrectedLanguageModel(merged, site.final_norm, corrections, **kept)
    return CorrectedModel(merged, site.projection, corrections, normalize=normalize, **kept)


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
