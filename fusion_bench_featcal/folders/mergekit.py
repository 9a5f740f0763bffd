"""The `mergekit_config.yml` that mergekit leaves beside a merged model: its base and experts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FILE = "mergekit_config.yml"


@dataclass(frozen=True)
class Recipe:
    """Models that a merge was made from.

    Attributes:
        method: mergekit's name of the merge method.
        base: Folder or hub id of the base; None where the config names none.
        experts: Name (the last part of the location) -> folder or hub id.
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
        ValueError: If the config is damaged or names no models.
    """
    file = merged / FILE
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{file} is no mapping; name the models by --base and --expert")
    locations = dict.fromkeys(_located(m, merged) for m in _models(content))
    named = content.get("base_model")
    base = None if named is None else _located(named, merged)
    experts = {_name_of(location): location for location in locations if location != base}
    if not experts:
        raise ValueError(f"{file} names no models; name them by --expert NAME=DIR")
    return Recipe(str(content.get("merge_method")), base, experts)


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
    if isinstance(model, Mapping):  # mergekit's long form
        inner = model.get("model")
        model = inner.get("path") if isinstance(inner, Mapping) else inner
    text = str(model)
    beside = merged.parent / text
    return str(beside) if not Path(text).exists() and beside.exists() else text


def _name_of(location: str) -> str:
    return location.rstrip("/").rsplit("/", 1)[-1]
