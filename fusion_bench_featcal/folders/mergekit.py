"""Base, experts and weights from the `mergekit_config.yml` beside a merged model."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from fusion_bench_featcal.files import can_be_hub_id
from fusion_bench_featcal.folders.merge_config import ADVICE, FILE, FILES, Merge, read_merge


def with_merge_config(
    merged: str, base: str | None, experts: Mapping[str, str], notes: list[str]
) -> tuple[str | None, Mapping[str, str], str]:
    """Complete base and experts from the merged model's mergekit config.

    Models that options name have priority. The config is not read if they name all.

    Args:
        merged: Folder or hub id of the merged model.
        base: The base from the options.
        experts: The experts from the options.
        notes: Receives sentences on the values from the config.

    Returns:
        Base, experts, and the origin of the experts' names, for messages.

    Raises:
        ValueError: If no experts are named, or the config's models are not usable.
    """
    folder = Path(merged).expanduser()
    if not folder.is_dir() and (folder.exists() or not experts):
        raise ValueError(
            f"MERGED {merged}: there is no such folder here. Correct it, or for a model on the hub "
            "name --base ID and --expert NAME=ID for each expert"
        )
    merge = None if base and experts else read_merge(folder)
    if merge is None:
        if not experts:
            raise ValueError(
                f"{merged} has no {FILE}: give --base and --expert NAME=DIR for each expert"
            )
        return base, experts, "--expert"
    option, named = f"{merged}/{FILE}", experts
    if not experts:
        named = _choose_experts(merge, option)
        notes.append(f"experts from {FILE} ({merge.method})")
    if base is None and merge.base is not None:
        notes.append(f"base from {FILE}")
    by_config = [] if base or not merge.base else [merge.base]
    by_config += named.values() if not experts else ()
    refuse_missing(option, by_config)
    return base or merge.base, named, "--expert" if experts else option


def refuse_missing(option: str, locations: Iterable[str]) -> None:
    """Refuse locations that a config names and that are neither here nor hub ids."""
    missing = [
        location
        for location in locations
        if not (can_be_hub_id(location) or Path(location).expanduser().exists())
    ]
    if missing:
        raise ValueError(f"{option}: these folders are not here: {', '.join(missing)}. {ADVICE}")


def _choose_experts(merge: Merge, option: str) -> dict[str, str]:
    """Return name -> location of the models that a merge moves towards.

    A name is the last part of a location. A calibration moves towards every expert. If a merge
    moves away from a model, or gives it the weight 0, the user has to choose the experts.
    """
    totals = merge.weights
    if merge.has_negative_weight:
        raise ValueError(
            f"{option} has a negative weight or lambda: the merge moves away from a model, but a "
            "calibration would move back to it. Name the experts with --expert NAME=DIR"
        )
    if absent := [location for location, weight in totals.items() if weight == 0]:
        raise ValueError(
            f"{option} gives {', '.join(absent)} the weight 0: the merge leaves them out, but a "
            "calibration would add them. Name the experts with --expert NAME=DIR"
        )
    if merges := [path for path in totals if any((Path(path) / file).exists() for file in FILES)]:
        raise ValueError(
            f"{option}: {', '.join(merges)} is itself a merge, such as an intermediate model of "
            "mergekit-multi, not an expert. Name the fine-tuned models with --expert NAME=DIR"
        )
    experts = {last_part(location): location for location in totals}
    if not experts or len(experts) < len(totals):
        problem = f"{', '.join(totals)} end in the same name" if experts else "no models"
        raise ValueError(f"{option}: {problem}. {ADVICE}")
    return experts


def task_weights(merged: str, experts: Mapping[str, str], notes: list[str]) -> dict[str, float]:
    """Return the experts' weights in the merge, relative to their mean.

    FeatCal+ ends at one model from all merges of the same experts, so it needs the weights as
    `task_weights`.

    Args:
        merged: Folder or hub id of the merged model.
        experts: Expert -> its folder or hub id, by options or the config.
        notes: Receives a sentence on unequal weights.

    Returns:
        Expert -> factor. Empty if all weights are equal, or are not one positive number each.
    """
    try:
        merge = read_merge(Path(merged).expanduser())
    except ValueError:  # all models are named by options
        notes.append(f"{FILE} cannot be read, so FeatCal+ does not use the weights of the merge")
        return {}
    by_path = {_resolved(model): w for model, w in merge.weights.items()} if merge else {}
    paths = {name: _resolved(location) for name, location in experts.items()}
    weights = {name: by_path[path] for name, path in paths.items() if path in by_path}
    are_equal = all(weights.values()) and len({*weights.values()}) == 1
    if merge is None or len(weights) < len(experts) or are_equal:
        return {}
    instead = f"--set 'task_weights={{{', '.join(f'{name}: 1' for name in weights)}}}'"
    if merge.has_negative_weight or not all(weights.values()):
        notes.append(
            f"the weights in {FILE} are not one positive number per expert, so they are not kept, "
            f"and FeatCal+ treats all experts equally (to set weights: {instead})"
        )
        return {}
    values = {name: weight for name, weight in weights.items() if weight}
    mean = sum(values.values()) / len(values)
    factors = {name: float(f"{value / mean:.4g}") for name, value in values.items()}
    weights_text = ", ".join(f"{name} {factor:g}" for name, factor in factors.items())
    notes.append(
        f"--set task_weights from {FILE}: {weights_text}. Without them, FeatCal+ would treat all "
        f"experts equally (to change them: {instead})"
    )
    return factors


def _resolved(location: str) -> str:
    """Return the real path of a folder, or a hub id unchanged."""
    path = Path(location).expanduser()
    return os.path.realpath(path) if path.exists() else location


def last_part(location: str) -> str:
    """Return the last part of a path or hub id, without a revision."""
    path = Path(location)
    return path.name if path.exists() else path.name.partition("@")[0]
