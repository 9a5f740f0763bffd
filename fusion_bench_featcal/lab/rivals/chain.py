"""Post-merging methods one after another, as one row of a comparison."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from hydra.utils import instantiate
from torch import nn

from fusion_bench_featcal.fusionbench.inputs import MethodInputs
from fusion_bench_featcal.fusionbench.rows import Method
from fusion_bench_featcal.settings.fields import setting


class Chain(Method):
    """Runs post-merging methods in order, each on the result of the one before.

    Methods that correct features come last, because the next one needs a plain model.
    """

    name = "chain"

    methods: Sequence[Mapping[str, Any]] = setting(
        (),
        "Configs of the methods, with `_target_`.",
        accepts="a list of at least one config",
        check=lambda value: isinstance(value, Sequence) and len(value) > 0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.chained  # checks their settings

    @cached_property
    def chained(self) -> list[Any]:
        """The methods."""
        return [instantiate(of, _recursive_=False, _convert_="all") for of in self.methods]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of all methods. Of settings with one name the last method's are listed."""
        merged = {name: value for method in self.chained for name, value in method.settings.items()}
        return merged | {"methods": [method.name for method in self.chained]}

    def check(self, inputs: MethodInputs) -> None:
        """Check each method. Raises as their `check`."""
        for method in self.chained:
            method.check(inputs)

    def open(self, inputs: MethodInputs) -> None:
        """Open each method's data. Raises as their `open`."""
        for method in self.chained:
            method.open(inputs)

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Improve the merged model by each method in turn. Raises as these."""
        for method in self.chained:
            merged = method.post_merge(merged, inputs)
        return merged

    def samples(self, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the samples of the last method."""
        return self.chained[-1].samples(tasks)

    def added(self, model: nn.Module) -> dict[str, int]:
        """Return what the last method adds to the model."""
        return self.chained[-1].added(model)
