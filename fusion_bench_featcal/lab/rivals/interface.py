"""The interface of post-merging methods."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from fusion_bench_featcal.method_inputs import MethodInputs


@dataclass(frozen=True)
class Choice:
    """Choice of a model's settings, stored on the model as `choice`.

    Attributes:
        tried: Number of settings compared on calibration samples, >= 1.
        chosen: Changes of the original settings, such as `rank=4`, or `as given`.
    """

    tried: int
    chosen: str

    @classmethod
    def of(cls, tried: int, change: Mapping[str, Any]) -> "Choice":
        """Describe a change of settings."""
        return cls(tried, ", ".join(f"{k}={v}" for k, v in change.items()) or "as given")


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

        The model may have `curves`, task -> list of (step, loss), if it was trained, and `choice`
        if its settings were chosen. Both are reported.
        """
        ...

    def samples(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Task -> {"samples": number, "split": name} of the data used."""
        ...

    def added(self, model: nn.Module) -> dict[str, int]:
        """Module -> parameters that the improved model adds to the merged model."""
        ...


@dataclass(frozen=True)
class Chain:
    """Several methods, each applied to the result of the previous one.

    Attributes:
        steps: Name -> method, in the order of application.
    """

    steps: Mapping[str, PostMerging]

    @property
    def settings(self) -> dict[str, Any]:
        """Step -> its settings."""
        return {name: step.settings for name, step in self.steps.items()}

    def check(self, inputs: MethodInputs) -> None:
        """Check every step."""
        for step in self.steps.values():
            step.check(inputs)

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Apply the steps in order."""
        for step in self.steps.values():
            merged = step.post_merge(merged, inputs)
        return merged

    def samples(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return for each task the largest number that a step uses, and all splits."""
        by_step = [step.samples(model, tasks) for step in self.steps.values()]
        used: dict[str, dict[str, Any]] = {}
        for task in tasks:
            if entries := [samples[task] for samples in by_step if task in samples]:
                splits = sorted({str(entry["split"]) for entry in entries})
                number = max(entry["samples"] for entry in entries)
                used[task] = {"samples": number, "split": " and ".join(splits)}
        return used

    def added(self, model: nn.Module) -> dict[str, int]:
        """Return the modules added by all steps."""
        return {
            f"{name}.{module}": count
            for name, step in self.steps.items()
            for module, count in step.added(model).items()
        }


def seed_of(settings: Mapping[str, Any]) -> int | None:
    """Return the seed in a method's settings, or in the first step's that has one."""
    seed = settings.get("seed")
    if isinstance(seed, int):
        return seed
    nested = (seed_of(entry) for entry in settings.values() if isinstance(entry, Mapping))
    return next((value for value in nested if value is not None), None)
