"""`OpenClipTaskPool`: the same tasks and zero-shot heads, for models of open_clip."""

from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.tasks.clip_pool import ClipTaskPool
from fusion_bench_featcal.tasks.scoring import Score


class OpenClipTaskPool(ClipTaskPool):
    """Evaluates open_clip's image encoders with the heads of a transformers CLIP model.

    The encoder's own projection makes features that are compared with the text features of
    `clip_model`, whose visual projection is left out.
    """

    def setup(self) -> None:
        """As in `ClipTaskPool`, without the visual projection."""
        super().setup()
        width = self.clip_model.text_projection.out_features
        self.clip_model.visual_projection = _AlreadyProjected(width)  # type: ignore[assignment]

    def _scores(self, model: nn.Module) -> dict[str, Score]:
        return super()._scores(_ImageEncoder(model))


class _ImageEncoder(nn.Module):
    """An open_clip model, or its vision tower, as a map from pictures to features."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        """Features `[batch, d]`, in the model's dtype whatever the pictures' is."""
        encode: Any = getattr(self.model, "encode_image", self.model)
        return encode(pixels.to(next(self.model.parameters()).dtype))


class _AlreadyProjected(nn.Module):
    """Stands where the classifier projects image features, and only checks and widens them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, features: Tensor) -> Tensor:
        """The features in float32, in which the head computes."""
        if features.shape[-1] != self.width:
            raise CalibrationError(
                f"the evaluated model's features have {features.shape[-1]} channels, the text "
                f"features of taskpool.clip_model {self.width}: they belong to different models"
            )
        return features.float()
