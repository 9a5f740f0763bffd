"""The interface of post-merging methods."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from fusion_bench_featcal.method_inputs import MethodInputs


class PostMerging(Protocol):
    """A way to improve a merged model. YAML names its class by `_target_`."""

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, including defaults, fit for JSON."""
        ...

    def check(self, inputs: MethodInputs) -> None:
        """Refuse unusable models, data or settings before a model is loaded."""
        ...

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Return the improved model. `merged` may be changed.

        The model may have `curves`, task -> list of (step, loss), if it was trained, which are
        reported.
        """
        ...

    def samples(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Task -> {"samples": number, "split": name} of the data used."""
        ...

    def added(self, model: nn.Module) -> dict[str, int]:
        """Module -> parameters that the improved model adds to the merged model."""
        ...
