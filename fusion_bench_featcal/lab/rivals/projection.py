"""CLIP's projected features, which a zero-shot head compares with text features."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import CLIPModel

from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, PoolModels
from fusion_bench_featcal.hub_files import fetch
from fusion_bench_featcal.settings import CalibrationError

_PROJECTION = "visual_projection.weight"


@dataclass(frozen=True)
class ProjectedFeatures:
    """The corrected features of CLIP vision models: the pooled output, projected."""

    projection: nn.Linear

    def features(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return features `[batch, d]` for the zero-shot head. Raises as `project`."""
        pixels = batch["pixel_values"].to(next(model.parameters()).dtype)
        return project(model(pixels), model, self.projection)


def to_unit_norm(features: Tensor) -> Tensor:
    """Return features `[..., d]` divided by their Euclidean norm."""
    return features / features.norm(dim=-1, keepdim=True)


def project(output: Any, model: nn.Module, projection: nn.Module) -> Tensor:
    """Return features `[batch, d]` of a vision tower's output, in the projection's dtype.

    Raises:
        CalibrationError: If there is no pooled output, or the projection takes another width.
    """
    pooled = output if isinstance(output, Tensor) else getattr(output, "pooler_output", None)
    if pooled is None or pooled.ndim != 2:
        raise CalibrationError(
            f"{type(model).__name__} has no pooled output, so there are no projected features to "
            "correct: surgery methods work on CLIP vision models"
        )
    weight = next(projection.parameters(), None)
    if weight is None:  # placeholder in models that project features themselves
        return projection(pooled)
    if pooled.shape[-1] != weight.shape[-1]:
        raise CalibrationError(
            f"a model's pooled output is {pooled.shape[-1]} wide, the visual projection takes "
            f"{weight.shape[-1]}: check modelpool.models and method.clip_model"
        )
    return projection(pooled.to(weight.dtype))


def check_projection(models: PoolModels, clip_model: str | None) -> None:
    """Check that a projection for `load_projection` exists, before any model is loaded.

    Raises:
        CalibrationError: If the base's files have none.
    """
    if clip_model is None:
        location, files = _base_location(models), models[BASE_MODEL].files
        if files is not None and _PROJECTION not in files.names():
            raise _no_projection(location)


def load_projection(models: PoolModels, clip_model: str | None) -> nn.Linear:
    """Load CLIP's visual projection of pooled outputs: a frozen float32 copy.

    Args:
        models: The pool's models.
        clip_model: Folder or hub id of a CLIP checkpoint with a projection, by default the base.

    Raises:
        CalibrationError: If there is none.
    """
    location = _base_location(models) if clip_model is None else clip_model
    folder = fetch(location, f"method.clip_model={location}")
    try:
        loaded: Any = CLIPModel.from_pretrained(folder, output_loading_info=True)
    except (OSError, ValueError) as error:
        raise CalibrationError(
            f"{location!r} cannot be loaded for its visual projection: {error}. Set "
            "method.clip_model to a CLIP checkpoint"
        ) from error
    model, info = loaded
    if _PROJECTION in info["missing_keys"]:
        raise _no_projection(location)
    return model.visual_projection.float().requires_grad_(False)


def _base_location(models: PoolModels) -> str:
    """Return the folder or hub id of the base model's checkpoint."""
    location = None if models.base is None else models.base.location
    if location is None:
        raise CalibrationError(
            f"the pool's base model (modelpool.models.{BASE_MODEL}) is no checkpoint whose visual "
            "projection could be read: set method.clip_model to a CLIP checkpoint, which surgery "
            "methods need for the projected features that they correct"
        )
    return location


def _no_projection(location: str) -> CalibrationError:
    return CalibrationError(
        f"{location} has no {_PROJECTION}, so there are no projected features to correct: surgery "
        "methods need a CLIP model. Set method.clip_model to a checkpoint that has it"
    )
