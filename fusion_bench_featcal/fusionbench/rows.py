"""Methods, each of which makes the model of a row: the base of FeatCal and its rivals."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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


@dataclass_transform(
    kw_only_default=True,
    frozen_default=True,
    eq_default=False,
    field_specifiers=(setting, dataclasses.field),
)
@dataclass(frozen=True, kw_only=True, eq=False)
class Method(Settings):
    """A way to improve a merged model, or a merger. A subclass declares its settings as fields.

    One that improves a merged model has `post_merge(merged, inputs)`, which returns the improved
    model. It may change its argument, unless `changes_merged` is False. The model may have
    `curves`, task -> list of (step, loss), which are reported. A merger has `merge(inputs)` and
    starts from the pool's experts. YAML names the class by `_target_`.
    """

    option: ClassVar[str] = ""
    name: ClassVar[str] = "this method"
    source: ClassVar[str] = ""
    changes_merged: ClassVar[bool] = True
    """True if `post_merge` may change its argument, and needs a copy of it."""

    def __init_subclass__(
        cls, *, option: str = "", source: str = "", without: Sequence[str] = ()
    ) -> None:
        """Make a subclass a dataclass.

        Args:
            option: Its name on the command line, `method=<option>`, which its docstring describes.
                The part after the last `/` is the name in reports.
            source: The paper.
            without: Inherited settings that it does not have. They keep their defaults.
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
        kinds = (kind for kind in (PoolDraw, Texts, Blocks) if isinstance(self, kind))
        return FeatCalSettings(**{n: getattr(self, n) for kind in kinds for n in kind.names()})

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, fit for JSON."""
        return self.as_dict()

    def title(self, row: str) -> str:
        """Return what happens when row `row` is made, for the screen."""
        return f"making {row}"

    @property
    def split(self) -> str:
        """Data split of the samples."""
        return self.calibration_settings.calibration_split

    def check(self, inputs: MethodInputs) -> None:
        """Refuse unusable models before anything is downloaded. The default refuses none."""

    def open(self, inputs: MethodInputs) -> None:
        """Open data, and refuse unusable ones, before a model is loaded. The default needs none."""

    @cached_property
    def _opened(self) -> dict[str, Any]:
        """Things opened before the model is made, such as batches, until they are taken."""
        return {}

    def batches(self, inputs: MethodInputs) -> dict[str, Any]:
        """Return task -> batches of the samples that its settings draw."""
        return inputs.batches(self.calibration_settings)

    def open_batches(self, inputs: MethodInputs) -> None:
        """Open each task's data before models are loaded."""
        self._opened["batches"] = self.batches(inputs)

    def take_batches(self, inputs: MethodInputs) -> dict[str, Any]:
        """Return the opened batches, which are freed after their use, or open them now."""
        return self._opened.pop("batches", None) or self.batches(inputs)

    @cached_property
    def sample_counts(self) -> dict[str, int]:
        """Number of samples of each task used for the last model, which the method stores."""
        return {}

    def samples(self, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Task -> {"samples": number, "split": name} of the data used for the last model."""
        counts = self.sample_counts
        return {t: {"samples": counts[t], "split": self.split} for t in tasks if t in counts}

    def added(self, model: nn.Module) -> dict[str, int]:
        """Module -> parameters that the model adds to the merged model, by default none."""
        return {}

    def facts(self, row: str, model: nn.Module, tasks: Sequence[str]) -> Facts:
        """Return what a report says of the last model, as row `row`."""
        return Facts(
            settings=self.settings,
            seed=self.settings.get("seed"),
            samples=self.samples(tasks),
            cost=deployed(model, self.added(model)),
            lines=training_lines(row, getattr(model, "curves", {})),
        )


def improved(method: Any, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
    """Improve a merged model, which is not changed.

    Raises:
        CalibrationError: If the method returns no model, and whatever it raises.
    """
    model = method.post_merge(copied_module(merged) if method.changes_merged else merged, inputs)
    if model is None:
        raise CalibrationError(f"{type(method).__name__}.post_merge returned no model")
    return model


def deployed(model: nn.Module, added: Mapping[str, int]) -> dict[str, float]:
    """Return what a model needs at inference in addition to the merged model."""
    return {
        # In FusionBench's protocol a surgery model receives the task with every batch.
        TASK_ID: int(getattr(model, "needs_task", getattr(model, "is_surgery_model", False))),
        "modules_added": len(added),
        "parameters_added": sum(added.values()),
    }


class SampleSettings(Method, PoolDraw):
    """Settings of a method that draws samples like FeatCal."""

    batch_size: int = setting(16, "Samples in a forward pass. Changes memory and rounding.", ge=1)

    @property
    def calibration_settings(self) -> FeatCalSettings:
        """The settings that the method shares with a calibration."""
        return super().calibration_settings.replace(batch_size=self.batch_size)

    def open(self, inputs: MethodInputs) -> None:
        """Open each task's data."""
        self.open_batches(inputs)
