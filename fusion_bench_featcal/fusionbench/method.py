"""The base of FeatCal and its rivals: methods that merge models or improve a merged model."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, dataclass_transform

from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts.copies import copied_module
from fusion_bench_featcal.families import check_family
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.results.names import TASK_ID
from fusion_bench_featcal.results.run import Facts, training_lines
from fusion_bench_featcal.settings import Blocks, FeatCalSettings, PoolDraw, Texts
from fusion_bench_featcal.settings.fields import Settings, setting


@dataclass(frozen=True)
class MethodResult:
    """The model of a method, and what reports say about how it was built.

    Attributes:
        model: The model.
        sample_counts: Task -> number of samples that the method used.
        curves: Task -> training curve, a list of (step, loss).
    """

    model: nn.Module
    sample_counts: Mapping[str, int] = field(default_factory=dict)
    curves: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)


@dataclass_transform(
    kw_only_default=True,
    frozen_default=True,
    eq_default=False,
    field_specifiers=(setting, dataclasses.field),
)
@dataclass(frozen=True, kw_only=True, eq=False)
class Method(Settings):
    """A way to improve a merged model, or a merger. A subclass declares its settings as fields.

    A method that improves a merged model has `post_merge(merged, inputs)`. It receives a copy that
    it may change, unless `changes_merged = False` promises to leave `merged` as it is. A merger has
    `merge(inputs)` and starts from the pool's experts. Both return the new model, or a
    `MethodResult` with the model, the numbers of samples and the training curves. YAML names the
    class by `_target_`.
    """

    option: ClassVar[str] = ""
    name: ClassVar[str] = "this method"
    source: ClassVar[str] = ""
    changes_merged: ClassVar[bool] = True
    """True if `post_merge` may change the merged model. It then receives a copy."""

    def __init_subclass__(
        cls, *, option: str = "", source: str = "", without: Sequence[str] = ()
    ) -> None:
        """Make a subclass a dataclass.

        Args:
            option: Name of the method on the command line, `method=<option>`, which the docstring
                of the subclass describes. The part after the last `/` is its name in reports.
            source: The paper.
            without: Inherited settings that the method does not have. They keep their defaults.
        """
        super().__init_subclass__()
        # A dataclass has no field for attributes that the class annotates as ClassVar.
        constants = dict.fromkeys(without, ClassVar[Any])
        cls.__annotations__ = {**inspect.get_annotations(cls), **constants}
        dataclass(frozen=True, kw_only=True, eq=False)(cls)
        if option:
            cls.option, cls.name, cls.source = option, option.rpartition("/")[2], source

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self, Blocks):
            check_family(self.family)

    @property
    def calibration_settings(self) -> FeatCalSettings:
        """The settings that the method shares with a calibration, with defaults for all others."""
        classes = (c for c in (PoolDraw, Texts, Blocks) if isinstance(self, c))
        return FeatCalSettings(**{n: getattr(self, n) for c in classes for n in c.names()})

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, as values that JSON can store."""
        return self.as_dict()

    def title(self, name: str) -> str:
        """Return the message that is logged before the model `name` is built."""
        return f"making {name}"

    @property
    def split(self) -> str:
        """Data split of the samples."""
        return self.calibration_settings.calibration_split

    def check(self, inputs: MethodInputs) -> None:
        """Refuse unusable models before anything is downloaded. By default none is refused."""

    def open(self, inputs: MethodInputs) -> None:
        """Open data, and refuse unusable data, before a model is loaded. The default needs none."""

    def batches(self, inputs: MethodInputs) -> dict[str, Any]:
        """Return task -> batches of the samples that the settings draw."""
        return inputs.batches(self.calibration_settings)

    def open_batches(self, inputs: MethodInputs) -> None:
        """Open each task's data before models are loaded."""
        inputs.opened_batches[id(self)] = self, self.batches(inputs)

    def take_batches(self, inputs: MethodInputs) -> dict[str, Any]:
        """Return the opened batches, which are freed after their use, or open them now."""
        _, batches = inputs.opened_batches.pop(id(self), (self, None))
        return batches or self.batches(inputs)

    def samples(self, result: MethodResult) -> dict[str, dict[str, Any]]:
        """Return task -> {"samples": number, "split": name} of the data that the method used."""
        counts = result.sample_counts
        return {task: {"samples": counts[task], "split": self.split} for task in counts}

    def added(self, model: nn.Module) -> dict[str, int]:
        """Return module -> parameters that the model adds to the merged model, by default none."""
        return {}

    def facts(self, name: str, result: MethodResult) -> Facts:
        """Return what a report says about the model, which it calls `name`."""
        return Facts(
            settings=self.settings,
            seed=self.settings.get("seed"),
            samples=self.samples(result),
            cost=inference_overhead(result.model, self.added(result.model)),
            lines=training_lines(name, result.curves),
        )


def run_method(method: Any, merged: nn.Module | None, inputs: MethodInputs) -> MethodResult:
    """Improve a merged model, which is not changed, or merge the pool's experts if it is None.

    Raises:
        CalibrationError: If the method returns no model, and whatever the method raises.
    """
    if merged is None:
        result = method.merge(inputs)
    else:
        start = copied_module(merged) if method.changes_merged else merged
        result = method.post_merge(start, inputs)
    if result is None:
        function = "merge" if merged is None else "post_merge"
        raise CalibrationError(f"{type(method).__name__}.{function} returned no model")
    if isinstance(result, MethodResult):
        return result
    return MethodResult(result, curves=getattr(result, "curves", {}))  # of the plain model


def inference_overhead(model: nn.Module, added: Mapping[str, int]) -> dict[str, float]:
    """Return what a model needs at inference in addition to the merged model."""
    return {
        # In FusionBench's protocol a surgery model receives the task with every batch.
        TASK_ID: int(getattr(model, "needs_task", getattr(model, "is_surgery_model", False))),
        "modules_added": len(added),
        "parameters_added": sum(added.values()),
    }


class SampleSettings(Method, PoolDraw):
    """A method that draws samples like FeatCal."""

    batch_size: int = setting(
        16, "Number of samples in a forward pass. It changes only memory and rounding.", ge=1
    )

    @property
    def calibration_settings(self) -> FeatCalSettings:
        """The settings that the method shares with a calibration."""
        return super().calibration_settings.replace(batch_size=self.batch_size)

    def open(self, inputs: MethodInputs) -> None:
        """Open each task's data."""
        self.open_batches(inputs)
