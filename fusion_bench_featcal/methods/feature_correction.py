"""Correction of a merged model's final features, task by task, from each task's expert."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from fusion_bench import BaseModelPool
from torch import Tensor, nn

from fusion_bench_featcal.calibration_text import TextBatches
from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.methods.corrected_clip import NORMALIZE, CorrectedModel
from fusion_bench_featcal.methods.corrected_language_model import CorrectedLanguageModel
from fusion_bench_featcal.methods.corrected_model import Corrected
from fusion_bench_featcal.methods.final_states import FinalStates, find_final_norm
from fusion_bench_featcal.methods.interface import MethodInputs
from fusion_bench_featcal.methods.projection import (
    ProjectedFeatures,
    check_projection,
    load_projection,
    to_unit_norm,
)
from fusion_bench_featcal.nearest_names import refuse_unknown_settings
from fusion_bench_featcal.setting_checks import Check, check_fields, integer, nullable, one_of
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

log = logging.getLogger(__name__)

Curve = list[tuple[int, float]]
"""Steps done and loss, in order; the first pair, of step 0, is from before training."""

CURVE_WINDOW = 20
"""Updates whose mean loss is one point of a curve."""


@dataclass(init=False, eq=False)
class FeatureCorrection:
    """A correction of final features as a post-merging method. Its attributes are its settings.

    A subclass adds its own settings as annotated attributes, and `fit`.

    Attributes:
        clip_model: Folder or hub id of the CLIP model with the visual projection; None: the pool's
            base model.
        final_norm: Name of the module behind which a language model is corrected; None: found.
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

    clip_model: str | None = None
    final_norm: str | None = None
    batch_size: int = 16
    normalize: str = "none"
    samples_per_task: int = 256
    seed: int = 42
    stream: str = "test_tta"
    calibration_split: str = "train"
    calibration_targets: str = "labels"
    generated_tokens: int = 64
    max_length: int | None = None

    name: ClassVar[str]
    left_out: ClassVar[tuple[str, ...]] = ()  # settings above that a subclass does not have
    _config_mapping: ClassVar[dict[str, str]]
    checks: ClassVar[dict[str, Check]] = {
        "clip_model": nullable(("a folder or hub id", lambda value: isinstance(value, str))),
        "final_norm": nullable(("a name", lambda value: isinstance(value, str))),
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

    def __init_subclass__(cls) -> None:
        dataclass(init=False, eq=False)(cls)  # its annotated attributes are settings too
        names = [field.name for field in fields(cls) if field.name not in cls.left_out]
        cls._config_mapping = {name: name for name in names}

    def __init__(self, **keys: Any) -> None:
        """Check the settings, by the names of the attributes.

        Raises:
            ValueError: If one is unknown or out of range.
        """
        refuse_unknown_settings(keys, self._config_mapping, owner=self.name)
        for name, value in keys.items():
            setattr(self, name, plain(value))
        check_fields(self, self.checks)
        self.losses: dict[str, list[float]] = {}  # of every update of the last `post_merge`

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, defaults included."""
        return {"method": self.name} | {name: getattr(self, name) for name in self._config_mapping}

    @property
    def split(self) -> str:
        """Data split of the stream."""
        return "test" if self.stream == "test_tta" else self.calibration_split

    def fit(
        self, merged: Tensor, expert: Tensor, task: str = "", losses: list[Tensor] | None = None
    ) -> nn.Module:
        """Fit one task's correction.

        Args:
            merged: Features of the merged model, `[n, d]`.
            expert: Features of the task's expert on the same samples, `[n, d]`.
            task: The task's name, for seeds and messages.
            losses: Filled with the loss of every update, 0-dim, on the features' device.

        Returns:
            The correction, frozen, on the features' device.

        Raises:
            CalibrationError: If the features do not fit each other, or a training diverges.
        """
        raise NotImplementedError

    def fit_all(
        self,
        features: Mapping[str, tuple[Tensor, Tensor]],
        losses: dict[str, list[Tensor]] | None = None,
    ) -> dict[str, nn.Module]:
        """Fit the corrections of all tasks.

        Args:
            features: By task the features of the merged model and of the expert, as `fit` takes
                them.
            losses: Filled, by task, where something is trained.

        Returns:
            The corrections by task.

        Raises:
            CalibrationError: As `fit`.
        """
        return {task: self.fit(*pair, task) for task, pair in features.items()}

    def check(self, inputs: MethodInputs) -> None:
        """Find the feature that is corrected and open the data.

        Raises:
            CalibrationError: If the models have none, or a task lacks data.
        """
        kind = text_kind(inputs.modelpool)
        if kind == "classification":
            raise CalibrationError(
                f"{self.name} corrects CLIP vision models and language models, and "
                f"{type(inputs.modelpool).__name__} holds classifiers of texts: leave it out"
            )
        if kind is None:
            check_projection(inputs.models, self.clip_model)
        else:
            find_final_norm(inputs.models, self.final_norm)
            if self.normalize != "none":
                raise CalibrationError(
                    f"method.normalize={self.normalize} is for CLIP: the head of a language model "
                    "reads features as they are. Set method.normalize=none"
                )
        self.batches(inputs)

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> Corrected:
        """Correct a merged model, which the result holds, with one expert in memory at a time.

        Merged model and experts are frozen and the samples few: every sample passes through both
        once, and the corrections are fitted to the features.

        Raises:
            CalibrationError: If there is no feature to correct, a task lacks data, or a training
                diverges.
        """
        batches = self.batches(inputs)
        site = self._site(inputs)
        merged = merged.to(inputs.fabric.device).eval()
        losses: dict[str, list[Tensor]] = {}
        corrections = self._corrections(merged, site, batches, inputs, losses)
        # Read at once: reading each would wait for the device.
        self.losses = {task: torch.stack(values).tolist() for task, values in losses.items()}
        samples = {t: {"samples": b.samples, "split": self.split} for t, b in batches.items()}
        curves = {task: thinned(losses) for task, losses in self.losses.items()}
        model = self._corrected(merged, site, corrections, samples=samples, curves=curves)
        if self.split == "test":
            model.seen = {t: (b.indices, b.available) for t, b in batches.items()}
        return model

    def batches(self, inputs: MethodInputs) -> dict[str, Any]:
        """Draw the samples that the settings ask for; nothing is read yet.

        The draw is FeatCal's: with the same seed, split and number, the same samples. A task with
        fewer than `samples_per_task` is taken whole.

        Raises:
            CalibrationError: If the pool lacks the split for a task, or has no samples.
        """
        self._check_stream(inputs.modelpool)
        # The data's targets would be the answers that the model is tested on.
        answers = self.stream == "test_tta" and text_kind(inputs.modelpool) is not None
        wanted = FeatCalSettings(
            samples_per_task=self.samples_per_task,
            batch_size=self.batch_size,
            seed=self.seed,
            calibration_split=self.split,
            calibration_targets="generated" if answers else self.calibration_targets,
            generated_tokens=self.generated_tokens,
            max_length=self.max_length,
        )
        return inputs.batches(wanted)

    def samples(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Samples that the corrections were fitted on: a test stream may have fewer than asked."""
        used = self._of(model).samples
        return {task: dict(used[task]) for task in tasks if task in used}

    def added(self, model: nn.Module) -> dict[str, int]:
        """The corrections of all tasks; projection and head are the model's own."""
        return self._of(model).added()

    def _of(self, model: nn.Module) -> Corrected:
        if not isinstance(model, Corrected):
            raise CalibrationError(
                f"{self.name} must be the last of the methods that are applied in order"
            )
        return model

    def _check_stream(self, modelpool: BaseModelPool) -> None:
        split = self.split
        available = list(getattr(modelpool, f"{split}_dataset_names"))
        for task in modelpool.model_names:
            if task not in available:
                setting = "" if split == "test" else f" and method.calibration_split={split}"
                raise CalibrationError(
                    f"task {task!r} has no data for method.stream={self.stream}{setting}: set "
                    f"modelpool.{split}_datasets.{task}, or choose another stream. The pool's "
                    f"{split}_datasets are: {', '.join(available) or 'none'}"
                )

    def _site(self, inputs: MethodInputs) -> Any:
        """The feature that is corrected: its `features(model, batch)` are rows `[n, d]`."""
        if text_kind(inputs.modelpool) is not None:
            return FinalStates(find_final_norm(inputs.models, self.final_norm))
        projection = load_projection(inputs.models, self.clip_model)
        return ProjectedFeatures(projection.to(inputs.fabric.device))

    def _corrections(
        self,
        merged: nn.Module,
        site: Any,
        batches: Mapping[str, Any],
        inputs: MethodInputs,
        losses: dict[str, list[Tensor]],
    ) -> dict[str, nn.Module]:
        """Fit all corrections, of features that are computed with one expert in memory."""
        features = {
            task: self._both(task, merged, site, batches[task], inputs)
            for task in inputs.modelpool.model_names
        }
        corrections = self.fit_all(features, losses)
        for task, (before, target) in features.items():
            sides = (before, corrections[task](before))
            left, now = ((side - target).abs().mean() for side in sides)
            log.info(
                "%s: mean absolute difference to the expert %.4f, corrected %.4f", task, left, now
            )
        return corrections

    def _both(
        self, task: str, merged: nn.Module, site: Any, batches: Any, inputs: MethodInputs
    ) -> tuple[Tensor, Tensor]:
        """Features `[n, d]` of the merged model and of a task's expert on the same samples."""
        if isinstance(batches, TextBatches):
            # Few tokens: kept, so that an expert that writes answers has left before it is loaded.
            batches = batches.checked(merged)
        expert = self._expert(task, inputs)
        try:
            rows = [[self.features(m, site, batch) for m in (merged, expert)] for batch in batches]
        except CalibrationError as error:
            raise CalibrationError(f"task {task!r}: {error}") from error
        before, target = (torch.cat(side) for side in zip(*rows, strict=True))
        if not len(before):
            raise CalibrationError(
                f"task {task!r}: no position predicts a target token, so there is nothing to "
                "correct: its targets are empty. Give the rows targets, or set "
                "method.calibration_targets=generated"
            )
        return before, target

    def _expert(self, task: str, inputs: MethodInputs) -> nn.Module:
        """A task's expert, on the device."""
        return load_pool_model(inputs.modelpool, task).to(inputs.fabric.device).eval()

    @torch.no_grad()
    def features(self, model: nn.Module, site: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Final features of a batch, `[n, d]` float32, of norm 1 if `normalize` is `pre`."""
        device = next(model.parameters()).device
        features = site.features(model, {name: part.to(device) for name, part in batch.items()})
        return to_unit_norm(features.float()) if self.normalize == "pre" else features.float()

    def _corrected(
        self, merged: nn.Module, site: Any, corrections: Mapping[str, nn.Module], **record: Any
    ) -> Corrected:
        if isinstance(site, FinalStates):
            return CorrectedLanguageModel(merged, site.final_norm, corrections, **record)
        projection, normalize = site.projection, self.normalize
        return CorrectedModel(merged, projection, corrections, normalize=normalize, **record)


def thinned(losses: Sequence[float]) -> Curve:
    """The losses of every update as a curve.

    The point of step 0 is the loss of the first update's batch, which is computed before any weight
    changes. Every further point is the mean over `CURVE_WINDOW` updates (the last may have fewer),
    at the number of the last of them.
    """
    points = [(0, value) for value in losses[:1]]
    for start in range(0, len(losses), CURVE_WINDOW):
        window = losses[start : start + CURVE_WINDOW]
        points.append((start + len(window), math.fsum(window) / len(window)))
    # Six digits show everything, and keep the files small.
    return [(step, float(f"{value:.6g}")) for step, value in points]


def check_features(merged: Tensor, expert: Tensor, task: str) -> None:
    """Check the two sides of a task's correction, `[n, d]` each.

    Raises:
        CalibrationError: If they differ in shape, are no matrices, are empty or not finite.
    """
    shapes = tuple(merged.shape), tuple(expert.shape)
    if shapes[0] != shapes[1] or len(shapes[0]) != 2 or 0 in shapes[0]:
        raise CalibrationError(
            f"task {task!r}: merged and expert features must be [samples, width] of the same "
            f"samples, got {shapes[0]} and {shapes[1]}"
        )
    for owner, features in (("merged model", merged), ("expert", expert)):
        if not bool(torch.isfinite(features).all()):
            raise CalibrationError(
                f"task {task!r}: the {owner}'s features are not finite. Look for NaN or infinite "
                "values in its weights"
            )
