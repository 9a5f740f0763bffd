"""Every setting of a calibration, declared once: default, accepted values and help text."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusion_bench_featcal.errors import CalibrationError as CalibrationError
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.settings.fields import (
    Settings,
    is_integer,
    is_number,
    same_as,
    setting,
    shared_part,
)
from fusion_bench_featcal.settings.options import OPTIONS_BY_RULE, SETTINGS_OF_THE_RUN, Options

__all__ = [
    "BY_RULE", "CORRUPTIONS", "OF_RULES", "SETTINGS_OF_THE_RUN", "SEVERITIES", "CalibrationError",
    "FeatCalSettings", "Options", "Settings", "remedy_of",
]  # fmt: skip

OF_RULES = (
    "ridge_lambda", "mix_alpha", "anchor_rho", "task_weights", "calibrate_bias", "calibrate_norm",
)  # fmt: skip
"""Settings that a rule has as fields, or does not have."""

BY_RULE = (*OPTIONS_BY_RULE, "calibrate_norm")
"""Settings whose null stands for the rule's attribute of the same name."""

CORRUPTIONS = ("gaussian_noise", "motion_blur", "fog")
SEVERITIES = (1, 2, 3, 4, 5)
# Gram matrices have norm 1: a larger ridge leaves no digit of float64 for the data.
_LARGEST_RIDGE = 1e12
_STRONG_RIDGE, _FAR_ANCHOR = 100, 10  # numbers from which a note says what they do


def _is_rule(value: Any) -> bool:
    if isinstance(value, Mapping):
        return isinstance(value.get("_target_"), str)
    return value in ("paper", "plus") if isinstance(value, str) else hasattr(value, "turns")


def _is_mapping_to(is_value: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(is_value, value.values()))


def _are_factors(value: Any) -> bool:
    return _is_mapping_to(lambda factor: is_number(factor) and factor > 0, value)


def _are_data_sets(value: Any) -> bool:
    return _is_mapping_to(lambda data: isinstance(data, str | Mapping) and bool(data), value)


def _is_corruption(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and set(value) == {"kind", "severity"}
        and value["kind"] in CORRUPTIONS
        and is_integer(value["severity"], 1)
        and value["severity"] in SEVERITIES
    )


@dataclass(frozen=True, kw_only=True)
class FeatCalSettings(Settings):
    """Settings of one calibration. The defaults are the paper's for CLIP (arXiv 2605.13030, 5.1).

    The same names are used in YAML, in Python and in messages.

    Raises:
        ValueError: If a value is not accepted, or two settings contradict each other.
        TypeError: If a name is not a setting.
    """

    ridge_lambda: float = setting(
        0.05,
        "Strength of the pull towards the anchor (lambda, Eq. 15). Gram matrices have norm 1.",
        ge=0,
        le=_LARGEST_RIDGE,
        convert=float,
    )
    mix_alpha: float = setting(
        0.3,
        "Share of the expert's features in the target input (alpha, Eq. 10).",
        ge=0,
        le=1,
        convert=float,
    )
    anchor_rho: float = setting(
        2.0,
        "Position of the anchor (rho, Eq. 11): 0 is the base, 1 the merged model, 2 twice as far.",
        ge=-1000,
        le=1000,
        convert=float,
    )
    rule: Any = setting(
        "paper",
        "How a block is solved: `paper`, all modules at once (Algorithm 1), `plus`, FeatCal+, "
        "groups of modules in turn, without the three settings above (docs/method.md), or a rule "
        "of your own, {_target_: my_module.MyRule, option: 1}.",
        accepts="paper, plus, a mapping with `_target_` and the rule's settings, or a rule",
        check=_is_rule,
    )
    task_weights: Mapping[str, float] | None = setting(
        None,
        "Factors of the tasks' weights, {task: factor}. Others have 1. FeatCal+ only.",
        accepts="a mapping of tasks to numbers above 0",
        check=_are_factors,
    )
    augment: str | None = same_as(Options, "augment")
    samples_per_task: int = same_as(
        Options,
        "samples_per_task",
        default=256,
        help="Unlabeled samples drawn for each task. A task that has fewer uses all.",
    )
    batch_size: int | str = setting(
        "auto",
        "Samples that run through a block together. `auto`: 16, on a GPU 64 images, or as many "
        "texts (16 to 64) as have 8,192 tokens. Changes memory and rounding.",
        accepts="auto or an integer >= 1",
        check=lambda value: value == "auto" or is_integer(value, 1),
    )
    seed: int = same_as(Options, "seed")
    calibration_split: str = setting(
        "train",
        "Split of the data that samples are drawn from.",
        choices=("train", "val", "test"),
    )
    calibration_corruption: Mapping[str, Any] | None = setting(
        None,
        "Corruption of image samples, {kind: fog, severity: 3}: gaussian_noise, motion_blur or fog "
        "of severity 1 to 5, as in ImageNet-C.",
        accepts="{kind: ..., severity: ...}",
        check=_is_corruption,
    )
    calibration_data: Mapping[str, Any] | None = setting(
        None,
        "Data in place of the pool's, by task: {task: a.jsonl}, {task: hub/id} or {task: "
        "{_target_: ...}}. Null: the pool's data.",
        accepts="a mapping of tasks to paths, hub ids or configs of datasets",
        check=_are_data_sets,
    )
    calibration_targets: str = setting(
        "labels",
        "Text after the prompt: the data's `labels`, or the output of the task's expert "
        "(`generated` by greedy search), which needs no label.",
        choices=("labels", "generated"),
    )
    generated_tokens: int = setting(64, "Maximum length of a generated text, in tokens.", ge=1)
    max_length: int | None = setting(
        None,
        "Maximum length of a text in tokens. Longer ones are truncated. Null: a text that exceeds "
        "the limit of the tokenizer or of the model's positions is an error.",
        ge=2,
    )
    calibrate_bias: bool = setting(True, "Calibrate biases (Eqs. 51-55).")
    calibrate_norm: bool | None = setting(
        None,
        "Calibrate gains and shifts of LayerNorm and GroupNorm (Eqs. 56-59). Null: as the rule has "
        "it.",
    )
    modules: Sequence[str] | None = same_as(Options, "modules")
    decoder_rows: str | None = same_as(Options, "decoder_rows")
    family: Any = same_as(Options, "family")
    expert_read_budget: float | str | None = same_as(Options, "expert_read_budget")
    activations: str = same_as(Options, "activations")
    checkpoint_dir: str | None = same_as(Options, "checkpoint_dir")
    resume: bool = same_as(Options, "resume")

    @property
    def options(self) -> Options:
        """The settings that every rule needs, which `calibrate` takes by name."""
        return shared_part(self, Options)

    def clashes(self) -> Iterable[str]:
        """Return a phrase for each setting that contradicts another one."""
        return self.options.clashes()

    @property
    def strengths(self) -> dict[str, float]:
        """The strengths of the paper's rule by name. Other rules have none of these."""
        names = ("ridge_lambda", "mix_alpha", "anchor_rho") if self.rule == "paper" else ()
        return {name: getattr(self, name) for name in names}

    @property
    def extremes(self) -> list[str]:
        """Sentences on numbers of the paper's rule that leave samples or models without effect."""
        sentences, strengths = [], self.strengths
        if (ridge := strengths.get("ridge_lambda", 0)) >= _STRONG_RIDGE:
            sentences.append(
                f"{option('ridge_lambda', f'{ridge:g}')} is very large: Gram matrices have "
                "norm 1, so that the samples hardly count"
            )
        if abs(rho := strengths.get("anchor_rho", 0)) > _FAR_ANCHOR:
            sentences.append(
                f"{option('anchor_rho', f'{rho:g}')} is far: the anchor is {abs(rho):g} times "
                "as far from the base as the merged model"
            )
        return sentences

    @classmethod
    def plus(cls, **changes: Any) -> "FeatCalSettings":
        """Return the settings of FeatCal+ (docs/method.md), with changes by name."""
        return cls(**{"rule": "plus", **changes})

    def replace(self, **changes: Any) -> "FeatCalSettings":
        """Return a checked copy with changes by name."""
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values by name, fit for JSON and YAML."""
        return {name: _plain(getattr(self, name)) for name in FeatCalSettings.names()}


def remedy_of(setting: str) -> str:
    """Return the remedy, for messages, where the rule does not have a setting of `OF_RULES`."""
    rule = option("rule", "plus" if setting == "task_weights" else "paper")
    return f"leave it at its default, or choose {rule}"


def _plain(value: Any) -> Any:
    """Return a setting's value for JSON: families and rules that are objects as their repr."""
    if isinstance(value, Mapping):
        return {str(key): entry for key, entry in value.items()}
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, str | int | float) else repr(value)
