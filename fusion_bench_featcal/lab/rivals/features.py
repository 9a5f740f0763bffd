"""Final features of models: inputs of a head, states after the last norm, CLIP's projections."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import CLIPModel

from fusion_bench_featcal.data.embeddings import Pooling
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts import source_of
from fusion_bench_featcal.families import Family, head_of
from fusion_bench_featcal.families.base import ForwardStopped, call_model, stoppable
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, PoolModels
from fusion_bench_featcal.models.hub import fetch
from fusion_bench_featcal.streams.batch import CountedPositions, Positions
from fusion_bench_featcal.streams.samples import resolved_decoder_rows

_PROJECTION = "visual_projection.weight"

FINAL_NORMS = ("decoder.final_layer_norm", "model.norm")
"""The last norm of T5 and of decoder-only language models."""


def final_features(model: nn.Module, inputs: object, pooling: Pooling | None = None) -> Tensor:
    """Return the features that a model's head receives.

    Args:
        model: The model.
        inputs: A batch of its inputs.
        pooling: How an encoder's embeddings are made, if these are its features.

    Returns:
        The embedding, `[batch, d]`, or else the input of a language model's output embeddings,
        `[batch, positions, d]`, or else the pooled output, `[batch, d]`, or else the first tensor
        of the output.
    """
    if pooling is not None:
        return pooling.features(model, inputs)
    if (head := head_of(model)) is not None:
        return _capture(model, head.register_forward_pre_hook, inputs)
    output = call_model(model, inputs)
    pooled = getattr(output, "pooler_output", None)
    output = output if pooled is None else pooled
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output


def final_states(model: nn.Module, final_norm: str, inputs: object) -> Tensor:
    """Return the output of a language model's last norm, `[batch, positions, d]`."""
    return _capture(model, model.get_submodule(final_norm).register_forward_hook, inputs)


def _capture(model: nn.Module, register: Callable[..., object], inputs: object) -> Tensor:
    """Run a model up to a hook. Return the last argument of the hook, or its first entry."""
    captured: list[Any] = []

    def stop(*args: object) -> None:
        captured.append(args[-1])
        raise ForwardStopped

    with stoppable(register(stop)):
        call_model(model, inputs)
    return captured[0] if isinstance(captured[0], Tensor) else captured[0][0]


def final_rows(model: nn.Module, family: Family, inputs: object) -> Positions | None:
    """Return the positions of the final features that predict a target, or None for all.

    Without labels these are all positions except padding.
    """
    rows = resolved_decoder_rows("auto", inputs)
    masks = family.masks(model, inputs, len(family.stages(model)) - 1, rows)
    return CountedPositions.from_masks(masks).valid


def find_final_norm(models: PoolModels, final_norm: str | None) -> str:
    """Return the name of a pool's last norm: the setting, or searched for if that is None.

    Raises:
        CalibrationError: If the base's weights have none of that name.
    """
    model = models.base or next(iter(models.experts.values()))
    modules = {weight.rpartition(".")[0] for weight in source_of(model.source()).names()}
    names = FINAL_NORMS if final_norm is None else (final_norm,)
    if not modules.intersection(names):
        raise CalibrationError(
            f"model {model.name!r} has no {' or '.join(names)}, but surgery methods correct a "
            "language model after its last norm. Set method.final_norm to that module's name"
        )
    return next(name for name in names if name in modules)


def project(output: object, projection: nn.Linear) -> Tensor:
    """Return projected features `[batch, d]` of a CLIP vision tower's output.

    Raises:
        CalibrationError: If there is no pooled output of the width that the projection takes.
    """
    pooled = getattr(output, "pooler_output", None)
    if pooled is None or pooled.shape[-1] != projection.in_features:
        raise CalibrationError(
            f"the visual projection takes pooled outputs of width {projection.in_features}, but "
            "the model returns others: check modelpool.models and method.clip_model"
        )
    return projection(pooled.to(projection.weight.dtype))


def load_projection(models: PoolModels, clip_model: str | None) -> nn.Linear:
    """Load the visual projection of a CLIP checkpoint, by default the base, frozen, in float32.

    Raises:
        CalibrationError: If there is none.
    """
    location = check_projection(models, clip_model)
    folder = fetch(location, f"method.clip_model={location}")
    try:
        loaded: Any = CLIPModel.from_pretrained(folder, output_loading_info=True)
    except (OSError, ValueError) as error:
        raise _no_projection(location, f": {error}") from error
    model, info = loaded
    if _PROJECTION in info["missing_keys"]:
        raise _no_projection(location)
    return model.visual_projection.float().requires_grad_(False)


def check_projection(models: PoolModels, clip_model: str | None) -> str:
    """Return the checkpoint for `load_projection`, before any model is loaded.

    Raises:
        CalibrationError: If the base is no checkpoint, or its files have no projection.
    """
    if clip_model is not None:
        return clip_model
    if models.base is None or models.base.location is None:
        raise _no_projection(f"the pool's base model (modelpool.models.{BASE_MODEL})")
    files = models.base.files
    if files is not None and _PROJECTION not in files.names():
        raise _no_projection(models.base.location)
    return models.base.location


def _no_projection(where: str, reason: str = "") -> CalibrationError:
    return CalibrationError(
        f"{where} has no {_PROJECTION}, so there are no projected features to correct{reason}. Set "
        "method.clip_model to a CLIP checkpoint that has it"
    )
