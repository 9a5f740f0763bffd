"""Finished blocks on disk, so that an interrupted calibration goes on where it was."""

from fusion_bench_featcal.checkpoints.fingerprint import describe_run, describe_settings
from fusion_bench_featcal.checkpoints.store import (
    Checkpoints,
    NoCheckpoints,
    check_checkpoints,
    open_checkpoints,
)

__all__ = [
    "Checkpoints",
    "NoCheckpoints",
    "check_checkpoints",
    "describe_run",
    "describe_settings",
    "open_checkpoints",
]
