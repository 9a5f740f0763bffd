"""Correction of a merged model's final features, separately for each task with its expert."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fusion_bench_featcal.calibration_text import TextBatches
from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.lab.rivals.corrected_clip import CorrectedModel
from fusion_bench_featcal.lab.rivals.corrected_language_model import CorrectedLanguageModel
from fusion_bench_featcal.lab.rivals.corrected_model import Corrected
from fusion_bench_featcal.lab.rivals.final_features import FinalStates, find_final_norm
from fusion_bench_featcal.lab.rivals.projection import (
    ProjectedFeatures,
    check_projection,
    load_projection,
)
from fusion_bench_featcal.lab.rivals.registry import Method
from fusion_bench_featcal.lab.rivals.training import TaskFeatures, check_features, thinned
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.setting_fields import same_as, setting
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.streams.samples import naming_task


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureCorrection(Method):
    """A correction of final features as a post-merging method. Subclasses implement `fit_all`."""

    texts: ClassVar[bool] = True  # whether it also corrects language models

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
    samples_per_task: int = same_as(FeatCalSettings, "samples_per_task", group="data")
    seed: int = same_as(FeatCalSettings, "seed")
    stream: str = setting(
        "test_tta",
        "`test_tta` fits on samples of the test split, as the papers do; `calibration` on those "
        "that FeatCal draws.",
        choices=("test_tta", "calibration"),
    )
    calibration_corruption: Mapping[str, Any] | None = same_as(
        FeatCalSettings, "calibration_corruption"
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

    # Task -> loss of every update in the last fit.
    losses: dict[str, list[float]] = field(default_factory=dict, init=False, repr=False)

    @property
    def split(self) -> str:
        """Data split of the stream."""
        return "test" if self.stream == "test_tta" else self.calibration_split

    def fit_all(self, features: Mapping[str, TaskFeatures]) -> dict[str, nn.Module]:
        """Fit all tasks' corrections. They are frozen and on the features' device.

        Raises:
            CalibrationError: If features do not vary, or a training diverges.
        """
        raise NotImplementedError

    def fit(self, merged: Tensor, expert: Tensor, task: str = "") -> Any:
        """Fit the correction of one task.

        Args:
            merged: Features of the merged model, `[n, d]`.
            expert: Features of the task's expert on the same samples, `[n, d]`.
            task: The task's name, for seeds and messages.

        Raises:
            CalibrationError: If the features do not fit each other, or as `fit_all`.
        """
        check_features(merged, expert, task)
        return self.fit_all({task: TaskFeatures(merged.detach(), expert.detach())})[task]

    def check(self, inputs: MethodInputs) -> None:
        """Find the feature to correct and open the data.

        Raises:
            CalibrationError: If the models have none, or a task lacks data.
        """
        kind = text_kind(inputs.modelpool)
        if kind == "classification" or (kind is not None and not self.texts):
            raise CalibrationError(
                f"{self.name} corrects CLIP vision models{' and language models' * self.texts}, "
                f"and {type(inputs.modelpool).__name__} holds other models: leave it out"
            )
        if kind is None:
            check_projection(inputs.models, self.clip_model)
        else:
            find_final_norm(inputs.models, self.final_norm)
        self.batches(inputs)

    def batches(self, inputs: MethodInputs) -> dict[str, Any]:
        """Draw each task's samples. Nothing is read yet.

        Samples are equal to FeatCal's with the same seed, split and number. If a task has fewer
        than `samples_per_task`, all are used.

        Raises:
            CalibrationError: If the pool lacks the split for a task, or has no samples.
        """
        split, available = self.split, getattr(inputs.modelpool, f"{self.split}_dataset_names")
        for task in inputs.modelpool.model_names:
            if task not in available:
                option = "" if split == "test" else f" and method.calibration_split={split}"
                raise CalibrationError(
                    f"task {task!r} has no data for method.stream={self.stream}{option}: set "
                    f"modelpool.{split}_datasets.{task}, or choose another stream. The pool's "
                    f"{split}_datasets are: {', '.join(available) or 'none'}"
                )
        # Targets of the test data would reveal the correct answers.
        answers = self.stream == "test_tta" and text_kind(inputs.modelpool) is not None
        settings = self.calibration_settings.replace(
            batch_size=self.batch_size,
            calibration_split=split,
            calibration_targets="generated" if answers else self.calibration_targets,
        )
        return inputs.batches(settings)

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> Corrected:
        """Correct a merged model, which becomes part of the result.

        Every sample passes through merged model and expert once, with one expert in memory at a
        time, and the corrections are fitted to the features.

        Raises:
            CalibrationError: If there is no feature to correct, a task lacks data, or a training
                diverges.
        """
        pool, device = inputs.modelpool, inputs.fabric.device
        batches, merged = self.batches(inputs), merged.to(device).eval()
        if text_kind(pool) is None:
            projection = load_projection(inputs.models, self.clip_model)
            site: Any = ProjectedFeatures(projection.to(device))
        else:
            site = FinalStates(find_final_norm(inputs.models, self.final_norm))
        features = {}
        for task in pool.model_names:
            data = batches[task]
            if isinstance(data, TextBatches):
                # Frees an expert that wrote answers before it is loaded again.
                data = data.checked(merged)
            expert = load_pool_model(pool, task).to(device).eval()
            features[task] = self._collect(merged, expert, site, data, task)
            del expert
        corrections = self.fit_all(features)
        samples = {t: {"samples": b.samples, "split": self.split} for t, b in batches.items()}
        curves = {task: thinned(losses) for task, losses in self.losses.items()}
        return self._corrected(merged, site, corrections, samples=samples, curves=curves)

    def _collect(
        self, merged: nn.Module, expert: nn.Module, site: Any, batches: Any, task: str
    ) -> TaskFeatures:
        """Return `site.features`, `[n, d]`, of both models on a task's batches."""
        models = merged, expert
        with naming_task(task):
            rows = [[self.features(model, site, batch) for model in models] for batch in batches]
            before, target = (torch.cat(side) for side in zip(*rows, strict=True))
            if not len(before):
                raise CalibrationError(
                    "no position predicts a target token, so there is nothing to correct: its "
                    "targets are empty. Give the rows targets, or set "
                    "method.calibration_targets=generated"
                )
        check_features(before, target, task)
        return TaskFeatures(before, target)

    @torch.no_grad()
    def features(self, model: nn.Module, site: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute final features of a batch, `[n, d]` float32."""
        device = next(model.parameters()).device
        on_device = {name: part.to(device) for name, part in batch.items()}
        return site.features(model, on_device).float()

    def _corrected(
        self, merged: nn.Module, site: Any, corrections: Mapping[str, nn.Module], **record: Any
    ) -> Corrected:
        if isinstance(site, FinalStates):
            return CorrectedLanguageModel(merged, site.final_norm, corrections, **record)
        return CorrectedModel(merged, site.projection, corrections, **record)

    def samples(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the samples that the corrections were fitted on, by task."""
        used = self._result(model).samples
        return {task: dict(used[task]) for task in tasks if task in used}

    def added(self, model: nn.Module) -> dict[str, int]:
        """Return module -> parameters of all corrections."""
        return self._result(model).added()

    def _result(self, model: nn.Module) -> Corrected:
        assert isinstance(model, Corrected)
        return model
