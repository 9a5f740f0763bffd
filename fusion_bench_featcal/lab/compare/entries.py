"""Entries of a comparison's grid: import of their `_target_`, and check of their keys."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

from fusion_bench.compat.method import AlgorithmFactory
from hydra.utils import instantiate

from fusion_bench_featcal.fusionbench.pool_models import import_target
from fusion_bench_featcal.lab.rivals.interface import PostMerging
from fusion_bench_featcal.lab.rivals.prob_surgery import ProbSurgery
from fusion_bench_featcal.lab.rivals.ridge_surgery import RidgeSurgery
from fusion_bench_featcal.lab.rivals.surgery import Surgery
from fusion_bench_featcal.lab.rivals.surgery_v2 import SurgeryV2
from fusion_bench_featcal.nearest_names import nearest_hint

OWN = "fusion_bench_featcal."
CORRECTIONS = {kind.name: kind for kind in (Surgery, ProbSurgery, RidgeSurgery, SurgeryV2)}


def feature_correction(*, method: str, **settings: Any) -> PostMerging:
    """Return a correction of features by its name.

    Args:
        method: `surgery`, `prob_surgery`, `ridge_surgery` or `surgery_v2`.
        **settings: Settings of that method, including `clip_model` and `final_norm`.

    Raises:
        ValueError: If the method is unknown, or a setting is unknown or out of range.
    """
    if method not in CORRECTIONS:
        names, hint = ", ".join(CORRECTIONS), nearest_hint(method, CORRECTIONS)
        raise ValueError(f"method.method must be one of {names}, got {method!r}{hint}")
    return CORRECTIONS[method](**settings)


def check_target(config: Mapping[str, Any], setting: str) -> None:
    """Import the `_target_` of an entry (or `name`, for older methods), and check its keys.

    Raises:
        CalibrationError: If it cannot be imported.
        ValueError: If the name or a key is unknown.
    """
    target = config.get("_target_")
    if target is None:
        available = AlgorithmFactory.available_algorithms()
        if config.get("name") not in available:
            hint = nearest_hint(config.get("name"), available)
            raise ValueError(
                f"{setting}.name: FusionBench has no method {config.get('name')!r}{hint}"
            )
        return
    kind = import_target(setting, target)
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):  # it has no signature
        return
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
    # Keys that the target rejects or ignores.
    keys = [key for key in config if not re.fullmatch(r"_\w+_", str(key)) and key not in names]
    for key in keys:
        hint = nearest_hint(key, names)
        # FusionBench's classes accept any key with a warning. Classes of this package check theirs.
        if not takes_any or (hint and not str(target).startswith(OWN)):
            raise ValueError(f"{setting}.{key} is unknown{hint}; it takes {', '.join(names)}")


def made_of(config: Mapping[str, Any], setting: str) -> Any:
    """Return the object of an entry.

    Raises:
        ValueError: If its constructor refuses the keys.
    """
    try:
        return instantiate(config, _recursive_=False, _convert_="all")
    # Hydra wraps the constructor's error, which is always about a setting.
    except Exception as error:
        reason = str(error.__cause__ or error).replace("method.", f"{setting}.")
        raise ValueError(f"{setting}: {reason}") from error
