"""Base and experts from the `mergekit_config.yml` that mergekit writes next to a merged model."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files.untrusted import read_yaml

FILE = "mergekit_config.yml"
_BASE_IS_MERGED = ("slerp", "nearswap", "arcee_fusion")
"""Methods whose `base_model` is one of the merged models, not their common origin."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")
_LEVELS = 3  # folders above the merged model that relative paths may start at
_ADVICE = "Name the models by --base and --expert NAME=DIR"


def with_merge_config(
    merged: str, base: str | None, experts: Mapping[str, str], notes: list[str]
) -> tuple[str | None, Mapping[str, str]]:
    """Complete base and experts from the merged model's mergekit config.

    Models that options name have priority. The config is not read if they name all.

    Args:
        merged: Folder or hub id of the merged model.
        base: The base from the options.
        experts: The experts from the options.
        notes: Receives sentences on the values from the config.

    Returns:
        Base and experts.

    Raises:
        ValueError: If no experts are named, or the config's models are not usable.
    """
    folder = Path(merged).expanduser()
    if (base and experts) or (experts and not (folder / FILE).exists()):
        return base, experts
    if not folder.is_dir():
        raise ValueError(
            f"MERGED {merged}: there is no such folder here. Correct it, or for a model on the hub "
            "name --base ID and --expert NAME=ID for each expert"
        )
    if not (folder / FILE).exists():
        raise ValueError(
            f"{merged} has no {FILE}: give --base and --expert NAME=DIR for each expert"
        )
    try:
        method, stored_base, models = _merge(read_yaml(folder / FILE), folder)
        experts = experts or _experts(models)
    except ValueError as error:
        raise ValueError(f"{merged}/{FILE}: {error}. {_ADVICE}") from error
    notes.append(f"base and experts are by options or else by {FILE} ({method})")
    return base or stored_base, experts


def _experts(models: Mapping[str, list[float]]) -> dict[str, str]:
    """Return name -> location of the models that a merge moves towards.

    A name is the last part of a location. A merge moves away from a model with a negative weight,
    and a calibration would move back, so the user has to choose.
    """
    for location, weights in models.items():
        if min(weights) < 0 or not any(weights):
            raise ValueError(f"the weight of {location} is negative or 0, so it may be no expert")
    experts = {_name(location): location for location in models}
    if not experts or len(experts) < len(models):
        raise ValueError(f"{', '.join(models)} end in one name" if experts else "no models")
    return experts


def _name(location: str) -> str:
    """Return the last part of a path or hub id, without a revision."""
    path = Path(location)
    return path.name if path.exists() else path.name.partition("@")[0]


def _merge(content: Any, merged: Path) -> tuple[str, str | None, dict[str, list[float]]]:
    """Return a config's method, its base, and its experts' weights by location."""
    sections = [*_sections(content)]
    if (method := str(content.get("merge_method"))) == "passthrough":
        raise ValueError("passthrough copies layers and merges none")
    bases = [_location(part["base_model"], merged) for part in sections if part.get("base_model")]
    weights: dict[str, list[float]] = {}
    for model in (m for part in sections for m in _list(part, "models") + _list(part, "sources")):
        value = model if isinstance(model, Mapping) else {"model": model}
        numbers = _numbers((value.get("parameters") or {}).get("weight"))
        weights.setdefault(_location(value.get("model"), merged), []).extend(numbers or [1.0])
    if method in _BASE_IS_MERGED:
        return method, None, {name: [1.0] for name in bases[:1]} | weights
    base = bases[0] if bases else None
    return method, base, {name: of for name, of in weights.items() if name != base}


def _sections(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a config and the slices in it."""
    if not isinstance(part, Mapping):
        raise ValueError(f"{part!r:.60} is no mapping")
    yield part
    for inner in _list(part, "slices"):
        yield from _sections(inner)


def _list(part: Mapping[str, Any], key: str) -> list[Any]:
    entries = part.get(key) or []
    if not isinstance(entries, list):
        raise ValueError(f"{key} is {entries!r:.60}, not a list")
    return entries


def _numbers(weight: Any) -> list[float]:
    """Return the numbers of a weight: one, one per layer, or the values of filters by tensor."""
    if isinstance(weight, Mapping):
        weight = weight.get("value")
    if isinstance(weight, list):
        return [number for entry in weight for number in _numbers(entry)]
    return [weight] if isinstance(weight, int | float) else []


def _location(value: Any, merged: Path) -> str:
    """Return a folder or hub id. Relative folders start here or above the merged model."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"a model is {value!r:.60}, not a folder or hub id")
    for folder in (Path(value), *(above / value for above in [*merged.parents][:_LEVELS])):
        if folder.exists():
            return os.path.normpath(folder)
    if not _HUB_ID.fullmatch(value):
        raise ValueError(f"{value} is no folder here and no hub id (adapters need --expert)")
    return value
