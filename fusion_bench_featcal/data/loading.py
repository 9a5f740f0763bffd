"""Errors in loading data, tokenizers and models, which name the setting."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fusion_bench_featcal.data.tables import offline_hint
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.models.hub import hub_cause, hub_error


@contextmanager
def naming_setting(setting: str, value: Any = None) -> Iterator[None]:
    """Context that loads the value of a setting and turns its errors into calibration errors.

    Raises:
        CalibrationError: If it cannot be loaded, with the setting and the cause.
    """
    description = setting if value is None else f"{setting}={value!r}"
    try:
        yield
    except CalibrationError as error:
        raise CalibrationError(f"{setting}: {error}") from error
    except Exception as error:
        if hub_cause(error):
            raise hub_error(error, description) from error
        # for a missing path, split or column
        if not isinstance(error, OSError | ValueError | KeyError | TypeError):
            raise
        hint, reason = offline_hint() if isinstance(error, OSError) else "", str(error).rstrip(".")
        raise CalibrationError(f"{description} cannot be loaded: {reason}.{hint}") from error
