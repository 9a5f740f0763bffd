"""Merged CLIP vision models with corrections, as FusionBench evaluates them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import CLIPVisionModel

from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.families.base import hidden_output
from fusion_bench_featcal.methods.corrected_model import (
    VARIANT,
    Corrected,
    Correction,
    SavedCorrections,
    SurgeryModule,
    load_corrections,
)
from fusion_bench_featcal.methods.projection import pooled_output, project, to_unit_norm
from fusion_bench_featcal.settings import CalibrationError

NORMALIZE = ("none", "pre")


class CorrectedModel(Corrected):
    """Forwards like the merged model; corrects projected features when told the task.

    FusionBench's classifier finds `is_surgery_model`, and hands `compute_surgery_features` the
    normalised projected features with the task's name. Corrections of features that are not
    normalised (`normalize: none`) need their length too, which is remembered from the forward pass
    just before.

    Attributes:
        projection: CLIP's visual projection.
        normalize: `none` or `pre`.
    """

    stem = "feature_corrections"

    def __init__(
        self,
        model: nn.Module,
        projection: nn.Linear,
        corrections: Mapping[str, Correction],
        *,
        normalize: str = "none",
        samples: Mapping[str, Mapping[str, Any]] | None = None,
        curves: Mapping[str, Any] | None = None,
    ) -> None:
        """Put the parts together and freeze them.

        Raises:
            ValueError: If two tasks differ only in dots and dashes, or `normalize` is unknown.
        """
        if normalize not in NORMALIZE:
            raise ValueError(f"normalize must be one of {', '.join(NORMALIZE)}, got {normalize!r}")
        super().__init__(model, corrections, samples, curves)
        self.projection = projection.requires_grad_(False)
        self.normalize = normalize
        self._projected: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the merged model."""
        output = self.model(*args, **kwargs)
        if self.normalize == "none":
            self._projected = project(pooled_output(output, self.model), self.projection)
        return output

    def correct(self, features: Tensor, task: str) -> Tensor:
        """Correct a task's features `[batch, d]`; those given are normalised if `normalize` is pre.

        Raises:
            CalibrationError: If there is no correction for the task.
        """
        return self.correction(task)(features)

    def features(self, task: str, *args: Any, **kwargs: Any) -> Tensor:
        """Corrected projected features of a task's images, `[batch, d]`, not normalised.

        Args:
            task: The task's name.
            *args: The model's inputs.
            **kwargs: The model's inputs.

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
        correction = self.correction(dataset_name)
        given = compute_features_fn
        features = given if isinstance(given, Tensor) else given(self)
        if self.normalize == "pre":
            corrected = correction(features)
        else:
            corrected = to_unit_norm(correction(self._remembered(features)))
        return corrected, features, features - corrected

    def description(self) -> dict[str, Any]:
        """Values beside the tensors that `from_pretrained` needs."""
        return {"normalize": self.normalize}

    @classmethod
    def from_pretrained(cls, folder: str | Path, **kwargs: Any) -> "CorrectedModel":
        """Load what `save_pretrained` saved.

        Args:
            folder: The folder.
            **kwargs: For `CLIPVisionModel.from_pretrained`.

        Raises:
            CalibrationError: If the folder holds no corrected model.
        """
        saved = load_corrections(folder, cls.stem)
        model, projection = _model_and_projection(folder, saved, kwargs)
        options = {key: saved.description[key] for key in ("normalize", "samples", "curves")}
        return cls(model, projection, saved.modules(cls.stem), **options)

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


class LayerSurgery(nn.Module):
    """One task's corrections: one behind each block, for all tokens, and one of final features.

    Attributes:
        blocks: In forward order.
        final: Of the final features.
    """

    def __init__(self, blocks: Iterable[SurgeryModule], final: SurgeryModule) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.final = final


class LayerCorrectedModel(Corrected):
    """Forwards like the merged model; when told the task, runs again with corrected blocks.

    FusionBench's classifier tells the task only after the model ran, and corrections behind blocks
    act while it runs. So evaluation by FusionBench costs two passes; `features` costs one.

    Attributes:
        projection: CLIP's visual projection.
    """

    stem = "layer_corrections"

    def __init__(
        self,
        model: nn.Module,
        projection: nn.Linear,
        corrections: Mapping[str, LayerSurgery],
        *,
        samples: Mapping[str, Mapping[str, Any]] | None = None,
        curves: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, corrections, samples, curves)
        self.projection = projection.requires_grad_(False)
        self._blocks = clip_blocks(model)
        self._last: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the merged model."""
        self._last = (args, kwargs)
        return self.model(*args, **kwargs)

    def features(self, task: str, *args: Any, **kwargs: Any) -> Tensor:
        """Corrected projected features of a task's images, `[batch, d]`, not normalised.

        Args:
            task: The task's name.
            *args: The model's inputs.
            **kwargs: The model's inputs.

        Raises:
            CalibrationError: If there are no corrections for the task.
        """
        surgery = self.correction(task)
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

    @classmethod
    def from_pretrained(cls, folder: str | Path, **kwargs: Any) -> "LayerCorrectedModel":
        """Load what `save_pretrained` saved.

        Args:
            folder: The folder.
            **kwargs: For `CLIPVisionModel.from_pretrained`.

        Raises:
            CalibrationError: If the folder holds no such model.
        """
        saved = load_corrections(folder, cls.stem)
        model, projection = _model_and_projection(folder, saved, kwargs)
        count = len(clip_blocks(model))
        corrections = {t: _layer_surgery(part, t, count) for t, part in saved.by_task.items()}
        options = {key: saved.description[key] for key in ("samples", "curves")}
        return cls(model, projection, corrections, **options)


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
    """Context in which every block's hidden output is corrected.

    Args:
        model: The model.
        blocks: Names of its blocks, in forward order.
        corrections: A module for each block (nn.Identity corrects nothing).

    Yields:
        A list to which each block that runs adds its corrected hidden output, averaged over
        tokens, `[batch, d]`.
    """
    means: list[Tensor] = []

    def hook(correction: nn.Module) -> Any:
        def correct(_: nn.Module, __: Any, output: Any) -> Any:
            hidden = hidden_output(output)
            corrected = correction(hidden)
            means.append(corrected.flatten(1, -2).mean(1) if corrected.ndim > 2 else corrected)
            if isinstance(output, Tensor):
                return corrected
            return (corrected, *output[1:])

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


def _model_and_projection(
    folder: str | Path, saved: SavedCorrections, kwargs: dict[str, Any]
) -> tuple[nn.Module, nn.Linear]:
    weight = saved.tensors["projection.weight"]
    projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    projection.weight = nn.Parameter(weight)
    return CLIPVisionModel.from_pretrained(folder, variant=VARIANT, **kwargs), projection


def _layer_surgery(tensors: Mapping[str, Tensor], task: str, count: int) -> LayerSurgery:
    def module(name: str) -> SurgeryModule:
        return SurgeryModule(tensors[f"{name}.down"], tensors[f"{name}.up"])

    try:
        return LayerSurgery([module(f"blocks.{index}") for index in range(count)], module("final"))
    except KeyError as error:
        stem = LayerCorrectedModel.stem
        raise CalibrationError(f"{stem}.safetensors lacks {error} for task {task!r}") from error
