"""Pairing of an expert's tensor names with the merged model's."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.settings import CalibrationError


def aliases(model: nn.Module) -> dict[str, list[str]]:
    """For each tensor name, the other names of the same (tied) parameter."""
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return {name: [n for n in group if n != name] for group in groups.values() for name in group}


def pair_names(
    model_name: str,
    role: str,
    source: Any,
    wanted: Mapping[str, Tensor],
    tied: Mapping[str, list[str]],
) -> dict[str, str]:
    """Source name of each of the model's tensors, with all shapes checked."""
    available = source.names()
    rename = _renaming(available, set(wanted))
    keys: dict[str, str] = {}
    for name, tensor in wanted.items():
        stored = [n for n in map(rename, [name, *tied[name]]) if n in available]
        if not stored:
            nearest = difflib.get_close_matches(name, available, n=1, cutoff=0.0)
            raise CalibrationError(
                f"{role} {model_name!r} has no tensor {name!r}"
                + (f"; its nearest is {nearest[0]!r}" if nearest else "")
                + f". Check modelpool.models.{model_name}, or set method.stream_experts=false if "
                "transformers renames this architecture's tensors when it loads them"
            )
        if source.shape(stored[0]) != tuple(tensor.shape):
            raise CalibrationError(
                f"{role} {model_name!r}: tensor {name!r} has shape {source.shape(stored[0])}, the "
                f"merged model's has {tuple(tensor.shape)}. Check modelpool.models.{model_name}"
            )
        keys[name] = stored[0]
    return keys


def _renaming(available: set[str], wanted: set[str]) -> Callable[[str], str]:
    """Find how the source spells the model's names: as they are, or with a prefix more or less.

    The same weights are `vision_model.x` in a file and, from transformers 5.6 on, `x` in memory.
    """
    prefixes = {name.split(".")[0] + "." for name in available | wanted}
    choices = [("", "")] + [(p, "") for p in sorted(prefixes)] + [("", p) for p in sorted(prefixes)]

    def rename(name: str, added: str, removed: str) -> str:
        return added + name.removeprefix(removed)

    def covered(choice: tuple[str, str]) -> int:
        return sum(rename(name, *choice) in available for name in wanted)

    best = max(choices, key=covered)  # the first of equals: names as they are
    return lambda name: rename(name, *best)
