"""Entry for callers that must run without sentence-transformers."""

from pathlib import Path
from typing import Any

from fusion_bench_featcal.errors import CalibrationError


def pooled_encoder(folder: Path, label: str) -> Any:
    """Return a `PooledEncoder`. Its library is only imported here, as that takes seconds.

    Raises:
        CalibrationError: If the library is missing, or the folder cannot be opened.
    """
    try:
        from fusion_bench_featcal.encoders.pooling import PooledEncoder
    except ImportError as error:
        raise CalibrationError(f"{label} {error}") from error
    return PooledEncoder(folder, label)
