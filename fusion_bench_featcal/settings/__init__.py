"""Every setting of a calibration, declared once: default, accepted values and help text."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from fusion_bench_featcal.errors import CalibrationError as CalibrationError
from fusion_bench_featcal.settings.fields import Settings, is_integer, is_mapping_to, setting
from fusion_bench_featcal.settings.options import SETTINGS_OF_THE_RUN, Blocks, Options
from fusion_bench_featcal.settings.rules import RULE_SETTINGS, RuleSettings, remedy_of
from fusion_bench_featcal.settings.samples import CORRUPTIONS, SEVERITIES, PoolDraw, Texts

__all__ = [
    "CORRUPTIONS", "RULE_SETTINGS", "SETTINGS_OF_THE_RUN", "SEVERITIES", "Blocks",
    "CalibrationError", "FeatCalSettings", "Options", "PoolDraw", "Settings", "Texts", "remedy_of",
]  # fmt: skip


def _is_data_set(value: object) -> bool:
    return isinstance(value, str | Mapping) and bool(value)


@dataclass(frozen=True, kw_only=True)
class FeatCalSettings(PoolDraw, Texts, Options, RuleSettings):
    """Settings of one calibration. The defaults are the paper's for CLIP (arXiv 2605.13030, 5.1).

    The same names are used in YAML, in Python and in messages.

    Raises:
        ValueError: If a value is not accepted, or two settings contradict each other.
        TypeError: If a name is not a setting.
    """

    calibration_data: Mapping[str, Any] | None = setting(
        None,
        "Data to use instead of the pool's, by task: {task: a.jsonl}, {task: hub/id} or {task: "
        "{_target_: ...}}. Null: the pool's data.",
        accepts="a mapping of tasks to paths, hub ids or configs of datasets",
        check=lambda value: is_mapping_to(_is_data_set, value),
    )
    batch_size: int | str = setting(
        "auto",
        "Number of samples that run through a block together. `auto`: 16 on a CPU; on a GPU 64 "
        "images, or as many texts as have 8,192 tokens together (16 to 64). It changes only memory "
        "and rounding.",
        accepts="auto or an integer >= 1",
        check=lambda value: value == "auto" or is_integer(value, 1),
    )

    @property
    def options(self) -> Options:
        """The settings that every rule needs, which `calibrate` takes by name."""
        return Options(**{name: getattr(self, name) for name in Options.names()})

    @cached_property
    def with_rule_defaults(self) -> Self:
        """The settings with the values of their rule in place of null, equal for equal methods.

        Raises as `rule_object`.
        """
        return self.complete()

    def complete(self, **changes: object) -> Self:
        """Return a checked copy with changes by name, and the values of its rule in place of null.

        Args:
            **changes: Settings other than the rule and its numbers.
        """
        completed = self.with_rule(self.rule_object, **changes)
        vars(completed)["rule_object"] = self.rule_object  # its own values make the same rule
        return completed

    @classmethod
    def plus(cls, **changes: object) -> Self:
        """Return the settings of FeatCal+ (docs/reference/formulas.md), with changes by name."""
        return cls(**{"rule": "plus", **changes})

    def replace(self, **changes: object) -> Self:
        """Return a checked copy with changes by name."""
        return replace(self, **changes)
