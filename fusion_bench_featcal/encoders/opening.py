"""Opening models of sentence-transformers: with their class, from weights alone, or merged."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fusion_bench_featcal.encoders.library import KINDS, Encoder
from fusion_bench_featcal.encoders.models import last_block_of, transformer_of
from fusion_bench_featcal.encoders.naming import class_of
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.experts.source import InMemoryExpert
from fusion_bench_featcal.models.adapters import AdapterExpert
from fusion_bench_featcal.models.hub import fetch
from fusion_bench_featcal.models.model_files import ModelFiles
from fusion_bench_featcal.models.processors import load_tokenizers
from fusion_bench_featcal.modules.models import tensors_outside_blocks


def open_model(class_name: str, folder: Path, label: str, device: str = "cpu") -> Any:
    """Open a folder with a class of the library, without running code beside the model.

    Raises:
        CalibrationError: If there is no such class, or the folder cannot be opened.
        ValueError: If the model has not exactly one transformer.
    """
    kinds = {kind.__name__: kind for kind in KINDS}
    if class_name not in kinds:
        raise CalibrationError(f"{label} is a {class_name}, not one of {', '.join(kinds)}")
    try:
        model = kinds[class_name](str(folder), device=device, local_files_only=True).eval()
    except Exception as error:  # any error of the library about the folder's files
        raise CalibrationError(f"{label} cannot be opened: {first_line(error)}") from error
    transformer_of(label, model)
    return model


def open_like(reference: Encoder, label: str, model: object) -> Encoder:
    """Return a model that has the modules of a reference. A folder or hub id is opened.

    Args:
        reference: The model that it must fit. A folder with a transformer alone, as mergekit and
            transformers write it, gets its other modules from the reference.
        label: Name of the model in messages.
        model: The model, its folder or its hub id.

    Raises:
        TypeError: If it has another class.
        ValueError: If it has other modules, another pooling or another vocabulary.
        CalibrationError: If it cannot be opened.
    """
    kind = next(kind for kind in KINDS if isinstance(reference, kind))
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        folder = fetch(str(model), label)
        if not (name := class_of(folder)):
            return with_weights(reference, ModelFiles(folder, label))
        if name == kind.__name__:  # the library converts others, with random weights
            model = open_model(name, folder, label, str(reference.device))
    if not isinstance(model, kind):
        raise TypeError(f"{label} is a {name}, but merged is a {kind.__name__}")
    transformer_of(label, model)
    modules, others = (
        [f"{type(m).__name__} {getattr(m, 'pooling_mode', '')}".strip() for m in one]
        for one in (model, reference)
    )
    if modules != others:
        raise ValueError(
            f"{label} has the modules {modules}, but merged has {others}. If merged was a folder "
            "without modules.json, copy this file and the folders that it names from the expert"
        )
    ids, merged = (getattr(one.tokenizer, "get_vocab", dict)() for one in (model, reference))
    if differing := sorted(ids.items() ^ merged.items()):
        token = differing[0][0]
        raise ValueError(
            f"{label} has a different vocabulary than merged: {token!r} is token {ids.get(token)}, "
            f"but in merged {merged.get(token)}. Merged models must share the tokenizer of one base"
        )
    return model


def with_weights(reference: Encoder, files: ModelFiles) -> Encoder:
    """Return a copy of a model whose transformer has the weights of a folder.

    If the folder lacks weights after the blocks, such as a pooler, they are those of the
    reference.

    Raises:
        CalibrationError: If the folder lacks other weights, or its tokens have other ids.
    """
    transformer = transformer_of(files.label, reference).model
    load_tokenizers(reference.tokenizer, "merged", {files.label: files.folder})  # raises
    state = transformer.state_dict()
    tail = tensors_outside_blocks(transformer, [[last_block_of(transformer)]])
    spare = {name: state[name] for name in tail}
    return _replaced(reference, files.load(type(transformer), spare))


def with_adapter(base: Encoder, label: str, folder: Path) -> Encoder:
    """Return a copy of a base whose transformer has an adapter merged into its weights.

    Raises:
        CalibrationError: If the adapter is damaged or does not fit.
    """
    transformer = copy.deepcopy(transformer_of(label, base).model)
    adapter = AdapterExpert(InMemoryExpert(transformer), transformer, folder)
    transformer.load_state_dict({name: adapter.tensor(name) for name in adapter.names()})
    return _replaced(base, transformer)


def merged_by_library(
    models: Sequence[Encoder], scale: float | None, base: Encoder | None = None
) -> Encoder:
    """Return the average of models, or their task arithmetic, merged by the library.

    Args:
        models: At least two models of one class, whose dtype the merged one has.
        scale: Scale of the sum of task vectors, or None for the average.
        base: The base of task vectors.
    """
    method: dict[str, Any] = {"method": "linear", "parameters": {"weight": 1.0}}
    if scale is not None:
        parameters = {"weight": scale}
        method = {"method": "task_arithmetic", "base_model": base, "parameters": parameters}
    first = models[0]
    options = {"out_dtype": first.dtype, "device": first.device}
    return type(first).merge([*models], **method, **options)


def _replaced(model: Encoder, transformer: nn.Module) -> Encoder:
    """Return a copy of a model with another transformer."""
    former = transformer_of("the model", model).model
    return copy.deepcopy(model, {id(former): transformer.to(model.device).eval()})
