"""The settings of a calibration, checked against each other."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusion_bench_featcal.declared_settings import DeclaredSettings
from fusion_bench_featcal.setting_fields import problems_of

SETTINGS_OF_THE_RUN = (
    "activations",
    "activations_dir",
    "cache_dir",
    "checkpoint_dir",
    "decode_workers",
    "ignore_config",
    "pixel_cache_mb",
    "resume",
    "stream_experts",
)
"""What is kept where and how it is read: settings without a part in the calibrated model."""


PLUS: Mapping[str, Any] = {
    "rule": "plus",
    "task_weights": "drift",
    "augment": "auto",
    "held_out": "auto",
    "decoder_rows": "auto",
    "calibrate_norm": False,
}
"""FeatCal+, as `config/featcal_settings/plus.yaml` has it for the command line."""


OF_THE_PAPER = ("ridge_lambda", "mix_alpha", "anchor_rho", "eps")
"""Numbers that only the paper's rule has."""


class CalibrationError(RuntimeError):
    """A calibration that cannot go on: the message names the place, the cause and the setting."""


@dataclass(frozen=True, kw_only=True)
class FeatCalSettings(DeclaredSettings):
    """Settings of one calibration. The defaults are the paper's for CLIP (arXiv 2605.13030, 5.1).

    The same names are used in YAML (`method.<name>`), in Python and in error messages.
    """

    def __post_init__(self) -> None:
        problems = problems_of(self)
        if self.resume is True and self.checkpoint_dir is None:
            problems.append("resume needs method.checkpoint_dir, the folder that keeps the blocks")
        if self.stream_experts is False and self.expert_read_budget is not None:
            problems.append(
                "expert_read_budget needs experts that are read block by block, and "
                "method.stream_experts=false loads them whole; set it to auto"
            )
        problems += self._clashes() + self._without_held_out()
        if problems:
            raise ValueError("; ".join(f"method.{problem}" for problem in problems))
        for name in OF_THE_PAPER:
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("activations_dir", "cache_dir", "checkpoint_dir"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        if self.modules is not None:
            object.__setattr__(self, "modules", tuple(self.modules))
        object.__setattr__(self, "ignore_config", tuple(self.ignore_config))

    def _clashes(self) -> list[str]:
        """Return a phrase for each setting that has no part in the rule."""
        if self.rule == "paper" and self.task_weights is not None:
            return ["task_weights has no part in method.rule=paper: set method.rule=plus"]
        if not isinstance(self.rule, str | Mapping):
            return [
                f"{name}={getattr(self, name)} is no setting of a rule that is given as an object: "
                f"set it there, {type(self.rule).__name__}({name}=...)"
                for name in (*OF_THE_PAPER, "calibrate_bias", "calibrate_norm")
                if getattr(self, name) != getattr(FeatCalSettings, name)
                and getattr(self, name) != getattr(self.rule, name, None)
            ]
        if self.rule != "plus":
            return []
        clashes = [
            f"{name}={getattr(self, name)} has no part in method.rule=plus: leave it at its "
            f"default, {getattr(FeatCalSettings, name)}"
            for name in OF_THE_PAPER
            if getattr(self, name) != getattr(FeatCalSettings, name)
        ]
        if self.calibrate_norm:
            clashes.append(
                "rule=plus needs method.calibrate_norm=false, as method=featcal/plus has"
            )
        return clashes

    def _without_held_out(self) -> list[str]:
        """A phrase for each setting that held-out samples are missing for."""
        if self.held_out != 0:
            return [] if self.log_drift else ["held_out needs method.log_drift=true"]
        wanting = {
            "strict=true": self.strict is True,
            "task_weights=drift": self.task_weights == "drift",
        }
        return [f"{name} needs method.held_out, such as auto" for name in wanting if wanting[name]]

    @classmethod
    def plus(cls, **changes: Any) -> "FeatCalSettings":
        """Settings of FeatCal+ (docs/plus.md).

        Args:
            **changes: Other values by name, as the settings take them.

        Raises:
            ValueError: If a value is out of range.
            TypeError: If a name is no setting.
        """
        return cls(**{**PLUS, **changes})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of all settings, in order of declaration."""
        return tuple(field.name for field in dataclasses.fields(cls))

    def replace(self, **changes: Any) -> "FeatCalSettings":
        """Copy with some settings changed.

        Args:
            **changes: New values by name.

        Returns:
            The checked copy.

        Raises:
            ValueError: If a value is out of range.
            TypeError: If a name is no setting.
        """
        return dataclasses.replace(self, **changes)

    def with_paper_update(self) -> "FeatCalSettings":
        """Copy with the paper's rule: where a pool's presets begin."""
        if self.rule == "paper":
            return self
        kept = () if self.decoder_rows == "auto" else ("decoder_rows",)
        names = {*PLUS, "strict"}.difference(kept)
        return self.replace(**{name: getattr(FeatCalSettings, name) for name in names})

    @property
    def needs_base(self) -> bool:
        """Return whether there must be a base model."""
        of_paper = self.anchor_rho != 1 and self.rule != "plus"
        return getattr(self.rule, "needs_base", of_paper)

    @property
    def task_factors(self) -> Mapping[str, float]:
        """Factors of the tasks' weights that are given as such."""
        return self.task_weights if isinstance(self.task_weights, Mapping) else {}

    def of_the_model(self) -> "FeatCalSettings":
        """Copy in which everything without a part in the model has its default."""
        return self.replace(
            **{name: getattr(FeatCalSettings, name) for name in SETTINGS_OF_THE_RUN}
        )

    def described(self) -> str:
        """The settings that differ from the defaults, for people."""
        usual, own = FeatCalSettings().as_dict(), self.as_dict()
        changed = [f"{name}={own[name]}" for name in own if own[name] != usual[name]]
        return ", ".join(changed) or "default settings"

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name, fit for JSON and YAML."""
        values = {name: getattr(self, name) for name in self.names()}
        values["modules"] = None if self.modules is None else list(self.modules)
        values["ignore_config"] = list(self.ignore_config)
        for name in ("family", "rule"):
            if not isinstance(values[name], str):
                values[name] = _describe_mapping(values[name])
        for name in ("augment", "calibration_data", "task_weights"):
            if isinstance(getattr(self, name), Mapping):
                values[name] = _describe_mapping(getattr(self, name))
        return values


def _describe_mapping(given: Any) -> Any:
    if isinstance(given, Mapping):
        return {str(key): value for key, value in given.items()}
    return repr(given)
