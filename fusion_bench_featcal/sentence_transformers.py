"""Repair merged embedding models and rerankers of sentence-transformers.

The library itself reads the texts: prompts, pairs, lower-casing, lengths and query expansion are
those of `encode` and `predict`. Needs the extra `encoders`.
"""

import copy
import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.models.bases import read_local, without_base
from fusion_bench_featcal.modules.models import Modes
from fusion_bench_featcal.rules.plus import Plus
from fusion_bench_featcal.rules.rule import Rule
from fusion_bench_featcal.run.result import CalibrationResult
from fusion_bench_featcal.settings import FeatCalSettings

try:
    import sentence_transformers as st
    from sentence_transformers.base.modules import Router, Transformer

    KINDS = (st.SentenceTransformer, st.CrossEncoder, st.SparseEncoder, st.MultiVectorEncoder)
except (ImportError, AttributeError) as error:
    raise ImportError(
        "needs sentence-transformers 6.2 or newer: pip install 'fusion_bench_featcal[encoders]'"
    ) from error

Encoder = TypeVar("Encoder", bound=nn.Module)
Row = str | Sequence[str] | Mapping[str, Any]

TARGETS = ("label", "labels", "score", "scores", "dataset_name")
"""Columns that the library's trainers do not read as inputs."""
WEIGHTS = {".safetensors", ".bin", ".pt", ".h5", ".msgpack", ".ot", ".onnx", ".onnx_data", ".xml"}

logger = logging.getLogger(__name__)


def repair(
    merged: Encoder,
    *,
    experts: Mapping[str, Encoder | str | Path],
    texts: Mapping[str, Iterable[Row]],
    base: Encoder | str | Path | None = None,
    rule: Rule | FeatCalSettings = Plus(),  # noqa: B008 (frozen)
    **options: Any,
) -> Encoder:
    """Return a copy of a merged model whose transformer is calibrated towards the experts.

    Everything outside the transformer's blocks is the merged model's: prompts, pooling, activation,
    similarity function, maximal length, heads. A warning names heads in which experts differ.

    Args:
        merged: A `SentenceTransformer`, `CrossEncoder`, `SparseEncoder` or `MultiVectorEncoder`. It
            is not changed.
        experts: Task -> its expert: a model of the same class, its folder or its hub id.
        texts: Task -> its rows, all of which are used: texts, pairs, triplets, or rows of a data
            set, of which `label`, `labels`, `score` and `scores` are not read. A text goes through
            `encode`, the first text of a pair or triplet through `encode_query` and the others
            through `encode_document`, columns named `sentence...` through `encode`. A reranker
            reads the first text of a row together with each of the others.
        base: The model that the experts were fine-tuned from. None: FeatCal+ uses texts alone.
        rule: How a block is solved, as for `calibrate`.
        options: Further arguments of `calibrate`, such as `seed` or `progress`. The two texts of a
            pair are two of its samples.

    Raises:
        TypeError: If a model or a row has the wrong type.
        ValueError: If a model cannot be repaired, or experts and texts do not fit each other.
        CalibrationError: If the calibration cannot go on.
    """
    result = calibrate_encoder(merged, base, experts, texts, rule, **options)
    return cast(Encoder, result.model)


def calibrate_encoder(
    merged: Any,
    base: Any,
    experts: Mapping[str, Any],
    texts: Mapping[str, Iterable[Row]],
    rule: Rule | FeatCalSettings = Plus(),  # noqa: B008 (frozen)
    **options: Any,
) -> CalibrationResult:
    """Return the repaired model with the calibration's log. Arguments are those of `repair`."""
    if not isinstance(merged, KINDS):
        raise TypeError(f"merged is {merged!r}, not a model: {[kind.__name__ for kind in KINDS]}")
    transformer = transformer_of("merged", merged).model
    calls = read_texts(merged, experts, texts)
    tuned = {task: open_like(merged, f"experts[{task!r}]", one) for task, one in experts.items()}
    origin = None if base is None else open_like(merged, "base", base)
    if origin is None:
        places = [str(expert.transformers_model.name_or_path) for expert in tuned.values()]
        logger.warning(without_base(places, "base={!r}"))
    result = calibrate(
        transformer,
        None if origin is None else origin.transformers_model,
        {task: expert.transformers_model for task, expert in tuned.items()},
        {task: record_batches(merged, calls[task]) for task in tuned},
        rule,
        **options,
    )
    last_block = result.log.of_kind("block")[-1]["block"]
    if names := differing_behind(last_block, merged, [*tuned.values()]):
        logger.warning("experts differ in %s, which stay as merged", ", ".join(names))
    return replace(result, model=copy.deepcopy(merged, {id(transformer): result.model}))


def save(model: Any, folder: str | Path, merged: str | Path) -> None:
    """Save a model by `save_pretrained`, with all further files of the merged model's folder.

    Args:
        model: The model.
        folder: The folder to write.
        merged: The merged model's folder. Licences, notes, code and whatever else the library does
            not write is copied. Weights in other formats are not, as they are not repaired.
    """
    model.save_pretrained(str(folder))
    source, target = Path(merged), Path(folder)
    modules = read_local(str(source), "modules.json")
    skipped = {"onnx", "openvino", ".git", ".cache", *(module["path"] for module in modules)}
    for file in (file for file in source.rglob("*") if file.is_file()):
        name = file.relative_to(source)
        of_module = len(name.parts) > 1 and name.parts[0] in skipped
        if not (of_module or (target / name).exists() or WEIGHTS & {*file.suffixes}):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / name)


def transformer_of(label: str, model: Any) -> Transformer:
    """Return the module that holds a model's transformer, if it is the only one."""
    if any(isinstance(module, Router) for module in model.modules()):
        raise ValueError(f"{label} has a Router: only models with one route can be repaired")
    modules = [module for module in model.modules() if isinstance(module, Transformer)]
    if len(modules) != 1:
        kinds = [type(module).__name__ for module in model]
        raise ValueError(f"{label} has {len(modules)} transformers, not exactly one, in {kinds}")
    return modules[0]


def open_like(merged: Any, label: str, model: Any) -> Any:
    """Return a model, loaded if it is a folder or hub id, that has the merged model's modules."""
    kind = next(kind for kind in KINDS if isinstance(merged, kind))
    name, has_modules = type(model).__name__, True
    if not isinstance(model, nn.Module):
        model = kind(str(model), device=str(merged.device))
        place = getattr(model.transformers_model, "name_or_path", "")
        # The library converts other classes, with random weights in place of missing ones.
        name = read_local(place, "config_sentence_transformers.json").get(
            "model_type", kind.__name__
        )
        has_modules = bool(read_local(place, "modules.json"))  # else it is only a transformer
    if not isinstance(model, kind) or name not in (kind.__name__, type(model).__name__):
        raise TypeError(f"{label} is a {name}, but merged is a {kind.__name__}")
    transformer_of(label, model)
    modules, others = (
        [f"{type(m).__name__} {getattr(m, 'pooling_mode', '')}".strip() for m in one]
        for one in (model, merged)
    )
    if has_modules and modules != others:
        raise ValueError(
            f"{label} has the modules {modules}, but merged has {others}. If merged was a folder "
            "without modules.json, copy this file and the folders that it names from the expert"
        )
    vocabularies = [getattr(one.tokenizer, "get_vocab", dict)() for one in (model, merged)]
    if vocabularies[0] != vocabularies[1]:
        raise ValueError(f"{label} has another vocabulary than merged: its tokens are other words")
    return model


def differing_behind(last_block: str, merged: Any, experts: Sequence[Any]) -> list[str]:
    """Return names of the modules behind a transformer's last block in which experts differ."""
    modules, names = dict(merged.named_modules()), list(merged.state_dict())
    prefix = next(n for n, module in modules.items() if module is merged.transformers_model)
    last = max(n for n, name in enumerate(names) if name.startswith(f"{prefix}.{last_block}."))
    states, differing = [expert.state_dict() for expert in experts], dict[str, None]()
    for name in names[last + 1 :]:
        first, *others = [state[name].cpu() for state in states if name in state] or [None]
        if any(not torch.equal(first, other) for other in others):
            differing[name.rpartition(".")[0]] = None
    tables = {name for name, module in modules.items() if isinstance(module, nn.Embedding)}
    return [name for name in differing if name not in tables]  # tables of positions: for blocks


def read_texts(
    merged: Any, experts: Mapping[str, Any], texts: Mapping[str, Iterable[Row]]
) -> dict[str, dict[str, list[Any]]]:
    """Return task -> name of a method of the merged model -> the inputs that it reads."""
    if not experts or {*experts} != {*texts}:
        raise ValueError(
            f"experts are {list(experts)}, texts {list(texts)}: each expert needs texts"
        )
    calls = {task: dict[str, list[Any]]() for task in experts}
    for task, of_task in calls.items():
        for number, row in enumerate(rows_of(f"texts[{task!r}]", texts[task])):
            for method, value in calls_of(merged, f"texts[{task!r}][{number}]", row):
                of_task.setdefault(method, []).append(value)
        if not of_task:
            raise ValueError(f"texts[{task!r}] is empty: each expert needs texts")
    return calls


def rows_of(label: str, rows: Any) -> list[Any]:
    """Return rows as a list. A DataFrame and a dictionary of columns are divided into rows."""
    if hasattr(rows, "columns") and hasattr(rows, "to_dict"):
        rows = rows.to_dict("list")
    columns = rows.values() if isinstance(rows, Mapping) else ()
    if isinstance(rows, str) or any(isinstance(column, str) for column in columns):
        raise TypeError(f"{label} is a single row, but must be a list: [row]")
    if columns:
        return [dict(zip(rows, row, strict=True)) for row in zip(*columns, strict=True)]
    return list(rows)


def calls_of(model: Any, label: str, row: Row) -> list[tuple[str, Any]]:
    """Return the names of the methods that read a row, each with its input."""
    columns = columns_of(label, row)
    (name, first), *others = columns.items()
    if isinstance(model, st.CrossEncoder):
        if not others:
            raise TypeError(f"{label} is a single text, but a CrossEncoder reads pairs of texts")
        return [("predict", (first, text)) for _, text in others]
    if not others and name in ("query", "document", "passage", "corpus"):  # names of prompts
        return [("encode_query" if name == "query" else "encode_document", first)]
    has_roles = isinstance(model, st.MultiVectorEncoder)  # reads either queries or documents
    if not others and has_roles:
        return [("encode_query", first), ("encode_document", first)]
    symmetric = not has_roles and all(str(name).startswith("sentence") for name in columns)
    if not others or symmetric:
        return [("encode", text) for text in columns.values()]
    return [("encode_query", first), *(("encode_document", text) for _, text in others)]


def columns_of(label: str, row: Any) -> dict[Any, str]:
    """Return the texts of a row by name of the column, or by number."""
    if isinstance(row, Mapping):
        columns = {name: value for name, value in row.items() if name not in TARGETS}
    else:
        row = [row] if isinstance(row, str) or not isinstance(row, Iterable) else [*row]
        columns = dict(enumerate(row))
    if not columns:
        raise TypeError(f"{label} is {row!r}, without a text")
    for name, value in columns.items():
        if not isinstance(value, str):
            raise TypeError(f"{label}[{name!r}] is {value!r}, not a text: leave it out")
        if str(name) == "id" or str(name).endswith(("_id", "_ids", "_idx")):
            raise ValueError(f"{label}[{name!r}] is an ID: give its text, or leave the column out")
    return columns


def record_batches(model: Any, calls: Mapping[str, list[Any]]) -> list[dict[str, Tensor]]:
    """Return the batches that reach a model's transformer when its methods read inputs."""
    module, modes, batches = transformer_of("merged", model), Modes.of(model), list[Any]()
    unpadded, accepted = module.unpad_inputs, signature(module.model.forward).parameters

    def record(_: nn.Module, arguments: tuple[dict[str, Any]]) -> None:
        tensors = {name: value for name, value in arguments[0].items() if name in accepted}
        batches.append({name: t for name, t in tensors.items() if isinstance(t, Tensor)})

    handle = module.register_forward_pre_hook(record)
    try:
        module.unpad_inputs = False  # otherwise a whole batch may be one row
        for method, inputs in calls.items():
            getattr(model, method)(inputs, batch_size=16, show_progress_bar=False)
    finally:
        handle.remove()
        module.unpad_inputs = unpadded
        modes.restore(model)
    # Copies, because the library makes its batches in inference mode.
    return [{name: tensor.clone() for name, tensor in batch.items()} for batch in batches]
