"""Merged CLIP vision models with corrections, as FusionBench evaluates them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import CLIPVisionModel

from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.families.base import hidden_output
from fusion_bench_featcal.lab.rivals.corrected_model import VARIANT, Corrected
from fusion_bench_featcal.lab.rivals.projection import project, to_unit_norm
from fusion_bench_featcal.settings import CalibrationError

NORMALIZE = ("none", "pre")


class _CorrectedTower(Corrected):
    """Forwards like the merged model; corrects projected features when told the task.

    Attributes:
        projection: CLIP's visual projection.
    """

    def __init__(
        self,
        model: nn.Module,
        projection: nn.Linear,
        corrections: Mapping[str, nn.Module],
        **record: Any,
    ) -> None:
        super().__init__(model, corrections, **record)
        self.projection = projection.requires_grad_(False)

    def compute_surgery_features(
        self, compute_features_fn: Tensor | Callable[[nn.Module], Tensor], dataset_name: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """FusionBench's protocol, which is told the task only after the model ran.

        Args:
            compute_features_fn: Normalised projected features `[batch, d]` of the images last
                passed through this model, or a function that computes them with a model.
            dataset_name: The task's name.

        Returns:
            Corrected features, features, and their difference, `[batch, d]` each. Corrected
            features have norm 1, except with `normalize: pre`, as in FusionBench.

        Raises:
            CalibrationError: If there is no correction for the task, or the features are not those
                of the images last passed through this model.
        """
        given = compute_features_fn
        features = given if isinstance(given, Tensor) else given(self)
        corrected = self._corrected(features, dataset_name)
        return corrected, features, features - corrected

    def _corrected(self, features: Tensor, task: str) -> Tensor:
        raise NotImplementedError

    @classmethod
    def from_pretrained(cls, folder: str | Path, **kwargs: Any) -> Any:
        """Load what `save_pretrained` saved; further arguments are `CLIPVisionModel`'s.

        Raises:
            CalibrationError: If the folder holds no such model.
        """
        tensors, options = cls._saved(folder)
        weight = tensors["projection.weight"]
        projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        projection.weight = nn.Parameter(weight)
        model = CLIPVisionModel.from_pretrained(folder, variant=VARIANT, **kwargs)
        return cls(model, projection, **options)


class CorrectedModel(_CorrectedTower):
    """A merged model with corrections of its projected features.

    Corrections of features that are not normalised (`normalize: none`) need the features' length,
    which FusionBench does not hand over: it is remembered from the forward pass just before.

    Attributes:
        normalize: `none` or `pre`.
    """

    stem = "feature_corrections"
    described = (*Corrected.described, "normalize")

    def __init__(self, *args: Any, normalize: str = "none", **kwargs: Any) -> None:
        """Take merged model, projection and corrections, which are frozen; nothing is copied.

        Raises:
            ValueError: If two tasks differ only in dots and dashes, or `normalize` is unknown.
        """
        if normalize not in NORMALIZE:
            raise ValueError(f"normalize must be one of {', '.join(NORMALIZE)}, got {normalize!r}")
        super().__init__(*args, **kwargs)
        self.normalize = normalize
        self._projected: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the merged model."""
        output = self.model(*args, **kwargs)
        if self.normalize == "none":
            self._projected = project(output, self.model, self.projection)
        return output

    def features(self, task: str, *args: Any, **kwargs: Any) -> Tensor:
        """Corrected projected features `[batch, d]` of the model's inputs, not normalised.

        Raises:
            CalibrationError: If there is no correction for the task.
        """
        features = project(self.model(*args, **kwargs), self.model, self.projection)
        correction = self.correction(task)
        return correction(to_unit_norm(features) if self.normalize == "pre" else features)

    def _corrected(self, features: Tensor, task: str) -> Tensor:
        correction = self.correction(task)
        if self.normalize == "pre":
            return correction(features)
        return to_unit_norm(correction(self._remembered(features)))

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


class LayerCorrectedModel(_CorrectedTower):
    """A merged model with corrections behind every block.

    They act while the model runs, so evaluation by FusionBench, which tells the task afterwards,
    costs two passes; `features` costs one.
    """

    stem = "layer_corrections"

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self._blocks = clip_blocks(model)
        self._last: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the merged model."""
        self._last = (args, kwargs)
        return self.model(*args, **kwargs)

    def features(self, task: str, *args: Any, **kwargs: Any) -> Tensor:
        """Corrected projected features `[batch, d]` of the model's inputs, not normalised.

        Raises:
            CalibrationError: If there are no corrections for the task.
        """
        surgery = self.correction(task)
        with corrected_blocks(self.model, self._blocks, surgery.blocks):
            output = self.model(*args, **kwargs)
        return surgery.final(project(output, self.model, self.projection))

    def _corrected(self, features: Tensor, task: str) -> Tensor:
        if self._last is None:
            raise CalibrationError(
                "corrections behind blocks need the images: pass them through this model just "
                "before its features are corrected"
            )
        args, kwargs = self._last
        corrected = to_unit_norm(self.features(task, *args, **kwargs))
        if corrected.shape != features.shape:
            raise CalibrationError(
                f"features {tuple(features.shape)} are not those of the images last passed "
                f"through this model, which give {tuple(corrected.shape)}"
            )
        return corrected


def clip_blocks(model: nn.Module) -> Sequence[str]:
    """Names of a CLIP vision model's encoder layers, in forward order.

    Raises:
        CalibrationError: If it has none.
    """
    return resolve_family("clip", model).stages(model)[0]


@contextmanager
def corrected_blocks(
    model: nn.Module, blocks: Sequence[str], corrections: Iterable[nn.Module]
) -> Iterator[list[Tensor]]:
    """Context in which each block's hidden output is corrected by its module.

    Yields:
        A list to which each block that runs adds its corrected hidden output, averaged over
        tokens, `[batch, d]`.
    """
    means: list[Tensor] = []

    def hook(correction: nn.Module) -> Any:
        def correct(_: nn.Module, __: Any, output: Any) -> Any:
            corrected = correction(hidden_output(output))
            means.append(corrected.flatten(1, -2).mean(1) if corrected.ndim > 2 else corrected)
            return corrected if isinstance(output, Tensor) else (corrected, *output[1:])

        return correct

    handles = [
        model.get_submodule(name).register_forward_hook(hook(correction))
        for name, correction in zip(blocks, corrections, strict=True)
    ]
    try:
        yield means
    finally:
        for handle in handles:
            handle.remove()
