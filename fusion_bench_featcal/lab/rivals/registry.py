"""Registration of methods: each is one dataclass in a module of this folder."""

import dataclasses
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from fusion_bench_featcal.families import check_family
from fusion_bench_featcal.nearest_names import refuse_unknown_settings
from fusion_bench_featcal.setting_fields import (
    Settings,
    is_shared,
    same_as,
    setting,
    settings_of,
    shared_part,
)
from fusion_bench_featcal.settings import FeatCalSettings

T = TypeVar("T", bound="type[Method]")
_METHODS: dict[str, "type[Method]"] = {}


@dataclass_transform(
    kw_only_default=True,
    frozen_default=True,
    eq_default=False,
    field_specifiers=(setting, same_as, dataclasses.field),
)
def method(option: str, *, source: str, without: Sequence[str] = ()) -> Callable[[T], T]:
    """Register a subclass of `Method`, and make it a dataclass.

    Its docstring is the description in YAML and in the documentation.

    Args:
        option: Name on the command line, `method=<option>`. What follows the last `/` is its name
            in reports.
        source: The paper.
        without: Inherited settings that the method does not have; they keep their default.
    """

    def register(kind: T) -> T:
        # The dataclass of a class has no field for what the class annotates as ClassVar.
        kind.__annotations__ |= dict.fromkeys(without, ClassVar[Any])
        kind = dataclass(frozen=True, kw_only=True, eq=False)(kind)
        kind.option, kind.source, kind.name = option, source, option.rpartition("/")[2]
        _METHODS[option] = kind
        return kind

    return register


def all_methods() -> dict[str, "type[Method]"]:
    """Import the modules of this folder, and return the methods that they register, by option."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")
    return dict(sorted(_METHODS.items()))


@dataclass(frozen=True, kw_only=True, eq=False)
class Method(Settings):
    """A method, whose settings are fields.

    One that improves a merged model has the members of `interface.PostMerging`. A merger has
    `merge(inputs)`, which returns the merged model, `check(inputs)` and `samples(inputs, tasks)`.
    """

    option: ClassVar[str]
    name: ClassVar[str]
    source: ClassVar[str]

    def __new__(cls, **keys: Any) -> Self:
        """Refuse unknown settings by a ValueError that names the nearest one."""
        refuse_unknown_settings(keys, [field.name for field in settings_of(cls)], owner=cls.name)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_family(self.calibration_settings.family)

    @property
    def calibration_settings(self) -> FeatCalSettings:
        """The settings that the method shares with a calibration; the others have their default."""
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


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleSettings(Method):
    """Settings of a method that draws samples as FeatCal does."""

    samples_per_task: int = same_as(FeatCalSettings, "samples_per_task", group="data")
    batch_size: int = same_as(FeatCalSettings, "batch_size")
    seed: int = same_as(FeatCalSettings, "seed")
    calibration_split: str = same_as(FeatCalSettings, "calibration_split")


@dataclass(frozen=True, kw_only=True, eq=False)
class TextSettings(Method):
    """Settings of a method that reads texts as FeatCal does."""

    calibration_targets: str = same_as(FeatCalSettings, "calibration_targets", group="texts only")
    generated_tokens: int = same_as(FeatCalSettings, "generated_tokens")
    max_length: int | None = same_as(FeatCalSettings, "max_length")


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelSettings(Method):
    """Settings of a method that goes through a model block by block."""

    family: Any = same_as(FeatCalSettings, "family", group="models")
    ignore_config: Any = same_as(FeatCalSettings, "ignore_config")
