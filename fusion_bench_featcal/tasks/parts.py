"""Processors, models and data sets from their configuration."""

from collections.abc import Mapping
from typing import Any

from fusion_bench.utils import instantiate

from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.tasks.loading import offline_hint


def load_part(place: str, value: Any, kind: Any, **options: Any) -> Any:
    """Load a processor or model of the task pool.

    Args:
        place: Where it stands in the configuration, for messages.
        value: A folder or hub id, a configuration with `_target_`, or the object itself.
        kind: Class whose `from_pretrained` loads a folder or hub id.
        **options: For `from_pretrained`.

    Returns:
        The object.

    Raises:
        ValueError: If there is no value.
        CalibrationError: If it cannot be loaded.
    """
    if value is None:
        raise ValueError(f"{place} is not set: set it or taskpool.base_model.")
    if not isinstance(value, str):
        return build_part(place, value)
    try:
        return kind.from_pretrained(value, **options)
    except (OSError, ValueError) as error:
        raise _not_loaded(place, value, error) from error


def build_part(place: str, value: Any) -> Any:
    """Instantiate a configuration with `_target_`; anything else is returned as it is.

    Args:
        place: Where it stands in the configuration, for messages.
        value: The configuration or object.

    Returns:
        The object.

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
    return CalibrationError(f"{place}: {value!r} cannot be loaded ({error}).{offline_hint()}")
