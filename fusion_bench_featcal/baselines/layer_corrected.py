"""A merged model with its tasks' corrections behind every block, as FusionBench evaluates it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.baselines.checkpoint import (
    load_checkpoint,
    save_checkpoint,
    task_key,
    task_modules,
)
from fusion_bench_featcal.baselines.features import to_unit_norm
from fusion_bench_featcal.baselines.projection import pooled_output, project
from fusion_bench_featcal.baselines.surgery import SurgeryModule
from fusion_bench_featcal.baselines.surgery_v2 import LayerSurgery, corrected_blocks
from fusion_bench_featcal.baselines.training import Curve
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.settings import CalibrationError

_STEM = "layer_corrections"


class LayerCorrectedModel(nn.Module):
    """Forwards like the merged model; when told the task, runs again with its corrections.

    FusionBench's classifier tells the task only after the model ran, and corrections behind blocks
    act while it runs. So evaluation by FusionBench costs two passes; `features` costs one.

    Attributes:
        model: The merged model.
        projection: CLIP's visual projection.
        corrections: Each task's modules.
        tasks: The tasks' names.
        samples: Task -> `{"samples": number, "split": name}` that they were trained on.
        curves: Task -> its training's curve.
    """

    is_surgery_model = True

    def __init__(
        self,
        model: nn.Module,
        projection: nn.Linear,
        corrections: Mapping[str, LayerSurgery],
        *,
        samples: Mapping[str, Mapping[str, Any]] | None = None,
        curves: Mapping[str, Curve] | None = None,
    ) -> None:
        """Put the parts together and freeze them; the merged model is not copied.

        Raises:
            ValueError: If two tasks differ only in dots and dashes.
        """
        super().__init__()
        self.model = model
        self.projection = projection
        self.tasks = tuple(corrections)
        self.samples = {task: dict(used) for task, used in (samples or {}).items()}
        self.curves = dict(curves or {})
        self.corrections = task_modules(corrections)
        self._blocks = clip_blocks(model)
        self._last: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.requires_grad_(False).eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the merged model."""
        self._last = (args, kwargs)
        return self.model(*args, **kwargs)

    def features(self, task: str, *args: Any, **kwargs: Any) -> Tensor:
        """Corrected projected features of a task's images.

        Args:
            task: The task's name.
            *args: The model's inputs.
            **kwargs: The model's inputs.

        Returns:
            `[batch, d]`, not normalised.

        Raises:
            CalibrationError: If there are no corrections for the task.
        """
        surgery = self._surgery(task)
        with corrected_blocks(self.model, self._blocks, surgery.blocks):
            output = self.model(*args, **kwargs)
        return surgery.final(project(pooled_output(output, self.model), self.projection))

    def compute_surgery_features(
        self, compute_features_fn: Tensor | Callable[[nn.Module], Tensor], dataset_name: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """FusionBench's protocol.

        Args:
            compute_features_fn: Normalised projected features `[batch, d]` of the images last
                passed through this model, or what computes them with a model.
            dataset_name: The task's name.

        Returns:
            Corrected features of norm 1, the given features, and their difference.

        Raises:
            CalibrationError: If there are no corrections for the task, or the features are not
                those of the images last passed through this model.
        """
        given = compute_features_fn
        features = given if isinstance(given, Tensor) else given(self)
        if self._last is None:
            raise CalibrationError(
                "corrections behind blocks need the images: pass them through this model just "
                "before its features are corrected"
            )
        args, kwargs = self._last
        corrected = to_unit_norm(self.features(dataset_name, *args, **kwargs))
        if corrected.shape != features.shape:
            raise CalibrationError(
                f"features {tuple(features.shape)} are not those of the images last passed "
                f"through this model, which give {tuple(corrected.shape)}"
            )
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
        save_checkpoint(self, folder, _STEM, {}, **kwargs)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **kwargs: Any) -> "LayerCorrectedModel":
        """Load what `save_pretrained` saved.

        Args:
            folder: The folder.
            **kwargs: For `CLIPVisionModel.from_pretrained`.

        Returns:
            The model.

        Raises:
            CalibrationError: If the folder holds no such model.
        """
        model, projection, parts, told = load_checkpoint(folder, _STEM, **kwargs)
        count = len(clip_blocks(model))
        corrections = {task: _surgery_from(part, task, count) for task, part in parts.items()}
        kept = {key: told[key] for key in ("samples", "curves")}
        return cls(model, projection, corrections, **kept)

    def _surgery(self, task: str | None) -> LayerSurgery:
        if task not in self.tasks:
            raise CalibrationError(
                f"there are no corrections for task {task!r}: surgery methods must be told the "
                f"task, and correct those they were fitted on: {', '.join(self.tasks)}"
            )
        return self.corrections[task_key(task)]  # type: ignore[return-value]


def clip_blocks(model: nn.Module) -> Sequence[str]:
    """Names of a CLIP vision model's encoder layers, in forward order.

    Raises:
        CalibrationError: If it has none.
    """
    return resolve_family("clip", model).stages(model)[0]


def _surgery_from(part: Mapping[str, Tensor], task: str, count: int) -> LayerSurgery:
    def module(name: str) -> SurgeryModule:
        return SurgeryModule(part[f"{name}.down"], part[f"{name}.up"])

    try:
        return LayerSurgery([module(f"blocks.{index}") for index in range(count)], module("final"))
    except KeyError as error:
        raise CalibrationError(f"{_STEM}.safetensors lacks {error} for task {task!r}") from error
