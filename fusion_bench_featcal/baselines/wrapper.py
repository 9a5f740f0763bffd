"""A merged model together with its tasks' feature corrections, as FusionBench evaluates it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.baselines.checkpoint import (
    load_checkpoint,
    save_checkpoint,
    task_modules,
)
from fusion_bench_featcal.baselines.corrections import Correction, correction_from, correction_of
from fusion_bench_featcal.baselines.features import to_unit_norm
from fusion_bench_featcal.baselines.projection import pooled_output, project
from fusion_bench_featcal.baselines.settings import NORMALIZE
from fusion_bench_featcal.baselines.training import Curve
from fusion_bench_featcal.settings import CalibrationError

_STEM = "feature_corrections"


class CorrectedModel(nn.Module):
    """Forwards like the merged model; corrects projected features when told the task.

    FusionBench's classifier finds `is_surgery_model`, and hands `compute_surgery_features` the
    normalised projected features with the task's name. Corrections of features that are not
    normalised (`normalize: none`) need their length too, which is remembered from the forward pass
    just before.

    Attributes:
        model: The merged model.
        projection: CLIP's visual projection.
        corrections: A correction for each task.
        tasks: The tasks' names.
        normalize: `none` or `pre`.
        samples: Task -> `{"samples": number, "split": name}` that its correction was fitted on.
        curves: Task -> its training's curve; empty where nothing was trained.
    """

    is_surgery_model = True

    def __init__(
        self,
        model: nn.Module,
        projection: nn.Linear,
        corrections: Mapping[str, Correction],
        *,
        normalize: str = "none",
        samples: Mapping[str, Mapping[str, Any]] | None = None,
        curves: Mapping[str, Curve] | None = None,
    ) -> None:
        """Put the parts together and freeze them; the merged model is not copied.

        Raises:
            ValueError: If two tasks differ only in dots and dashes, or `normalize` is unknown.
        """
        super().__init__()
        if normalize not in NORMALIZE:
            raise ValueError(f"normalize must be one of {', '.join(NORMALIZE)}, got {normalize!r}")
        self.model = model
        self.projection = projection
        self.tasks = tuple(corrections)
        self.normalize = normalize
        self.samples = {task: dict(used) for task, used in (samples or {}).items()}
        self.curves = dict(curves or {})
        self.corrections = task_modules(corrections)
        self.requires_grad_(False).eval()
        self._projected: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the merged model."""
        output = self.model(*args, **kwargs)
        if self.normalize == "none":
            self._projected = project(pooled_output(output, self.model), self.projection)
        return output

    def correct(self, features: Tensor, task: str) -> Tensor:
        """Correct a task's features.

        Args:
            features: `[batch, d]`, normalised if `normalize` is `pre`.
            task: The task's name.

        Returns:
            Corrected features, not normalised.

        Raises:
            CalibrationError: If there is no correction for the task.
        """
        return self._correction(task)(features)

    def features(self, task: str, *args: Any, **kwargs: Any) -> Tensor:
        """Corrected projected features of a task's images.

        Args:
            task: The task's name.
            *args: The model's inputs.
            **kwargs: The model's inputs.

        Returns:
            `[batch, d]`, not normalised.

        Raises:
            CalibrationError: If there is no correction for the task.
        """
        output = self.model(*args, **kwargs)
        features = project(pooled_output(output, self.model), self.projection)
        return self.correct(to_unit_norm(features) if self.normalize == "pre" else features, task)

    def compute_surgery_features(
        self, compute_features_fn: Tensor | Callable[[nn.Module], Tensor], dataset_name: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """FusionBench's protocol.

        Args:
            compute_features_fn: Normalised projected features `[batch, d]`, or what computes them
                with a model.
            dataset_name: The task's name.

        Returns:
            Corrected features, features, and their difference, `[batch, d]` each. With
            `normalize: none` the corrected features have norm 1; with `pre` they have the length
            that the correction gave them, as in FusionBench.

        Raises:
            CalibrationError: If there is no correction for the task, or (`none`) the features are
                not those of the images last passed through this model.
        """
        correction = self._correction(dataset_name)
        given = compute_features_fn
        features = given if isinstance(given, Tensor) else given(self)
        if self.normalize == "pre":
            corrected = correction(features)
        else:
            corrected = to_unit_norm(correction(self._remembered(features)))
        return corrected, features, features - corrected

    def added_parameters(self) -> int:
        """Numbers that deployment needs beyond the merged model's, over all tasks."""
        return sum(parameter.numel() for parameter in self.corrections.parameters())

    def save_pretrained(self, folder: str | Path, **kwargs: Any) -> None:
        """Save the merged model and the corrections.

        Args:
            folder: Where to; `from_pretrained` reads it.
            **kwargs: For the merged model's own `save_pretrained`.
        """
        save_checkpoint(self, folder, _STEM, {"normalize": self.normalize}, **kwargs)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **kwargs: Any) -> "CorrectedModel":
        """Load what `save_pretrained` saved.

        Args:
            folder: The folder.
            **kwargs: For `CLIPVisionModel.from_pretrained`.

        Returns:
            The model.

        Raises:
            CalibrationError: If the folder holds no corrected model.
        """
        model, projection, parts, told = load_checkpoint(folder, _STEM, **kwargs)
        corrections = {task: correction_from(part, task, _STEM) for task, part in parts.items()}
        kept = {key: told[key] for key in ("normalize", "samples", "curves")}
        return cls(model, projection, corrections, **kept)

    def _correction(self, task: str | None) -> Correction:
        return correction_of(self.corrections, self.tasks, task)

    def _remembered(self, features: Tensor) -> Tensor:
        """The features of the last forward pass, of which the given ones are the directions."""
        projected = self._projected
        if projected is not None and projected.shape == features.shape:
            cosine = (to_unit_norm(projected) * features).sum(dim=-1)
            if bool((cosine > 0.99).all()):
                return projected
        raise CalibrationError(
            "corrections fitted with method.normalize=none need features before they are "
            "normalised: pass the images through this model just before its features are "
            "corrected, with the visual projection that it was fitted with"
        )
