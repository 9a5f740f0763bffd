"""`OpenClipTaskPool`: zero-shot evaluation of open_clip models."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.tasks.clip_pool import ClipTaskPool


class OpenClipTaskPool(ClipTaskPool):
    """Evaluates open_clip's image encoders with the heads of a transformers CLIP model.

    The encoder's projection replaces the visual projection of `clip_model`.
    """

    def _load_models(self) -> None:
        """Load as `ClipTaskPool`, without the visual projection."""
        super()._load_models()
        width = self.clip_model.text_projection.out_features
        self.clip_model.visual_projection = _AlreadyProjected(width)  # type: ignore[assignment]

    @contextmanager
    def _prepared(self, model: nn.Module) -> Iterator[Any]:
        with super()._prepared(_ImageEncoder(model)) as classifier:
            yield classifier


class _ImageEncoder(nn.Module):
    """An open_clip model, or its vision tower, as a function of images only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        """Return features `[batch, d]` in the model's dtype."""
        encode = getattr(self.model, "encode_image", self.model)
        return encode(pixels.to(next(self.model.parameters()).dtype))


class _AlreadyProjected(nn.Module):
    """Identity in place of the visual projection. Checks the width of the features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, features: Tensor) -> Tensor:
        """Return the features in float32, the head's dtype."""
        if features.shape[-1] != self.width:
            raise CalibrationError(
                f"the evaluated model's features have {features.shape[-1]} channels, but the text "
                f"features of taskpool.clip_model have {self.width}: they belong to different "
                "models"
            )
        return features.float()
