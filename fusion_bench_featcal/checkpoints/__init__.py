"""Finished blocks on disk, so that an interrupted calibration goes on where it was.

What keeps them is imported only where `checkpoint_dir` is set.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fusion_bench_featcal.checkpoints.sources import WatchedSources
from fusion_bench_featcal.settings import FeatCalSettings

if TYPE_CHECKING:
    from fusion_bench_featcal.checkpoints.store import Checkpoints


class NoCheckpoints:
    """Stands in for `Checkpoints` without `checkpoint_dir`: keeps and restores nothing."""

    def watched(self, name: str, source: Any) -> Any:
        """The source itself."""
        return source

    def digests(self) -> dict[str, dict[str, str]]:
        """Nothing was hashed."""
        return {}

    def watched_samples(self, task: str, batches: Iterable[Any]) -> Iterable[Any]:
        """The batches themselves."""
        return batches

    def kernel(self) -> str | None:
        """No run has begun."""
        return None

    def compare(self, describe: Callable[[], Mapping[str, Any]]) -> None:
        """There is nothing to compare with."""

    def start(self) -> None:
        """There is nothing to begin."""

    def has(self, block: str) -> bool:
        """No block is kept."""
        return False

    def restore(self, block: str, model: nn.Module, run_log: Any) -> None:
        """Never called: no block is kept."""

    def confirm(self, block: str) -> None:
        """Never called: no block is kept."""

    def keep(self, block: str, model: nn.Module, names: Iterable[str], run_log: Any) -> None:
        """Keep nothing."""

    def finish(self, run_log: Any) -> None:
        """There is nothing to tell."""


class OnlyDigests(WatchedSources, NoCheckpoints):
    """Keeps and restores nothing, but knows the digests of what was read of the models."""


def open_checkpoints(
    settings: FeatCalSettings, processes: Any, *, hashed: bool = False
) -> "Checkpoints | NoCheckpoints":
    """The checkpoints that settings ask for.

    Args:
        settings: Settings.
        processes: The processes.
        hashed: Whether to digest what is read of the models, which checkpoints always do.

    Raises:
        CalibrationError: As `Checkpoints`.
    """
    if settings.checkpoint_dir is None:
        return OnlyDigests() if hashed else NoCheckpoints()
    from fusion_bench_featcal.checkpoints.store import Checkpoints

    folder = Path(settings.checkpoint_dir)
    return Checkpoints(folder, resume=settings.resume, processes=processes)


def check_checkpoints(settings: FeatCalSettings, processes: Any) -> None:
    """Refuse, before any work, a folder that a run with these settings cannot use.

    Raises:
        CalibrationError: As `Checkpoints`; also if kept blocks were made with other settings.
    """
    from fusion_bench_featcal.checkpoints.dependencies import describe_settings

    checkpoints = open_checkpoints(settings, processes)
    checkpoints.compare(lambda: {"settings": describe_settings(settings)})
