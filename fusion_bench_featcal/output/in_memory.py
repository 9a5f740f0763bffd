"""Finished blocks in memory, used without an output folder."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fusion_bench_featcal.experts.working_model import WorkingModel
from fusion_bench_featcal.settings import FeatCalSettings


class InMemory:
    """Finished blocks of a run without `checkpoint_dir`, which cannot be resumed.

    Attributes:
        is_complete: Whether an earlier run has finished all blocks.
    """

    is_complete = False

    def compare(self, run: Mapping[str, Any]) -> None:
        """Do nothing, because there is no earlier run."""

    def start(self, problem: Any, settings: FeatCalSettings) -> None:
        """Do nothing."""

    def read(self, block: str, model: WorkingModel) -> dict[str, Tensor]:
        """Return no tensors, because no earlier run has finished the block."""
        return {}

    def write(
        self, block: str, model: WorkingModel, changed: Mapping[str, Tensor], run_log: Any
    ) -> Mapping[str, Tensor]:
        """Return the tensors of a calibrated block, stored on the merged model's device.

        Args:
            block: The block.
            model: The calibrated model, with the block in memory.
            changed: The block's tensors that differ from the merged model.
            run_log: The log.
        """
        return {name: tensor.to(model.home) for name, tensor in changed.items()}

    def finish(self, tensors: Mapping[str, Tensor], run_log: Any) -> None:
        """Do nothing."""
