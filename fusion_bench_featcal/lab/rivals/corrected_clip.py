"""Merged CLIP vision models with corrections, for evaluation by FusionBench."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import CLIPVisionModel

from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.lab.rivals.corrected_model import VARIANT, Corrected, corrected_outputs
from fusion_bench_featcal.lab.rivals.projection import project, to_unit_norm
from fusion_bench_featcal.settings import CalibrationError


class CorrectedModel(Corrected):
    """A merged model with corrections of its projected features, which `forward` does not apply.

    FusionBench passes the task after the forward pass, with features of norm 1. Corrections are of
    features that are not normalised, so the last pass is stored.

    Attributes:
        projection: CLIP's visual projection.
    """

    stem = "feature_corrections"

    def __init__(
        self,
        model: nn.Module,
        projection: nn.Linear,
        corrections: Mapping[str, nn.Module],
        **record: Any,
    ) -> None:
        super().__init__(model, corrections, **record)
        self.projection = projection.requires_grad_(False)
        self._last: tuple[tuple[Any, ...], dict[str, Any], Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the merged model."""
        output = self.model(*args, **kwargs)
        self._last = (args, kwargs, output)
        return output

    def features(self, task: str, *args: Any, **kwargs: Any) -> Tensor:
        """Return corrected projected features `[batch, d]` of the inputs, not normalised."""
        return self._corrected(task, self.model(*args, **kwargs))

    def compute_surgery_features(
        self, compute_features_fn: Tensor | Callable[[nn.Module], Tensor], dataset_name: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Correct features by FusionBench's protocol.

        Args:
            compute_features_fn: Normalised projected features `[batch, d]` of the images last
                passed through this model, or a function that computes them with a model.
            dataset_name: The task's name.

        Returns:
            Corrected features, features, and their difference, `[batch, d]` each. The first two
            have norm 1.

        Raises:
            CalibrationError: If there is no correction for the task, or the features do not belong
                to the images last passed through this model.
        """
        features_or_function = compute_features_fn
        self.correction(dataset_name)
        features = (
            features_or_function
            if isinstance(features_or_function, Tensor)
            else features_or_function(self)
        )
        corrected = to_unit_norm(self._again(dataset_name, *self._last_call(features)))
        return corrected, features, features - corrected

    def _last_call(self, features: Tensor) -> tuple[Any, ...]:
        """Return arguments and output of the last forward pass, which must give the features."""
        if self._last is not None:
            last = to_unit_norm(project(self._last[2], self.model, self.projection))
            if last.shape == features.shape and bool(((last * features).sum(dim=-1) > 0.99).all()):
                return self._last
        raise CalibrationError(
            "corrections of features that are not normalised need the images: pass them through "
            "this model just before its features are corrected, with the visual projection that "
            "it was fitted with"
        )

    def _again(self, task: str, args: Any, kwargs: Any, output: Any) -> Tensor:
        """Return corrected features of an uncorrected forward pass."""
        return self._corrected(task, output)

    def _corrected(self, task: str, output: Any) -> Tensor:
        return self.correction(task)(project(output, self.model, self.projection))

    @classmethod
    def _loaded(cls, folder: Any, tensors: Any, **kwargs: Any) -> dict[str, Any]:
        weight = tensors["projection.weight"]
        projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        projection.weight = nn.Parameter(weight)
        model = CLIPVisionModel.from_pretrained(folder, variant=VARIANT, **kwargs)
        return {"model": model, "projection": projection}


class LayerCorrectedModel(CorrectedModel):
    """A merged model with corrections after every block and of its projected features.

    The corrections after blocks act during a forward pass, so evaluation by FusionBench costs two
    passes. `features` costs one.
    """

    stem = "layer_corrections"

    def features(self, task: str, *args: Any, **kwargs: Any) -> Tensor:
        """Return corrected projected features `[batch, d]` of the inputs, not normalised."""
        corrections = self.correction(task)
        with corrected_outputs(self.model, clip_blocks(self.model), corrections.blocks):
            output = self.model(*args, **kwargs)
        return corrections.final(project(output, self.model, self.projection))

    def _again(self, task: str, args: Any, kwargs: Any, output: Any) -> Tensor:
        return self.features(task, *args, **kwargs)


def clip_blocks(model: nn.Module) -> Sequence[str]:
    """Return the names of a CLIP vision model's encoder layers, in forward order."""
    return resolve_family("clip", model).stages(model)[0]
