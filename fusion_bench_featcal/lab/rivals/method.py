"""The base of all methods. Each is one class with its settings, in a module of this folder."""

import dataclasses
import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, dataclass_transform

from torch import nn

from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.families import check_family
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.settings.fields import (
    Settings,
    is_shared,
    same_as,
    setting,
    settings_of,
    shared_part,
)

if TYPE_CHECKING:
    from fusion_bench_featcal.fusionbench.inputs import MethodInputs

_METHODS: dict[str, "type[Method]"] = {}


def all_methods() -> dict[str, "type[Method]"]:
    """Import the modules of this folder, and return their methods by option."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")
    return dict(sorted(_METHODS.items()))


@dataclass_transform(
    kw_only_default=True,
    frozen_default=True,
    eq_default=False,
    field_specifiers=(setting, same_as, dataclasses.field),
)
@dataclass(frozen=True, kw_only=True, eq=False)
class Method(Settings):
    """A way to improve a merged model, or a merger. A subclass declares its settings as fields.

    One that improves a merged model has `post_merge(merged, inputs)`, which may change its argument
    and returns the improved model. The model may have `curves`, task -> list of (step, loss), which
    are reported. A merger has `merge(inputs)` and starts from the pool's experts. YAML names the
    class by `_target_`.
    """

    name: ClassVar[str] = "this method"
    source: ClassVar[str] = ""

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
            cls.name, cls.source = option.rpartition("/")[2], source
            _METHODS[option] = cls

    def __new__(cls, **keys: Any) -> Self:
        """Refuse unknown settings by a ValueError that names the nearest one."""
        refuse_unknown(keys, cls.names(), "method.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_family(self.calibration_settings.family)

    @property
    def calibration_settings(self) -> FeatCalSettings:
        """The settings that the method shares with a calibration, with defaults for all others."""
        return shared_part(self, FeatCalSettings)

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, fit for JSON."""
        described = self.calibration_settings.as_dict()
        return {
            field.name: described[field.name]
            if is_shared(field, FeatCalSettings)
            else getattr(self, field.name)
            for field in settings_of(type(self))
        }

    @property
    def split(self) -> str:
        """Data split of the samples."""
        return self.calibration_settings.calibration_split

    def check(self, inputs: "MethodInputs") -> None:
        """Refuse unusable models or data before a model is loaded. The default refuses none."""

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


class SampleSettings(Method):
    """Settings of a method that draws samples like FeatCal."""

    samples_per_task: int = same_as(FeatCalSettings, "samples_per_task", group="data")
    batch_size: int = same_as(FeatCalSettings, "batch_size")
    seed: int = same_as(FeatCalSettings, "seed")
    calibration_split: str = same_as(FeatCalSettings, "calibration_split")
    calibration_corruption: Mapping[str, Any] | None = same_as(
        FeatCalSettings, "calibration_corruption"
    )

    def check(self, inputs: "MethodInputs") -> None:
        """Refuse tasks without data."""
        inputs.batches(self.calibration_settings)
