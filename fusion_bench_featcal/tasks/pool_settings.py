"""Settings that all task pools read alike, and the report that they give."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from fusion_bench.utils import count_parameters, instantiate
from torch import nn

from fusion_bench_featcal.data.tables import offline_hint
from fusion_bench_featcal.hub_errors import hub_error, is_of_hub
from fusion_bench_featcal.hub_files import fetch
from fusion_bench_featcal.nearest_names import refuse_unknown_keys
from fusion_bench_featcal.settings import CalibrationError


def refuse_unknown_pool_keys(pool: Any, unknown: Mapping[str, Any]) -> None:
    """Refuse keys of a task pool's YAML that neither the pool nor FusionBench has.

    Raises:
        ValueError: Naming the key, and the nearest that there is.
    """
    refuse_unknown_keys(unknown, pool._config_mapping.values(), "taskpool")


def evaluation_report(
    model: nn.Module, name: str | None, scores: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Return the report of one evaluation, in FusionBench's form."""
    trainable, total = count_parameters(model)
    info: dict[str, Any] = {"trainable_params": trainable, "all_params": total}
    info["trainable_percentage"] = trainable / total
    if name is not None:
        info["name"] = name
    average = {k: fmean(score[k] for score in scores.values()) for k in ("accuracy", "loss")}
    return {"model_info": info, **scores, "average": average}


def load_part(place: str, value: Any, kind: Any, **options: Any) -> Any:
    """Load a part of the task pool, given as a folder, a hub id, a configuration or itself.

    Raises:
        ValueError: If there is no value.
        CalibrationError: If it cannot be loaded.
    """
    if value is None:
        raise ValueError(f"{place} is not set: set it or taskpool.base_model.")
    if not isinstance(value, str):
        return build_part(place, value)
    folder = fetch(value, f"{place}={value}", weights=issubclass(kind, nn.Module))
    try:
        return kind.from_pretrained(folder, trust_remote_code=False, **options)
    except (OSError, ValueError) as error:
        raise _not_loaded(place, value, error) from error


def build_part(place: str, value: Any) -> Any:
    """Instantiate a configuration with `_target_`; anything else is returned as it is.

    Raises:
        CalibrationError: If it cannot be loaded.
    """
    if not (isinstance(value, Mapping) and "_target_" in value):
        return value
    try:
        return instantiate(value)
    except (OSError, ValueError) as error:
        raise _not_loaded(place, dict(value), error) from error


def _not_loaded(place: str, value: Any, error: Exception) -> CalibrationError:
    if is_of_hub(error):
        return hub_error(error, f"{place}={value}")
    return CalibrationError(f"{place}: {value!r} cannot be loaded ({error}).{offline_hint()}")
