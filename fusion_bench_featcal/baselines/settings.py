"""Settings of the baselines that correct final features: defaults, ranges, unknown keys."""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fusion_bench_featcal.nearest_names import refuse_unknown_settings

log = logging.getLogger(__name__)

NORMALIZE = ("none", "pre")
STREAMS = ("test_tta", "calibration")
TARGETS = ("labels", "generated")
TEXT_SETTINGS = ("calibration_targets", "generated_tokens", "max_length")
"""Settings of the three methods that only language models read."""

CALIBRATION_SPLITS = ("train", "val")


@dataclass(frozen=True, kw_only=True)
class SurgerySettings:
    """Settings of Surgery (arXiv 2402.02705); the defaults are its authors', on 256 samples a task.

    Attributes:
        rank: Width of each task's module, >= 1.
        learning_rate: Adam's step size, > 0.
        steps: Updates of each task's module, >= 1.
        batch_size: Features in an update, and samples in a forward pass, >= 1.
        normalize: `none` corrects features as they are and CLIP's head normalises afterwards (the
            authors); `pre` corrects features of norm 1 (FusionBench; CLIP only).
        samples_per_task: Images or texts drawn for each task, >= 1.
        seed: With the task's name, seeds the draw, the initial weights and the batches, >= 0.
        stream: `test_tta` trains on samples of the test split, as the authors do; `calibration` on
            those FeatCal would draw from `calibration_split`.
        calibration_split: `train` or `val`; read only where `stream` is `calibration`.
        calibration_targets: Of texts that FeatCal would draw: `labels`, or `generated` (the
            expert's own answers). Test texts always have the expert's own.
        generated_tokens: Longest answer that an expert writes, >= 1.
        max_length: Longer texts are cut to so many tokens; None: the tokenizer's limit.
    """

    rank: int = 16
    learning_rate: float = 1e-3
    steps: int = 1000
    batch_size: int = 16
    normalize: str = "none"
    samples_per_task: int = 256
    seed: int = 42
    stream: str = "test_tta"
    calibration_split: str = "train"
    calibration_targets: str = "labels"
    generated_tokens: int = 64
    max_length: int | None = None

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class ProbSurgerySettings:
    """Settings of ProbSurgery (ICML 2025); the defaults are its authors' code's.

    Fields that `SurgerySettings` has too mean the same.

    Attributes:
        hidden: Width of each task's module, >= 1.
        kl_weight: Weight of the divergence from a standard normal, >= 0; or `scaled`: weight and
            initial variance follow the size of the expert's features (not the authors').
        learning_rate: Adam's step size, > 0.
        steps: Updates of each task's module, >= 1.
        batch_size: Features in an update, >= 1.
        normalize: `none` or `pre`. With `pre` the authors' `kl_weight` does harm.
        samples_per_task: Images or texts drawn for each task, >= 1.
        seed: Seeds draw, initial weights, batches and noise, >= 0.
        stream: `test_tta` or `calibration`.
        calibration_split: `train` or `val`.
        calibration_targets: `labels` or `generated`.
        generated_tokens: Longest answer that an expert writes, >= 1.
        max_length: Longest text in tokens, or None.
    """

    hidden: int = 128
    kl_weight: float | str = 1e-4
    learning_rate: float = 1e-3
    steps: int = 1000
    batch_size: int = 16
    normalize: str = "none"
    samples_per_task: int = 256
    seed: int = 42
    stream: str = "test_tta"
    calibration_split: str = "train"
    calibration_targets: str = "labels"
    generated_tokens: int = 64
    max_length: int | None = None

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class RidgeSurgerySettings:
    """Settings of ridge surgery: one affine correction a task, in closed form.

    Fields that `SurgerySettings` has too mean the same.

    Attributes:
        ridge_lambda: Pull towards no correction, >= 0, relative to the features' mean variance; or
            `auto`: the value of a fixed grid with the least leave-one-out error.
        batch_size: Samples in a forward pass, >= 1. Changes memory, not results.
        normalize: `none` or `pre`.
        samples_per_task: Images or texts drawn for each task, >= 1 (>= 2 for `auto`).
        seed: Seeds the draw, >= 0.
        stream: `test_tta` or `calibration`.
        calibration_split: `train` or `val`.
        calibration_targets: `labels` or `generated`.
        generated_tokens: Longest answer that an expert writes, >= 1.
        max_length: Longest text in tokens, or None.
    """

    ridge_lambda: float | str = "auto"
    batch_size: int = 16
    normalize: str = "none"
    samples_per_task: int = 256
    seed: int = 42
    stream: str = "calibration"
    calibration_split: str = "train"
    calibration_targets: str = "labels"
    generated_tokens: int = 64
    max_length: int | None = None

    def __post_init__(self) -> None:
        _check(self)
        if self.ridge_lambda == "auto" and self.samples_per_task < 2:
            raise ValueError(
                "method.ridge_lambda=auto leaves one sample out: method.samples_per_task must be "
                f">= 2, got {self.samples_per_task}; or set method.ridge_lambda to a number"
            )


CorrectionSettings = SurgerySettings | ProbSurgerySettings | RidgeSurgerySettings
_Settings = TypeVar("_Settings", SurgerySettings, ProbSurgerySettings, RidgeSurgerySettings)


def setting_names(kind: type[CorrectionSettings]) -> tuple[str, ...]:
    """Names of a method's settings, in order of declaration."""
    return tuple(field.name for field in dataclasses.fields(kind))


def settings_from(
    kind: type[_Settings],
    values: Mapping[str, Any],
    others: Sequence[str] = (),
    names: Sequence[str] | None = None,
) -> _Settings:
    """Settings from YAML.

    Args:
        kind: The settings class.
        values: Plain values by name; what is absent keeps its default. `training_steps` is an older
            name of `steps`.
        others: The method's keys that are no settings, which may have been meant, too.
        names: Names of the settings that the method has; None: all of the class.

    Returns:
        The settings.

    Raises:
        ValueError: If a key is unknown, with the nearest one, or a value out of range.
    """
    known = setting_names(kind) if names is None else names
    values = dict(values)
    if "training_steps" in values and "steps" in known:
        log.info("method.training_steps is an older name of method.steps, which will stay")
        steps = values.pop("training_steps")
        if values.setdefault("steps", steps) != steps:
            raise ValueError(
                f"method.steps is {values['steps']!r} and method.training_steps, its older name, "
                f"{steps!r}: set method.steps alone"
            )
    unknown = [key for key in values if key not in known]
    refuse_unknown_settings(unknown, [*known, *others])
    return kind(**values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _integer(least: int) -> tuple[str, Callable[[Any], bool]]:
    return (
        f"an integer >= {least}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least,
    )


def _one_of(choices: tuple[str, ...]) -> tuple[str, Callable[[Any], bool]]:
    wanted = "one of " + ", ".join(choices)
    return wanted, lambda value: isinstance(value, str) and value in choices


def _number_or(word: str) -> tuple[str, Callable[[Any], bool]]:
    return (
        f"a finite number >= 0, or {word}",
        lambda value: value == word or (_is_number(value) and value >= 0),
    )


_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "rank": _integer(1),
    "hidden": _integer(1),
    "kl_weight": _number_or("scaled"),
    "ridge_lambda": _number_or("auto"),
    "learning_rate": ("a finite number > 0", lambda value: _is_number(value) and value > 0),
    "steps": _integer(1),
    "batch_size": _integer(1),
    "normalize": _one_of(NORMALIZE),
    "samples_per_task": _integer(1),
    "seed": _integer(0),
    "stream": _one_of(STREAMS),
    "calibration_split": _one_of(CALIBRATION_SPLITS),
    "calibration_targets": _one_of(TARGETS),
    "generated_tokens": _integer(1),
    "max_length": ("null or an integer >= 1", lambda value: value is None or _integer(1)[1](value)),
}

ACCEPTED = {name: wanted for name, (wanted, _) in _CHECKS.items()}
"""Setting -> the values that it accepts, in words."""


def _check(settings: CorrectionSettings) -> None:
    problems = [
        f"method.{name} must be {_CHECKS[name][0]}, got {getattr(settings, name)!r}"
        for name in setting_names(type(settings))
        if not _CHECKS[name][1](getattr(settings, name))
    ]
    if problems:
        raise ValueError("; ".join(problems))
