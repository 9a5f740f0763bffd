"""The settings of a calibration, checked against each other."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fusion_bench_featcal.declared_settings import DeclaredSettings
from fusion_bench_featcal.errors import CalibrationError as CalibrationError
from fusion_bench_featcal.setting_fields import problems_of

SETTINGS_OF_THE_RUN = ("activations", "checkpoint_dir", "resume")
"""Settings of storage and reading, which do not change the calibrated model."""

PLUS: Mapping[str, Any] = {
    "rule": "plus",
    "augment": "auto",
    "decoder_rows": "auto",
    "calibrate_norm": False,
}
"""FeatCal+. `config/featcal_settings/plus.yaml` is written from it."""

OF_THE_PAPER = ("ridge_lambda", "mix_alpha", "anchor_rho")
"""Numeric settings that only the paper's rule has."""

_FOLDERS = ("checkpoint_dir",)


@dataclass(frozen=True, kw_only=True)
class FeatCalSettings(DeclaredSettings):
    """Settings of one calibration. The defaults are the paper's for CLIP (arXiv 2605.13030, 5.1).

    The same names are used in YAML (`method.<name>`), in Python and in error messages.

    Raises:
        ValueError: If a value is not accepted, or two settings contradict each other.
        TypeError: If a name is not a setting.
    """

    def __post_init__(self) -> None:
        if problems := [*problems_of(self), *self._clashes()]:
            raise ValueError("; ".join(f"method.{problem}" for problem in problems))
        conversions = {OF_THE_PAPER: float, _FOLDERS: os.fspath}
        for names, convert in {**conversions, ("modules",): tuple}.items():
            for name in names:
                if (value := getattr(self, name)) is not None:
                    object.__setattr__(self, name, convert(value))

    def _clashes(self) -> Iterator[str]:
        """Yield a phrase for each setting that contradicts the others."""
        if self.resume is True and self.checkpoint_dir is None:
            yield "resume needs method.checkpoint_dir, the folder that keeps the blocks"
        if self.rule == "paper" and self.task_weights is not None:
            yield "task_weights has no part in method.rule=paper: set method.rule=plus"
        if self.rule == "plus" and self.calibrate_norm:
            yield "rule=plus needs method.calibrate_norm=false, as method=featcal/plus has"
        yield from self._settings_of_other_rules()

    def _settings_of_other_rules(self) -> Iterator[str]:
        """Yield a phrase for each changed setting that the rule does not have."""
        for name in (*OF_THE_PAPER, "calibrate_bias", "calibrate_norm"):
            value, default = getattr(self, name), getattr(FeatCalSettings, name)
            if value == default:
                continue
            if self.rule == "plus" and name in OF_THE_PAPER:
                yield (
                    f"{name}={value} has no part in method.rule=plus: leave it at its default, "
                    f"{default}"
                )
            is_object = not isinstance(self.rule, str | Mapping)
            if is_object and value != getattr(self.rule, name, None):
                yield (
                    f"{name}={value} is no setting of a rule that is given as an object: set it "
                    f"there, {type(self.rule).__name__}({name}=...)"
                )

    @classmethod
    def plus(cls, **changes: Any) -> "FeatCalSettings":
        """Return the settings of FeatCal+ (docs/plus.md), with changes by name."""
        return cls(**{**PLUS, **changes})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all settings, in order of declaration."""
        return tuple(field.name for field in dataclasses.fields(cls))

    def replace(self, **changes: Any) -> "FeatCalSettings":
        """Return a checked copy with changes by name."""
        return dataclasses.replace(self, **changes)

    def with_paper_update(self) -> "FeatCalSettings":
        """Return a copy with the paper's rule, the starting point of a pool's presets."""
        if self.rule == "paper":
            return self
        unchanged = () if self.decoder_rows == "auto" else ("decoder_rows",)
        return self._with_defaults(set(PLUS).difference(unchanged))

    def of_the_model(self) -> "FeatCalSettings":
        """Return a copy with defaults for all settings that do not change the model."""
        return self._with_defaults(SETTINGS_OF_THE_RUN)

    def _with_defaults(self, names: Iterable[str]) -> "FeatCalSettings":
        return self.replace(**{name: getattr(FeatCalSettings, name) for name in names})

    @property
    def needs_base(self) -> bool:
        """Return whether a base model is required."""
        of_paper = self.anchor_rho != 1 and self.rule != "plus"
        return getattr(self.rule, "needs_base", of_paper)

    def described(self) -> str:
        """Return the settings that differ from the defaults, as text."""
        defaults = FeatCalSettings().as_dict()
        changed = [f"{k}={value}" for k, value in self.as_dict().items() if value != defaults[k]]
        return ", ".join(changed) or "default settings"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values by name, fit for JSON and YAML."""
        return {name: _plain(getattr(self, name)) for name in self.names()}


def _plain(value: Any) -> Any:
    """Return a setting's value for JSON: families and rules that are objects as their repr."""
    if isinstance(value, Mapping):
        return {str(key): entry for key, entry in value.items()}
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, str | int | float) else repr(value)
