"""No output folder."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn


class NoOutput:
    """Stands in for `OutputFolder` without `checkpoint_dir`: reads and writes nothing.

    Attributes:
        is_complete: Whether all blocks have been finished.
    """

    is_complete = False

    def compare(self, run: Mapping[str, Any]) -> None:
        """Do nothing: there is nothing to compare with."""

    def start(self, describe: Callable[[], Mapping[str, Any]], blocks: list[str]) -> None:
        """Do nothing."""

    def read(self, block: str, model: nn.Module) -> dict[str, Tensor]:
        """Return nothing: no block has been finished."""
        return {}

    def write(self, block: str, model: nn.Module, run_log: Any) -> None:
        """Do nothing."""

    def finish(self, model: nn.Module, run_log: Any) -> None:
        """Do nothing."""
