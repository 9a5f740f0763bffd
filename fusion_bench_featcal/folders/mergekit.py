"""The `mergekit_config.yml` that mergekit leaves beside a merged model: its base and experts."""

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion_bench_featcal.untrusted import read_yaml

FILE = "mergekit_config.yml"
_WITHOUT_BASE = ("slerp", "nearswap", "arcee_fusion")
"""Methods whose `base_model` is one of the merged models, not the one these were tuned from."""
_TYPES = {"models": list, "sources": list, "slices": list, "modules": dict}
_MOST_PATH = 1000  # characters


class UnreadableRecipe(ValueError):
    """A config that tells no models. They may be named by options."""


@dataclass(frozen=True)
class Recipe:
    """Models that a merge was made from.

    Attributes:
        method: mergekit's name of the merge method.
        base: Folder or hub id of the base; None where the config names none.
        experts: Name (the last part of the location, with as many folders above it as tell it from
            the others, joined by `-`) -> folder or hub id.
    """

    method: str
    base: str | None
    experts: Mapping[str, str]


def read_recipe(merged: Path) -> Recipe | None:
    """Read the recipe of a merged model.

    Args:
        merged: The merged model's folder.

    Returns:
        The recipe; None if the folder has no mergekit config.

    Raises:
        UnreadableRecipe: If the config is damaged or names no models, or models cannot be told
            apart.
        ValueError: If their layers were stacked (`passthrough`).
    """
    file = merged / FILE
    try:
        content = read_yaml(file)
        _check_types(content)
    except FileNotFoundError:
        return None
    except ValueError as error:
        place = "" if str(file) in str(error) else f"{file}: "
        raise UnreadableRecipe(
            f"{place}{error}. Name the models by --base and --expert NAME=DIR"
        ) from error
    method = str(content.get("merge_method"))
    if method == "passthrough":
        raise ValueError(
            f"{merged} was merged by mergekit's passthrough, which stacks layers: it has other "
            "blocks than its experts, so it cannot be calibrated"
        )
    named = content.get("base_model")
    base = None if named is None else _located(named, merged)
    locations = [_located(model, merged) for model in _models(content)]
    if base is not None and method in _WITHOUT_BASE:
        locations, base = [*locations, base], None
    models = {_resolved(location): location for location in locations}
    if base is not None:
        models.pop(_resolved(base), None)
    if not models:
        raise UnreadableRecipe(f"{file} names no models. Name them by --expert NAME=DIR")
    places = {_parts(location): location for location in models.values()}
    experts = {_name_of(parts, places): location for parts, location in places.items()}
    if len(experts) < len(models):
        raise UnreadableRecipe(
            f"{file}: the names of {', '.join(models.values())} do not differ. Name them by "
            "--expert NAME=DIR"
        )
    return Recipe(method, base, experts)


def _check_types(content: Any, label: str = "it") -> None:
    """Refuse values of types that mergekit does not take.

    Raises:
        ValueError: Naming key and value.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{label} is {content!r:.60}, not a mapping")
    for key, kind in _TYPES.items():
        if not isinstance(content.get(key), kind | None):
            name = "list" if kind is list else "mapping"
            raise ValueError(f"{key} is {content[key]!r:.60}, not a {name}")
    for part in [*(content.get("slices") or ()), *(content.get("modules") or {}).values()]:
        _check_types(part, "a slice or module")
    entries = [*(content.get("models") or ()), *(content.get("sources") or ())]
    models = [entry.get("model") if isinstance(entry, Mapping) else entry for entry in entries]
    for model in [*models, *filter(None, [content.get("base_model")])]:
        location = _path_of(model)
        if not isinstance(location, str) or not 0 < len(location) <= _MOST_PATH:
            raise ValueError(f"a model is {model!r:.60}, not a folder or hub id")


def _models(content: Any) -> Iterator[Any]:
    """Yield every model that a config names, in `models`, `slices` and `modules`."""
    if not isinstance(content, Mapping):
        return
    for entry in [*(content.get("models") or ()), *(content.get("sources") or ())]:
        yield entry.get("model") if isinstance(entry, Mapping) else entry
    for part in [*(content.get("slices") or ()), *dict(content.get("modules") or {}).values()]:
        yield from _models(part)


def _located(model: Any, merged: Path) -> str:
    """Return a model's folder or hub id; relative folders may start beside the merged model."""
    text = str(_path_of(model))
    beside = merged.parent / text
    return str(beside) if not Path(text).exists() and beside.exists() else text


def _path_of(model: Any) -> Any:
    if isinstance(model, Mapping):  # mergekit's long form
        model = model.get("model")
    return model.get("path") if isinstance(model, Mapping) else model


def _resolved(location: str) -> Path:
    """Return the folder behind all links, or a hub id; two spellings of one give the same."""
    folder = Path(location).expanduser()
    return folder.resolve() if folder.exists() else folder


def _parts(location: str) -> tuple[str, ...]:
    """Split a hub id, or the full path of a folder as it was named."""
    folder = Path(location).expanduser()
    return (Path(os.path.abspath(folder)) if folder.exists() else folder).parts


def _name_of(model: tuple[str, ...], models: Collection[tuple[str, ...]]) -> str:
    """Return the shortest tail of a model's location that no other has, as a file name."""
    tails = (model[-length:] for length in range(1, len(model) + 1))
    free = (tail for tail in tails if sum(other[-len(tail) :] == tail for other in models) == 1)
    return "-".join(part for part in next(free, model) if part.strip("/."))
