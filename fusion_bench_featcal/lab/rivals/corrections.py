"""Corrections of a merged model's features, fitted for each task to the features of its expert."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fusion_bench_featcal.data.text_batches import TextBatches
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.fusionbench.method import MethodResult, SampleSettings
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.fusionbench.processors import (
    generates_text,
    is_of_speech,
    text_encoder_class,
)
from fusion_bench_featcal.lab.rivals.corrected_model import CorrectedModel
from fusion_bench_featcal.lab.rivals.features import (
    check_projection,
    find_final_norm,
    load_projection,
)
from fusion_bench_featcal.lab.rivals.sites import CorrectedFeature, FinalState, ProjectedFeature
from fusion_bench_featcal.settings import Texts
from fusion_bench_featcal.settings.fields import setting

FittedCorrections = tuple[dict[str, Sequence[nn.Module]], dict[str, Any]]
"""Task -> one correction for each corrected feature, and task -> training curve."""


@dataclass(frozen=True, eq=False)
class CorrectionData:
    """One task's data for its corrections.

    Attributes:
        inputs: The merged model's final features, `[n, d]`, or indices of samples for `run`, `[n]`.
        targets: The expert's features on the same samples, `[n, d]` for each correction.
        run: Returns the corrected features from corrections and some of the inputs.
    """

    inputs: Tensor
    targets: Sequence[Tensor]
    run: Callable[[Sequence[nn.Module], Tensor], list[Tensor]] = lambda modules, x: [modules[0](x)]


class FeatureCorrection(SampleSettings, Texts):
    """A post-merging method that corrects final features. Subclasses implement `fit_all`."""

    corrects_language_models: ClassVar[bool] = True
    changes_merged: ClassVar[bool] = False

    batch_size: int = setting(
        16,
        "Number of features in an update, and of samples in a forward pass.",
        ge=1,
    )
    clip_model: str | None = setting(
        None,
        "CLIP checkpoint with the visual projection. Null: the pool's base model.",
        accepts="a folder or hub id",
    )
    final_norm: str | None = setting(
        None,
        "Module of a language model whose output, the input of the head, is corrected. Null: found "
        "automatically for T5 and Llama.",
        accepts="a name",
    )
    stream: str = setting(
        "test_tta",
        "`test_tta` fits on samples of the test split, as the papers do. `calibration` fits on the "
        "same samples as FeatCal.",
        choices=("test_tta", "calibration"),
    )
    calibration_split: str = setting(
        "train", "Split that stream=calibration takes samples from.", choices=("train", "val")
    )
    calibration_targets: str = setting(
        "labels",
        "Text after the prompt with stream=calibration: the data's `labels`, or the output of "
        "the task's expert (`generated`). With test samples it is always the expert's output.",
        choices=("labels", "generated"),
    )

    @property
    def split(self) -> str:
        """Data split of the stream."""
        return "test" if self.stream == "test_tta" else self.calibration_split

    def fit_all(self, training_data: Mapping[str, CorrectionData]) -> FittedCorrections:
        """Fit all tasks' corrections.

        Raises:
            CalibrationError: If features do not vary, or a training diverges.
        """
        raise NotImplementedError

    def open(self, inputs: MethodInputs) -> None:
        """Find the feature to correct, and open the data.

        Raises:
            CalibrationError: If the models have no such feature, or a task lacks data.
        """
        self.find_site(inputs)
        super().open(inputs)

    def find_site(self, inputs: MethodInputs) -> Callable[[], CorrectedFeature]:
        """Find the feature to correct before a model is loaded.

        Returns:
            A function that loads what the feature needs, such as CLIP's projection.

        Raises:
            CalibrationError: If the models have no such feature.
        """
        models, modelpool = inputs.models, inputs.modelpool
        if is_of_speech(modelpool):
            raise CalibrationError(f"{self.name} does not support speech models: leave it out")
        if generates_text(modelpool):
            if not self.corrects_language_models:
                raise CalibrationError(
                    f"{self.name} does not support language models: leave it out"
                )
            return partial(FinalState, find_final_norm(models, self.final_norm))
        if (pooling := inputs.pooling) is not None:
            return lambda: pooling
        if text_encoder_class(modelpool) is not None:
            raise CalibrationError(
                f"{self.name} does not support classifiers: leave it out. For encoders without a "
                "head, set taskpool.pooling, or add the files of sentence-transformers "
                f"(modules.json) to the base (modelpool.models.{BASE_MODEL})"
            )
        config = models.base.config if models.base is not None else None
        if "clip" not in (model_type := str((config or {}).get("model_type", "clip"))):
            raise CalibrationError(
                f"{self.name} does not support {model_type} models: leave it out"
            )
        check_projection(models, self.clip_model)
        device = inputs.fabric.device
        return lambda: ProjectedFeature(load_projection(models, self.clip_model).to(device))

    def batches(self, inputs: MethodInputs) -> dict[str, Any]:
        """Draw each task's samples, which are FeatCal's with the same seed, split and number."""
        settings = self.calibration_settings.replace(calibration_split=self.split)
        if self.split == "test" and generates_text(inputs.modelpool):
            # Targets of the test data would reveal the correct answers.
            settings = settings.replace(calibration_targets="generated")
        return inputs.batches(settings)

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> MethodResult:
        """Correct a merged model, which becomes part of the new model.

        One expert is in memory at a time. Raises as `open` and `fit_all`.
        """
        pool, device = inputs.modelpool, inputs.fabric.device
        batches, merged = self.take_batches(inputs), merged.to(device).eval().requires_grad_(False)
        site, training_data = self.find_site(inputs)(), {}
        for task in pool.model_names:
            # Frees an expert that wrote answers before it is loaded again.
            source = batches[task]
            drawn = source.checked(merged) if isinstance(source, TextBatches) else list(source)
            drawn = [{name: x.to(device) for name, x in batch.items()} for batch in drawn]
            expert = load_pool_model(pool, task).to(device).eval()
            with error_context(task=task), torch.no_grad():
                training_data[task] = data = self.training_data(merged, expert, drawn, site)
                if not all(bool(x.isfinite().all()) for x in (data.inputs, *data.targets)):
                    raise CalibrationError(
                        "features of the merged model or the expert are not finite. Look for NaN "
                        "or infinite values in their weights"
                    )
            del expert
        corrections, curves = self.fit_all(training_data)
        counts = {task: batches[task].samples for task in training_data}
        return MethodResult(CorrectedModel(merged, corrections, site), counts, curves)

    def training_data(
        self,
        merged: nn.Module,
        expert: nn.Module,
        batches: Sequence[object],
        site: CorrectedFeature,
    ) -> CorrectionData:
        """Run both models over a task's batches."""
        pairs = [[site.features(m, batch).float() for m in (merged, expert)] for batch in batches]
        features, targets = map(torch.cat, zip(*pairs, strict=True))
        return CorrectionData(features, [targets])

    def added(self, model: nn.Module) -> dict[str, int]:
        """Return module -> number of parameters, of all corrections."""
        corrections = model.get_submodule("corrections").named_modules()
        sizes = {n: sum(p.numel() for p in m.parameters(recurse=False)) for n, m in corrections}
        return {name: size for name, size in sizes.items() if size}


class ClosedFormCorrection(FeatureCorrection):
    """A correction in closed form, which by default is fitted on calibration samples."""

    stream: str = setting(
        "calibration",
        "`calibration` fits on the same samples as FeatCal, `test_tta` on samples of the test "
        "split.",
        choices=("test_tta", "calibration"),
    )
