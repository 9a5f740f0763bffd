"""Names of a model's tensors in a source: prefixes, ties, keys of older files."""

import difflib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.experts.joined import renamed
from fusion_bench_featcal.experts.model_config import complete_config
from fusion_bench_featcal.experts.source import ExpertSource
from fusion_bench_featcal.families import head_of, is_encoder_decoder

_ROWS = 1000  # of a head and an embedding, by which two matrices are told from one


def pair_names(
    label: str,
    source: ExpertSource,
    model: nn.Module,
    optional: Container[str] = (),
    *,
    advice: str = "Check its files",
    owner: str = "the merged model",
) -> dict[str, str]:
    """Return the source's name of each of a model's tensors, and check all shapes.

    All names of a tied tensor have one name in the source, so it is read once. Names are looked up
    once for each structure. Shapes are compared in every call.

    Args:
        label: Name of the source in messages.
        source: The weights.
        model: The structure that will run them.
        optional: Names of the model's tensors that are left out if they do not fit.
        advice: Last sentence of messages.
        owner: Owner of the structure, in messages.

    Raises:
        CalibrationError: If a tensor is missing or has another shape, or a head that is tied in the
            model has values of its own, naming it.
    """
    tensors, keys = model.state_dict(keep_vars=True), dict[str, str]()
    first_names, tied = dict[int, str](), dict[str, list[str]]()
    for name, tensor in tensors.items():
        tied.setdefault(first_names.setdefault(id(tensor), name), []).append(name)
    structure = type(model), *map(tuple, tied.values())
    if structure not in source.pairings:
        with error_context(label, remedy=advice):
            source.pairings[structure] = _find_keys(label, source, model, tied.values(), owner)
    for name, tensor in tensors.items():
        key = source.pairings[structure][name]
        with error_context(label, remedy=advice):
            shape = None if key is None else tuple(source.shape(key))
        if key is not None and shape == tensor.shape:
            keys[name] = key
        elif name not in optional and key is None:
            nearest = difflib.get_close_matches(name, source.names(), n=1, cutoff=0.0)
            raise CalibrationError(
                f"{label} has no tensor {name!r}; its nearest is {nearest}. {advice}"
            )
        elif name not in optional:
            raise CalibrationError(
                f"{label}: tensor {name!r} has shape {shape}, but {owner}'s has "
                f"{tuple(tensor.shape)}. {advice}"
            )
    return keys


def _find_keys(
    label: str, source: ExpertSource, model: nn.Module, tied: Iterable[list[str]], owner: str
) -> dict[str, str | None]:
    """Return the source's name of each of a model's tensors, which has several names if tied."""
    available, tensors = source.names(), model.state_dict(keep_vars=True)
    rename, heads = _renaming(available, set(tensors), model), tied_head(source, model)
    head = getattr(head_of(model), "weight", None) if _says_tied(source) is False else None
    keys = dict[str, str | None]()
    for name, aliases in ((n, group) for group in tied for n in group):
        found = [n for n in map(rename, aliases + heads.get(name, [])) if n in available]
        rows = [source.rows(n, 0, _ROWS) for n in found if tensors[name] is head]
        if any(not torch.equal(rows[0], other) for other in rows):
            raise CalibrationError(
                f"{label} has two matrices, {' and '.join(sorted(found))}, which are one matrix in "
                f"{owner}: all models must have the same tie_word_embeddings"
            )
        keys[name] = next(iter(found), None)
    return keys


def refuse_more_blocks(
    label: str, source: ExpertSource, keys: Mapping[str, str], stages: Iterable[Sequence[str]]
) -> None:
    """Refuse a source with blocks that the model lacks: only a part of it would run.

    Args:
        label: Name of the source in messages.
        source: The source.
        keys: The model's names -> the source's.
        stages: The model's blocks. The last ones of numbered lists count.

    Raises:
        CalibrationError: Naming the first such block.
    """
    names = source.names()
    for holder, _, number in (stage[-1].rpartition(".") for stage in stages):
        following = f"{holder}.{int(number) + 1}" if holder and number.isdigit() else ""
        if not following or any(name.startswith(f"{following}.") for name in keys):
            continue  # not a numbered list, or the model has the block, and it is not calibrated
        inside = (name for name in keys if name.startswith(f"{holder}.{number}."))
        for name in inside:
            key = keys[name].replace(f"{holder}.{number}.", f"{following}.")
            if key != keys[name] and key in names:
                raise CalibrationError(
                    f"{label} has the block {following}, which the merged model lacks: both must "
                    "have the same number of blocks"
                )


def _renaming(available: set[str], names: set[str], model: nn.Module) -> Callable[[str], str]:
    """Find how the source spells the model's names: unchanged, or with another prefix.

    The same weights are `vision_model.x` in files and, from transformers 5.6 on, `x` in memory. A
    text model's `model.x` is `model.language_model.x` beside towers for images. Other names that
    transformers changes on loading, such as DINOv2's, are as in files.
    """
    stored_names, added, removed = {name: name for name in available}, "", ""
    if not names <= available:
        prefix, covered = _prefix(available, names)
        if covered < len(names):
            new_names = renamed(available, model).items()  # of transformers, on loading
            stored_names |= {new: stored for stored, new in new_names if new != stored}
            prefix, _ = _prefix(set(stored_names), names)
        added, removed = prefix

    def name_in_files(name: str) -> str:
        spelled = _spelled(name, added, removed)
        return stored_names.get(spelled, spelled)

    return name_in_files


def _prefix(available: set[str], names: set[str]) -> tuple[tuple[str, str], int]:
    """Return the prefixes to add and to remove so that most names are available, and how many."""
    outer, inner = (sorted(_prefixes(available | names, length)) for length in (1, 2))
    choices = [("", "")] + [(p, "") for p in outer] + [("", p) for p in outer]
    choices += [pair for p in outer for tower in inner for pair in ((p, tower), (tower, p))]

    def covered(choice: tuple[str, str]) -> int:
        return sum(_spelled(name, *choice) in available for name in names)

    best = max(choices, key=covered)  # on a tie the first one: unchanged names
    return best, covered(best)


def _prefixes(names: set[str], length: int) -> set[str]:
    """Return the beginnings of names with so many parts."""
    parts = (name.split(".", length) for name in names)
    return {".".join(part[:length]) + "." for part in parts if len(part) > length}


def _spelled(name: str, added: str, removed: str) -> str:
    """Return a name with one prefix in place of another, unchanged if it has not that one."""
    return added + name.removeprefix(removed) if name.startswith(removed) else name


def embedding_of_head(model: Any) -> Any:
    """Return the embedding that a language model's head may be tied to: that of its decoder."""
    decoder = model.get_decoder() if is_encoder_decoder(model) else model
    return decoder.get_input_embeddings()


def tied_head(source: ExpertSource, model: Any) -> dict[str, list[str]]:
    """Return {head: [embedding]} if only a source's head is its embedding, not the model's.

    Args:
        source: An expert's weights.
        model: The model whose structure runs them.
    """
    head = head_of(model)
    if head is None or head.weight is embedding_of_head(model).weight:
        return {}
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    embedding, name = names[id(embedding_of_head(model))], names[id(head)]
    return {name: [embedding]} if name not in source.names() and _says_tied(source) else {}


def _says_tied(source: ExpertSource) -> bool | None:
    """Return the setting of a source's config, or None if it has none."""
    return (complete_config(source.config) or {}).get("tie_word_embeddings")
