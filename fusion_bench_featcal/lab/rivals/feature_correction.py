"""Correction of a merged model's final features, task by task, from each task's expert."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from fusion_bench import BaseModelPool
from torch import Tensor, nn

from fusion_bench_featcal.calibration_text import TextBatches
from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.lab.rivals.corrected_clip import NORMALIZE, CorrectedModel
from fusion_bench_featcal.lab.rivals.corrected_language_model import CorrectedLanguageModel
from fusion_bench_featcal.lab.rivals.corrected_model import Corrected
from fusion_bench_featcal.lab.rivals.final_states import FinalStates, find_final_norm
from fusion_bench_featcal.lab.rivals.projection import (
    ProjectedFeatures,
    check_projection,
    load_projection,
    to_unit_norm,
)
from fusion_bench_featcal.lab.rivals.registry import Method
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.setting_fields import same_as, setting
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

log = logging.getLogger(__name__)

Curve = list[tuple[int, float]]
"""Steps done and loss, in order; the first pair, of step 0, is from before training."""

CURVE_WINDOW = 20
"""Updates whose mean loss is one point of a curve."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureCorrection(Method):
    """A correction of final features as a post-merging method. A subclass has `fit`."""

    batch_size: int = setting(
        16,
        "Features in an update, and samples in a forward pass.",
        ge=1,
        group="module and fit",
    )
    clip_model: str | None = setting(
        None,
        "CLIP checkpoint with the visual projection. Null: the pool's base model.",
        accepts="a folder or hub id",
        group="corrected feature",
    )
    final_norm: str | None = setting(
        None,
        "Module of a language model whose output, the head's input, is corrected. Null: found for "
        "T5 and Llama.",
        accepts="a name",
    )
    normalize: str = setting(
        "none",
        "`none` corrects features as projected (the authors); `pre` corrects features of norm 1 "
        "(FusionBench; CLIP only).",
        choices=NORMALIZE,
    )
    samples_per_task: int = same_as(FeatCalSettings, "samples_per_task", group="data")
    seed: int = same_as(FeatCalSettings, "seed")
    stream: str = setting(
        "test_tta",
        "`test_tta` fits on samples of the test split, as the papers do; `calibration` on those "
        "that FeatCal draws.",
        choices=("test_tta", "calibration"),
    )
    calibration_split: str = same_as(
        FeatCalSettings,
        "calibration_split",
        help="Split that stream=calibration draws samples from.",
        choices=("train", "val"),
    )
    calibration_targets: str = same_as(
        FeatCalSettings,
        "calibration_targets",
        help="Text after the prompt with stream=calibration: the data's `labels`, or the output of "
        "the task's expert (`generated`). Test samples always have the expert's.",
        group="texts only",
    )
    generated_tokens: int = same_as(FeatCalSettings, "generated_tokens")
    max_length: int | None = same_as(FeatCalSettings, "max_length")

    # By task the loss of every update of the last `post_merge`.
    losses: dict[str, list[float]] = field(default_factory=dict, init=False, repr=False)

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, defaults included."""
        return {"method": self.name} | super().settings

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
        self.losses.clear()
        self.losses.update({t: torch.stack(values).tolist() for t, values in losses.items()})
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
        settings = self.calibration_settings.replace(
            batch_size=self.batch_size,
            calibration_split=self.split,
            calibration_targets="generated" if answers else self.calibration_targets,
        )
        return inputs.batches(settings)

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
