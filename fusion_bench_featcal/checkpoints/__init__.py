"""Finished blocks on disk, so that an interrupted calibration goes on where it was."""

from fusion_bench_featcal.checkpoints.fingerprint import describe_run, describe_settings, glimpse
from fusion_bench_featcal.checkpoints.none import NoCheckpoints
from fusion_bench_featcal.checkpoints.store import (
    Checkpoints,
    check_checkpoints,
    open_checkpoints,
)

__all__ = [
    "Checkpoints",
    "NoCheckpoints",
    "check_checkpoints",
    "describe_run",
    "describe_settings",
    "glimpse",
    "open_checkpoints",
]
