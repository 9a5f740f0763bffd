"""Correction of a merged model's final features, task by task, from each task's expert."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from fusion_bench import BaseModelPool
from torch import Tensor, nn

from fusion_bench_featcal.calibration_data import calibration_batches
from fusion_bench_featcal.calibration_text import TextBatches
from fusion_bench_featcal.data.image_cache import ImageCache
from fusion_bench_featcal.fusionbench.options import checked_settings
from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.methods.corrected_clip import NORMALIZE, CorrectedModel
from fusion_bench_featcal.methods.corrected_language_model import CorrectedLanguageModel
from fusion_bench_featcal.methods.corrected_model import Corrected, Correction
from fusion_bench_featcal.methods.final_states import FinalStates, find_final_norm
from fusion_bench_featcal.methods.interface import MethodInputs
from fusion_bench_featcal.methods.projection import (
    ProjectedFeatures,
    check_projection,
    load_projection,
    to_unit_norm,
)
from fusion_bench_featcal.methods.training import Curve, Losses, OnStep
from fusion_bench_featcal.settings import (
    CalibrationError,
    Check,
    FeatCalSettings,
    integer,
    nullable,
    one_of,
    problems_of,
)

log = logging.getLogger(__name__)

TEXT_SETTINGS = ("calibration_targets", "generated_tokens", "max_length")
"""Settings that only language models read."""

CHECKS: dict[str, Check] = {
    "batch_size": integer(1),
    "normalize": one_of(NORMALIZE),
    "samples_per_task": integer(1),
    "seed": integer(0),
    "stream": one_of(("test_tta", "calibration")),
    "calibration_split": one_of(("train", "val")),
    "calibration_targets": one_of(("labels", "generated")),
    "generated_tokens": integer(1),
    "max_length": nullable(integer(1)),
}

SITE_SETTINGS = {
    "clip_model": "Folder or hub id of the CLIP model with the visual projection; None: the "
    "pool's base model.",
    "final_norm": "Name of the module behind which a language model is corrected; None: found.",
}
"""Keys that name the corrected feature -> their meaning; the default of each is None."""


class TaskFeatures(NamedTuple):
    """Final features of one task's samples, `[n, d]` float32 each, of the same samples."""

    merged: Tensor
    expert: Tensor


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """Settings that all corrections of features share.

    Attributes:
        batch_size: Features in an update, and samples in a forward pass, >= 1.
        normalize: `none` corrects features as they are and CLIP's head normalises afterwards (the
            authors); `pre` corrects features of norm 1 (FusionBench; CLIP only).
        samples_per_task: Images or texts drawn for each task, >= 1.
        seed: With the task's name, seeds the draw, the initial weights, the batches and the noise,
            >= 0.
        stream: `test_tta` fits on samples of the test split, as the papers do; `calibration` on
            those FeatCal would draw from `calibration_split`.
        calibration_split: `train` or `val`; read only where `stream` is `calibration`.
        calibration_targets: Of texts that FeatCal would draw: `labels`, or `generated` (the
            expert's own answers). Test texts always have the expert's own.
        generated_tokens: Longest answer that an expert writes, >= 1.
        max_length: Longer texts are cut to so many tokens; None: the tokenizer's limit.
    """

    batch_size: int = 16
    normalize: str = "none"
    samples_per_task: int = 256
    seed: int = 42
    stream: str = "test_tta"
    calibration_split: str = "train"
    calibration_targets: str = "labels"
    generated_tokens: int = 64
    max_length: int | None = None

    checks: ClassVar[Mapping[str, Check]] = CHECKS

    def __post_init__(self) -> None:
        if problems := problems_of(self, self.checks):
            raise ValueError("; ".join(f"method.{problem}" for problem in problems))

    @property
    def split(self) -> str:
        """Data split of the stream."""
        return "test" if self.stream == "test_tta" else self.calibration_split

    def fit(self, features: TaskFeatures, task: str, on_step: OnStep | None = None) -> Correction:
        """Fit one task's correction; `on_step` is called after every update, if there are any."""
        raise NotImplementedError


class FeatureCorrection:
    """A correction of features as a post-merging method; a subclass names its settings."""

    name: ClassVar[str]
    kind: ClassVar[type[CorrectionSettings]]
    site: ClassVar[tuple[str, ...]] = tuple(SITE_SETTINGS)
    left_out: ClassVar[tuple[str, ...]] = ()  # fields of the settings that the method has not
    older_names: ClassVar[dict[str, str]] = {}
    _config_mapping: ClassVar[dict[str, str]]

    def __init_subclass__(cls) -> None:
        names = [field.name for field in fields(cls.kind) if field.name not in cls.left_out]
        cls._config_mapping = {name: name for name in (*names, *cls.site)}
        cls.older_names = {"training_steps": "steps"} if "steps" in names else {}

    def __init__(self, **keys: Any) -> None:
        """Check the settings, `clip_model` and `final_norm`, which `SITE_SETTINGS` describes.

        Raises:
            ValueError: If one is unknown or out of range.
        """
        self._site = {key: keys.pop(key, None) for key in self.site}
        for key, value in self._site.items():
            if value is not None and not isinstance(value, str):
                wanted = "a name" if key == "final_norm" else "a folder or hub id of a CLIP model"
                raise ValueError(f"method.{key} must be {wanted}, got {value!r}")
        _take_older_names(keys, self.older_names)
        names = [name for name in self._config_mapping if name not in self.site]
        self._settings = checked_settings(keys, self.kind, names, self.site, owner=self.name)

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, defaults included."""
        names = [name for name in self._config_mapping if name not in self.site]
        values = {name: getattr(self._settings, name) for name in names}
        return {"method": self.name, **self._site, **values}

    def check(self, inputs: MethodInputs) -> None:
        """Find the feature that is corrected and open the data.

        Raises:
            CalibrationError: If the models have none, or a task lacks data.
        """
        check_post_merging(inputs.modelpool, self._settings, inputs.processor, **self._site)

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> Corrected:
        """Fit the corrections, one expert in memory at a time."""
        return post_merge(
            merged,
            inputs.modelpool,
            self._settings,
            inputs.processor,
            **self._site,
            device=inputs.fabric.device,
            images=inputs.images,
        )

    def samples(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Samples that the corrections were fitted on: a test stream may have fewer than asked."""
        used = self._corrected(model).samples
        return {task: dict(used[task]) for task in tasks if task in used}

    def added(self, model: nn.Module) -> dict[str, int]:
        """The corrections of all tasks; projection and head are the model's own."""
        return self._corrected(model).added()

    def _corrected(self, model: nn.Module) -> Corrected:
        if not isinstance(model, Corrected):
            raise CalibrationError(
                f"{self.name} must be the last of the methods that are applied in order"
            )
        return model


def _take_older_names(keys: dict[str, Any], older_names: Mapping[str, str]) -> None:
    """Give settings under an older name their own."""
    for older, name in older_names.items():
        if older in keys:
            log.info("method.%s is an older name of method.%s, which will stay", older, name)
            value = keys.pop(older)
            if keys.setdefault(name, value) != value:
                raise ValueError(
                    f"method.{name} is {keys[name]!r} and method.{older}, its older name, "
                    f"{value!r}: set method.{name} alone"
                )


def check_post_merging(
    modelpool: BaseModelPool,
    settings: CorrectionSettings,
    processor: Any,
    clip_model: nn.Module | str | None = None,
    final_norm: str | None = None,
) -> None:
    """Refuse what cannot work, before a model is loaded; the arguments are `post_merge`'s.

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
) -> CorrectedModel | CorrectedLanguageModel:
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
        on_step = Losses()
        corrections[task] = settings.fit(features, task, on_step)
        if every := on_step.every():
            curves[task] = on_step.curve()
            if losses is not None:
                losses[task] = every
        log.info("%s: %s", task, _gain(features, corrections[task]))
    options: dict[str, Any] = {"samples": samples_of(settings, batches), "curves": curves}
    if isinstance(site, FinalStates):
        return CorrectedLanguageModel(merged, site.final_norm, corrections, **options)
    options["normalize"] = settings.normalize
    return CorrectedModel(merged, site.projection, corrections, **options)


def samples_of(
    settings: CorrectionSettings, batches: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Task -> number and split of the samples in opened batches."""
    split = settings.split
    return {t: {"samples": len(part.indices), "split": split} for t, part in batches.items()}


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

    Args:
        modelpool: The pool, whose experts are the tasks.
        settings: All of `CorrectionSettings` but `normalize` are used.
        processor: The pool's processor or tokenizer.
        device: Where experts write answers, if they do; None: where they are loaded.
        images: Keeps processed images for other methods on the same pool; None: none are kept.

    Raises:
        CalibrationError: If the pool lacks the split for a task, or has no samples.
    """
    _check_stream(modelpool, settings)
    # The data's targets would be the answers that the model is tested on.
    answers = settings.stream == "test_tta" and text_kind(modelpool) is not None
    wanted = FeatCalSettings(
        samples_per_task=settings.samples_per_task,
        batch_size=settings.batch_size,
        seed=settings.seed,
        calibration_split=settings.split,
        calibration_targets="generated" if answers else settings.calibration_targets,
        generated_tokens=settings.generated_tokens,
        max_length=settings.max_length,
    )
    tasks = modelpool.model_names
    return calibration_batches(modelpool, tasks, wanted, processor, device=device, images=images)


def _check_stream(modelpool: BaseModelPool, settings: CorrectionSettings) -> None:
    split = settings.split
    available = list(getattr(modelpool, f"{split}_dataset_names"))
    for task in modelpool.model_names:
        if task not in available:
            setting = "" if split == "test" else f" and method.calibration_split={split}"
            raise CalibrationError(
                f"task {task!r} has no data for method.stream={settings.stream}{setting}: set "
                f"modelpool.{split}_datasets.{task}, or choose another stream. The pool's "
                f"{split}_datasets are: {', '.join(available) or 'none'}"
            )


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
    models = merged, load_pool_model(modelpool, task)
    try:
        parts = [
            [
                all_features(m, site, [b], normalize=settings.normalize, device=device)
                for m in models
            ]
            for b in batches
        ]
    except CalibrationError as error:
        raise CalibrationError(f"task {task!r}: {error}") from error
    features = TaskFeatures(*(torch.cat(side) for side in zip(*parts, strict=True)))
    if not len(features.merged):
        raise CalibrationError(
            f"task {task!r}: no position predicts a target token, so there is nothing to correct: "
            "its targets are empty. Give the rows targets, or set "
            "method.calibration_targets=generated"
        )
    return features


@torch.no_grad()
def all_features(
    model: nn.Module,
    site: ProjectedFeatures | FinalStates,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    normalize: str,
    device: torch.device,
) -> Tensor:
    """Final features `[n, d]` of all samples of a task, float32, on the device.

    The model is moved there and set to evaluate. `normalize` is `pre` for features of norm 1.
    """
    model = model.to(device).eval()
    parts = [
        site.features(model, {name: part.to(device) for name, part in batch.items()}).float()
        for batch in batches
    ]
    features = torch.cat(parts)
    return to_unit_norm(features) if normalize == "pre" else features


def _gain(features: TaskFeatures, correction: Correction) -> str:
    before = (features.merged - features.expert).abs().mean()
    after = (correction(features.merged) - features.expert).abs().mean()
    return f"mean absolute difference to the expert {before:.4f}, corrected {after:.4f}"
