"""Entry point for callers that must run without sentence-transformers."""

from pathlib import Path
from typing import Any

from fusion_bench_featcal.errors.place import error_context, message_of


def pooled_encoder(folder: Path, label: str) -> Any:
    """Return a `PooledEncoder`. The library is only imported here, because that takes seconds.

    Raises:
        CalibrationError: If the library is missing, or the folder cannot be opened.
    """
    with error_context(label, cause=message_of(ImportError)):
        from fusion_bench_featcal.encoders.pooling import PooledEncoder
    return PooledEncoder(folder, label)
