"""Stand-in for checkpoints where none are kept."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn


class NoCheckpoints:
    """Keeps nothing and restores nothing: a calibration without `checkpoint_dir`."""

    def watched(self, name: str, source: Any) -> Any:
        """The source itself."""
        return source

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
