"""`featcal check`: whether a merged model is what its config says.

Weights are replayed tensor by tensor. Only one tensor of each model is in memory at a time.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from fusion_bench_featcal.core.finite import all_finite
from fusion_bench_featcal.data.text_limits import end_tokens
from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.experts import ExpertSource
from fusion_bench_featcal.experts.conversion import converted
from fusion_bench_featcal.experts.pairing import pair_names
from fusion_bench_featcal.experts.source import SourceView
from fusion_bench_featcal.folders.merge_config import FILE
from fusion_bench_featcal.folders.mergekit import last_part, refuse_missing, with_merge_config
from fusion_bench_featcal.folders.model_folder import ModelFolder
from fusion_bench_featcal.folders.replay import ADAPTER, UNKNOWN, Recipe, Replay, read_recipe
from fusion_bench_featcal.models.adapters import AdapterExpert
from fusion_bench_featcal.models.processors import TOKENIZERS, read_processor
from fusion_bench_featcal.models.vocabulary import VOCABULARY

_NAMED = 5  # tensors in a sentence
_UNREAD = {"transformers_version", "_from_model_config"}  # keys of generation_config.json
_SCALES = {
    0.0: "are equal to the base: the {} was not applied",
    2.0: "have twice the change: the {} was applied twice",
}
_CONCLUSIONS = {ADAPTER: ADAPTER, UNKNOWN: "a merge of these models"}
_NOTE = "note: "


Tensors = Mapping[str, Tensor]
Names = Collection[str]


class _LoadedBase(SourceView):
    """A base, rounded to a dtype as when it is loaded, in float32 so that changes are exact."""

    def __init__(self, source: ExpertSource, dtype: torch.dtype) -> None:
        super().__init__(source)
        self._dtype = dtype

    def tensor(self, name: str) -> Tensor:
        """Return one tensor."""
        return super().tensor(name).to(self._dtype).float()


def check_merge(
    location: str, base: str | None = None, experts: Mapping[str, str] | None = None
) -> tuple[list[str], bool]:
    """Compare a merged model with the models that it was merged from.

    Args:
        location: Folder or hub id of the merged model.
        base: The base. None takes that of mergekit's config.
        experts: Name -> folder or hub id. None takes those of mergekit's config.

    Returns:
        Sentences on the differences, with the conclusion last, and whether nothing is wrong.

    Raises:
        CalibrationError: If a model is missing or damaged.
        ValueError: If no experts are named, or a folder is missing.
    """
    merged = ModelFolder("MERGED", location)
    recipe, models = _open_models(merged, location, base, experts or {})
    findings = dict[str | None, list[str]]()
    for name, finding in _examine_tensors(merged, recipe, models):
        findings.setdefault(finding, []).append(name)
    total, sentences = sum(map(len, findings.values())), list[str]()
    findings.pop(None, None)
    for finding, names in findings.items():
        text = f"{len(names)} of {total} tensors {finding}: {', '.join(names[:_NAMED])}"
        text += ", ..." * (len(names) > _NAMED)
        if len(names) == 1:
            text = text.replace(" are ", " is ").replace(" have ", " has ")
        sentences.append(text)
    sentences += _compare_texts(merged, recipe, models)
    is_right = all(sentence.startswith(_NOTE) for sentence in sentences)
    said, verb = _CONCLUSIONS.get(recipe.method, "what its config says"), "is"
    if recipe.obstacle:
        verb = "may be"
        sentences.append(
            f"{recipe.obstacle} cannot be replayed, so only names, shapes, tokenizers, chat "
            "templates, end tokens and generation configs were compared"
        )
    return [*sentences, f"the merge {verb if is_right else 'is not'} {said}"], is_right


def _open_models(
    merged: ModelFolder, location: str, base: str | None, experts: Mapping[str, str]
) -> tuple[Recipe, dict[str, ModelFolder]]:
    """Return how a model was merged, and its models by their locations in the recipe."""
    if (recipe := read_recipe(merged.folder)) is None:
        base, experts, _ = with_merge_config(location, base, experts, [])
        weights = {place: {"weight": 1.0} for place in experts.values()}
        recipe = Recipe(UNKNOWN, base, weights, [], {}, f"a merge without {FILE}")
    names = {place: last_part(place) for place in recipe.models}
    names |= {place: name for name, place in experts.items() if place in names}
    refuse_unknown(experts, names.values(), "--expert ")
    places = {place: experts.get(name, place) for place, name in names.items()}
    options = {place: f"--expert {name}" for place, name in names.items()}
    if recipe.base is not None:
        places[recipe.base] = base or places.get(recipe.base, recipe.base)
        options[recipe.base] = "--base"
    refuse_missing(f"{location}/{FILE}", places.values())
    models = {place: ModelFolder(options[place], where) for place, where in places.items()}
    are_adapters = [models[place].is_adapter for place in recipe.models]
    if recipe.method == UNKNOWN and recipe.base is not None and are_adapters == [True]:
        recipe = recipe._replace(method=ADAPTER, obstacle=None)
    return recipe, models


def _examine_tensors(
    merged: ModelFolder, recipe: Recipe, models: Mapping[str, ModelFolder]
) -> Iterator[tuple[str, str | None]]:
    """Yield each tensor of the merged model, and what is wrong with it, or None."""
    structure: Any = merged.whole
    tensors, base = structure.state_dict(), models.get(recipe.base or "")

    def read(model: ModelFolder) -> ExpertSource:
        if model.is_adapter and base is not None:
            loaded = _LoadedBase(base.weights_of_whole, structure.dtype)
            return AdapterExpert(loaded, base.whole, model.folder)
        return model.source(base) if model.weights is None else converted(model.weights, structure)

    sources = {place: read(model) for place, model in {merged.label: merged, **models}.items()}
    keys = {p: pair_names(p, source, structure, tensors) for p, source in sources.items()}
    own, own_keys = sources.pop(merged.label), keys.pop(merged.label)
    known = {*tensors}.union(*(source.names() for source in sources.values()))
    yield from ((name, "are in none of the models") for name in sorted(own.names() - known))
    lacking = {n: [models[p].name for p, has in keys.items() if n not in has] for n in tensors}
    for name in tensors.keys() - own_keys.keys():
        if len(lacking[name]) < len(models):
            yield name, "are missing, or have a different shape than config.json says"
    for key, name in sorted({key: name for name, key in own_keys.items()}.items()):
        if name.endswith(VOCABULARY) and recipe.allows_change("vocabulary"):
            yield name, None
        elif lacking[name]:
            lacking_models = ", ".join(lacking[name])
            yield name, f"are missing in {lacking_models}, or have a different shape there"
        else:
            found = {place: s.tensor(keys[place][name]) for place, s in sources.items()}
            adapted = {place for place in found if models[place].is_adapter}
            yield name, _examine(name, own.tensor(key), found, adapted, recipe, own_keys)


def _examine(
    name: str, merged: Tensor, tensors: Tensors, adapted: set[str], recipe: Recipe, names: Names
) -> str | None:
    """Return what is wrong with a merged tensor, or None.

    Args:
        name: The tensor.
        merged: Its values in the merged model.
        tensors: Model -> its values.
        adapted: The models that are adapters, whose values are in float32.
        recipe: How the model was merged.
        names: All tensors of the merged model.
    """
    if not all_finite(merged):
        return "have NaN or infinite values"
    if recipe.obstacle or not merged.is_floating_point():  # mergekit copies integers
        are_equal = (torch.equal(merged, tensor) for tensor in tensors.values())
        return None if recipe.obstacle or any(are_equal) else "are in none of the models"
    whole = [tensor.dtype for place, tensor in tensors.items() if place not in adapted]
    is_free = recipe.method == ADAPTER or not whole  # PEFT keeps the dtype that the base has
    dtype, stored = recipe.dtypes([merged.dtype] if is_free else whole)
    if merged.dtype != stored:
        return f"are stored in {merged.dtype}, not {stored}".replace("torch.", "")
    start, coefficients = recipe.coefficients(name, names, tensors)
    rounded = {p: tensor if p in adapted else tensor.to(dtype) for p, tensor in tensors.items()}
    is_rounded = bool(adapted) and not (recipe.method == ADAPTER and whole == [dtype])
    noise = is_rounded * torch.finfo(dtype).eps * sum(map(abs, coefficients.values()))
    base = torch.zeros_like(merged) if start is None else rounded[start]
    terms = [(coefficient, rounded[place]) for place, coefficient in coefficients.items()]
    if (replay := Replay(merged, base, terms, dtype, noise)).fits():
        return None
    scale = math.nan if start is None else replay.fitted_scale()
    if not (math.isfinite(scale) and replay.fits(scale)):
        return f"are not {recipe.method}"
    changes = "adapter" if recipe.method == ADAPTER else "sum of experts"
    other = f"have {scale:.3g} times the change of {recipe.method}"
    return _SCALES.get(round(scale, 2), other).format(changes)


def _compare_texts(
    merged: ModelFolder, recipe: Recipe, models: Mapping[str, ModelFolder]
) -> Iterator[str]:
    """Yield a sentence on each part of tokenizer and configs that differs from a model's.

    It is a note if another model has the same part, because mergekit copies those of one model, or
    if the config names the part. Parts of an adapter replace those of its base.
    """
    own, base = _texts(merged), _texts(models[recipe.base]) if recipe.base else {}
    others = {models[p].name: _texts(models[p]) for p in recipe.models}
    for place in recipe.models:
        if models[place].is_adapter:
            others[models[place].name] = base | others[models[place].name]
    for part in dict.fromkeys(part for parts in others.values() for part in parts):
        values = {name: parts[part] for name, parts in others.items() if part in parts}
        differing = {name: value for name, value in values.items() if value != own.get(part)}
        if not differing:
            continue
        name, value = next(iter(differing.items()))
        verb = "differs from that of" if part in own else "is missing, unlike in"
        text = f"{part} {verb} {', '.join(differing)}"
        if part.startswith("end token"):
            text = f"{part} became {own.get(part, 'none')} ({name}: {value})"
        elif part == "vocabulary" and part in own:
            tokens = sorted({token for token, _ in own[part].items() ^ value.items()})
            text += f" in {len(tokens)} tokens, such as {tokens[0]!r}"
        is_expected = part in own or (recipe.method == ADAPTER and "vocabulary" in own)
        is_wrong = len(differing) == len(values) and is_expected and not recipe.allows_change(part)
        yield text if is_wrong else _NOTE + text


def _texts(model: ModelFolder) -> dict[str, Any]:
    """Return what decides how a model reads texts and ends answers, without absent parts."""
    has_tokenizer = any((model.folder / file).is_file() for file in TOKENIZERS)
    tokenizer = read_processor(model.folder, AutoTokenizer, model.label) if has_tokenizer else None
    generation = (model.generation_config or {}).items()
    parts = {
        "vocabulary": tokenizer and tokenizer.get_vocab(),
        "chat template": tokenizer and tokenizer.chat_template,
        "end token": tokenizer and tokenizer.eos_token,
        "end tokens of configs": sorted(end_tokens(model)),
        "generation config": {k: v for k, v in generation if v is not None and k not in _UNREAD},
    }
    return {part: value for part, value in parts.items() if value}
