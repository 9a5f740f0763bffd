"""No output folder."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.settings import FeatCalSettings


class NoOutput:
    """Stands in for `OutputFolder` without `checkpoint_dir`: reads and writes nothing.

    Attributes:
        is_complete: Whether all blocks have been finished.
    """

    is_complete = False

    def compare(self, run: Mapping[str, Any]) -> None:
        """Do nothing: there is nothing to compare with."""

    def start(self, problem: Any, settings: FeatCalSettings) -> None:
        """Do nothing."""

    def read(self, block: str, model: nn.Module) -> dict[str, Tensor]:
        """Return nothing: no block has been finished."""
        return {}

    def write(self, block: str, model: nn.Module, run_log: Any) -> None:
        """Do nothing."""

    def finish(self, model: nn.Module, run_log: Any) -> None:
        """Do nothing."""
