"""A merged model with its tasks' corrections behind every block, as FusionBench evaluates it."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPVisionModel

from fusion_bench_featcal.baselines.features import pooled_output, project, to_unit_norm
from fusion_bench_featcal.baselines.surgery import SurgeryModule
from fusion_bench_featcal.baselines.surgery_v2 import LayerSurgery, corrected_blocks
from fusion_bench_featcal.baselines.training import Curve
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.settings import CalibrationError

# As for corrections of final features: the folder must not load as a plain CLIP vision model.
_VARIANT = "uncorrected"
_TENSORS = "layer_corrections.safetensors"
_DESCRIPTION = "layer_corrections.json"


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
        self.corrections = nn.ModuleDict({_key(task): part for task, part in corrections.items()})
        if len(self.corrections) < len(self.tasks):
            raise ValueError(f"tasks must differ in more than '-', '.' and '_': {self.tasks}")
        self._blocks = clip_blocks(model)
        self._last: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.requires_grad_(False).eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the merged model returns."""
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
        target, model = Path(folder), self.model
        model.save_pretrained(target, variant=_VARIANT, **kwargs)  # type: ignore[operator]
        tensors = {
            f"{name}.{key}": tensor.contiguous()
            for name, part in (("projection", self.projection), ("corrections", self.corrections))
            for key, tensor in part.state_dict().items()
        }
        save_file(tensors, target / _TENSORS)
        description = {"tasks": list(self.tasks), "samples": self.samples}
        (target / _DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", "utf-8")

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
        source = Path(folder)
        if not ((source / _TENSORS).is_file() and (source / _DESCRIPTION).is_file()):
            raise CalibrationError(
                f"{source} holds no model with corrections behind blocks: {_TENSORS} or "
                f"{_DESCRIPTION} is missing"
            )
        description = json.loads((source / _DESCRIPTION).read_text("utf-8"))
        tensors = load_file(source / _TENSORS)
        weight = tensors["projection.weight"]
        projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        projection.weight = nn.Parameter(weight)
        model = CLIPVisionModel.from_pretrained(source, variant=_VARIANT, **kwargs)
        count = len(clip_blocks(model))
        corrections = {task: _surgery_from(tensors, task, count) for task in description["tasks"]}
        return cls(model, projection, corrections, samples=description["samples"])

    def _surgery(self, task: str | None) -> LayerSurgery:
        if task not in self.tasks:
            raise CalibrationError(
                f"there are no corrections for task {task!r}: surgery methods must be told the "
                f"task, and correct those they were fitted on: {', '.join(self.tasks)}"
            )
        return self.corrections[_key(task)]  # type: ignore[return-value]


def clip_blocks(model: nn.Module) -> Sequence[str]:
    """Names of a CLIP vision model's encoder layers, in forward order.

    Raises:
        CalibrationError: If it has none.
    """
    return resolve_family("clip", model).stages(model)[0]


def _key(task: str) -> str:
    """A task's name as a module's: FusionBench replaces the same two characters."""
    return "task_" + task.replace("-", "_").replace(".", "_")


def _surgery_from(tensors: Mapping[str, Tensor], task: str, count: int) -> LayerSurgery:
    def part(name: str) -> SurgeryModule:
        prefix = f"corrections.{_key(task)}.{name}"
        return SurgeryModule(tensors[f"{prefix}.down"], tensors[f"{prefix}.up"])

    try:
        return LayerSurgery([part(f"blocks.{index}") for index in range(count)], part("final"))
    except KeyError as error:
        raise CalibrationError(f"{_TENSORS} lacks {error} for task {task!r}") from error
