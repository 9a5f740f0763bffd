"""Configs of models, compared: models that share tensors but are different functions."""

import json
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts.empty import sample_of, without_weights

_TOKENS = 8  # of the text with which two models are compared
# Shapes of tensors are compared elsewhere. Numbers of tokens and further outputs may differ.
_UNRELATED = {
    "d_ff", "d_model", "hidden_size", "intermediate_size", "n_embd", "n_inner", "projection_dim",
    "vocab_size",
}  # fmt: skip
_UNRELATED_STARTS = ("_", "output_")
_UNRELATED_WITHIN = ("drop", "init")  # of training, also where a model cannot be traced


def check_same_function(
    label: str,
    config: object,
    reference: object,
    *,
    other: str = "the merged model",
) -> None:
    """Refuse a model whose config defines another function than the model that runs its weights.

    Keys may differ that change no operation of the model, such as names, dropout rates or a limit
    of positions that no operation reads. So may dtypes, vocabulary sizes, and token ids other than
    those that stand for images or sounds. A key missing in one config has its class's default.

    Args:
        label: Name of the model in messages.
        config: Its transformers config or the content of config.json. None skips the comparison.
        reference: The config of the model that runs its weights, or None. If only one of the two
            contains the other's kind as a part (CLIP's vision tower), the parts are compared.
        other: Name in messages of the model that runs its weights.

    Raises:
        CalibrationError: If they differ, naming keys and values.
    """
    ours, theirs = complete_config(config), complete_config(reference)
    if ours is None or theirs is None:
        return
    parts = _part(ours, theirs.get("model_type")), _part(theirs, ours.get("model_type"))
    differing = dict(_differences(*parts))
    if "model_type" in differing:
        kind, expected = differing["model_type"]
        raise CalibrationError(
            f"{label} is a {kind!r} model, {other} a {expected!r} one: experts must share "
            "its architecture. Check its folder"
        )
    if differing and not _is_same_function(*parts):
        pairs = [f"{key}={value!r} (there {ref!r})" for key, (value, ref) in differing.items()]
        raise CalibrationError(
            f"{label} is another function than {other}, in whose modules its weights run: "
            f"its config has {', '.join(pairs)}. Check its folder. To calibrate all "
            "the same, write the other values into its config.json"
        )


def complete_config(config: Any) -> dict[str, Any] | None:
    """Return a config as a dictionary, with its class's defaults for missing keys.

    Args:
        config: A transformers config, the content of config.json, or None.
    """
    if callable(getattr(config, "to_dict", None)):
        return config.to_dict()
    if not isinstance(config, Mapping):
        return None
    return _with_defaults(json.dumps(dict(config)))


def text_config(config: object) -> Mapping[str, Any]:
    """Return the complete config of a model's text part, such as that beside a vision tower."""
    complete = complete_config(config) or {}
    return complete.get("text_config") or complete


@lru_cache
def _with_defaults(text: str) -> dict[str, object]:
    """Return the content of a config.json with its class's defaults for missing keys."""
    from transformers import CONFIG_MAPPING

    values = json.loads(text)
    try:
        return CONFIG_MAPPING[values["model_type"]].from_dict(values).to_dict()
    except Exception:  # an unknown class, or values that it refuses: see the model's loader
        return values


def _differences(
    config: Mapping[str, object], reference: Mapping[str, object], prefix: str = ""
) -> Iterator[tuple[str, tuple[object, object]]]:
    """Yield keys that make two configs different functions, joined with dots, and both values."""
    for key in filter(_counts, sorted(config.keys() & reference.keys())):
        values = config[key], reference[key]
        value, other = (list(v) if isinstance(v, tuple) else v for v in values)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from _differences(value, other, f"{prefix}{key}.")
        elif value != other:
            yield f"{prefix}{key}", (value, other)


def _is_same_function(config: Mapping[str, object], reference: Mapping[str, object]) -> bool:
    """Return whether two models run the same operations. False if one of them cannot be run.

    Each part with a model type of its own (a vision tower, a decoder) is compared by itself. What
    joins the parts, such as `vision_feature_layer` and `image_token_index`, must be equal.
    """
    pairs: Any = {key: (config[key], reference[key]) for key in config.keys() & reference.keys()}
    parts = {k for k, two in pairs.items() if all(isinstance(v, Mapping) and _kind(v) for v in two)}
    if parts:
        known = _with_defaults(json.dumps({"model_type": _kind(reference)})).keys() - parts
        joining = [{key: c[key] for key in known & pairs.keys()} for c in (config, reference)]
        if dict(_differences(joining[0], joining[1])):
            return False
        return all(_is_same_function(*pairs[key]) for key in parts)
    changed = {**reference} | {key: value for key, (value, _) in pairs.items() if _counts(key)}
    texts = [json.dumps(values, sort_keys=True, default=str) for values in (changed, reference)]
    try:
        return texts[0] == texts[1] or _operations(texts[0]) == _operations(texts[1])
    except Exception:  # a model may refuse its config's values, or read those of its input
        return False


@lru_cache
@torch.no_grad()
def _operations(text: str) -> tuple[list[object], dict[str, bytes]]:
    """Return the operations of a model on a sample with all their numbers, and its buffers.

    Args:
        text: The content of its config.json.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    values = json.loads(text)
    config = transformers.CONFIG_MAPPING[_kind(values)].from_dict(values)
    config._attn_implementation = "eager"  # others hide their operations
    config._experts_implementation = "batched_mm"  # others depend on values
    name = next(iter(values.get("architectures") or ()), MODEL_MAPPING_NAMES[_kind(values)])
    model: Any = without_weights(getattr(transformers, name), config, torch.float32)
    buffers = {name: bytes(buffer.numpy().data) for name, buffer in model.named_buffers()}
    for module in model.modules():
        module.warn_if_padding_and_no_attention_mask = lambda *_: None  # it reads the text
    # Not on the meta device, for which models of transformers 4 have no autocast.
    with FakeTensorMode(allow_non_fake_inputs=True):
        sample = sample_of(model.to_empty(device="cpu"), _TOKENS)
        model(**sample)  # the first run may keep tensors
        with _Recorder() as recorder:
            model(**sample)
    return recorder.operations, buffers


class _Recorder(TorchDispatchMode):
    """Context that records operations, their numbers and the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The third argument of an embedding, its padding, has an effect on gradients alone.
        read = args[:2] if func.name().startswith("aten::embedding") else args
        leaves = tree_leaves((read, kwargs))
        shown = [tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.operations.append((func.name(), shown))
        return func(*args, **(kwargs or {}))


def _kind(values: Mapping[str, Any]) -> str:
    return values.get("model_type", "")


def _part(config: Mapping[str, object], model_type: object) -> Mapping[str, object]:
    """Return the part of a config with a model type (CLIP's vision tower), else all of it."""
    if config.get("model_type") == model_type:
        return config
    nested = (part for part in config.values() if isinstance(part, Mapping))
    return next((part for part in nested if part.get("model_type") == model_type), config)


def _counts(key: str) -> bool:
    """Return whether a key may change the model's function."""
    if key in _UNRELATED or (key != "model_type" and key in _common()):
        return False
    is_of_training = any(part in key for part in _UNRELATED_WITHIN)
    return not is_of_training and not key.startswith(_UNRELATED_STARTS)


@cache
def _common() -> frozenset[str]:
    """Return keys that every config has, or that concern generation."""
    from transformers import GenerationConfig, PretrainedConfig

    return frozenset(PretrainedConfig().to_dict()) | frozenset(GenerationConfig().to_dict())
