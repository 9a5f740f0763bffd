"""Every setting of a calibration, declared once: default, accepted values and help text."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusion_bench_featcal.errors import CalibrationError as CalibrationError
from fusion_bench_featcal.settings.budgets import is_read_budget
from fusion_bench_featcal.settings.fields import (
    Settings,
    is_integer,
    is_number,
    is_text_list,
    setting,
)

SETTINGS_OF_THE_RUN = ("activations", "checkpoint_dir", "resume")
"""Settings of storage and reading, which do not change the calibrated model."""

OF_RULES = (
    "ridge_lambda", "mix_alpha", "anchor_rho", "task_weights", "calibrate_bias", "calibrate_norm",
)  # fmt: skip
"""Settings that a rule has as fields, or does not have."""

BY_RULE = ("augment", "decoder_rows", "calibrate_norm")
"""Settings whose null stands for the rule's attribute of the same name (`rules.completed`)."""

CORRUPTIONS = ("gaussian_noise", "motion_blur", "fog")
SEVERITIES = (1, 2, 3, 4, 5)
# Gram matrices have norm 1: a larger ridge leaves no digit of float64 for the data.
_LARGEST_RIDGE = 1e12


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
    )
    mix_alpha: float = setting(
        0.3, "Share of the expert's features in the target input (alpha, Eq. 10).", ge=0, le=1
    )
    anchor_rho: float = setting(
        2.0,
        "Position of the anchor (rho, Eq. 11): 0 is the base, 1 the merged model, 2 twice as far.",
        ge=-1000,
        le=1000,
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
    augment: str | None = setting(
        None,
        "Jittered copies of images, used in addition to them: `none`, `auto` (none of anything "
        "else) or `jitter` (anything else is refused). Null: as the rule has it.",
        choices=("none", "auto", "jitter"),
    )
    samples_per_task: int = setting(
        256, "Unlabeled samples drawn for each task. A task that has fewer uses all.", ge=1
    )
    batch_size: int = setting(
        16, "Samples that run through a block together. Changes memory and rounding.", ge=1
    )
    seed: int = setting(42, "Seeds each task's random numbers, together with its name.", ge=0)
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
        "the tokenizer's limit is an error.",
        ge=2,
    )
    calibrate_bias: bool = setting(True, "Calibrate biases (Eqs. 51-55).")
    calibrate_norm: bool | None = setting(
        None,
        "Calibrate gains and shifts of LayerNorm and GroupNorm (Eqs. 56-59). Null: as the rule has "
        "it.",
    )
    modules: Sequence[str] | None = setting(
        None,
        "Patterns of the modules to calibrate: a name or its end, `*` for anything, `!` in front "
        "to exclude. Null: every linear module, convolution and norm of the blocks.",
        accepts="a non-empty list of patterns",
        check=lambda value: is_text_list(value) and len(value) > 0,
    )
    decoder_rows: str | None = setting(
        None,
        "Decoder positions that count: `all` but padding, only `targets`, which predict a target "
        "token, or `auto`: targets if there are labels. Null: as the rule has it.",
        choices=("all", "targets", "auto"),
    )
    family: Any = setting(
        "auto",
        "How the model is divided into blocks: auto, clip, llama, open_clip, stack, stages, t5, "
        "whisper, or a family of your own, {_target_: my_module.MyFamily}.",
        accepts="a family's name, a mapping with its `name` or `_target_`, or a Family",
        check=lambda value: value is not None and value != "",
    )
    expert_read_budget: float | str | None = setting(
        None,
        "Limit on the bytes of expert weights that are read, an upstream merger's included. The "
        "merged model's weights replace those that are not read. Null: no limit.",
        accepts="a whole number of bytes >= 1, an amount such as 800MB or 1.5GiB (units B, KB to "
        "TB, KiB to TiB), or a share of a full read up to 100%, such as 50%",
        check=is_read_budget,
    )
    activations: str = setting(
        "auto",
        "Storage of samples' features between blocks, which changes memory alone. `auto`: the "
        "device.",
        choices=("auto", "device", "host"),
    )
    checkpoint_dir: str | None = setting(
        None,
        "Folder that keeps finished blocks, so that an interrupted run can go on. Null: none.",
        accepts="a folder's path",
        check=lambda value: isinstance(value, str | os.PathLike) and bool(os.fspath(value)),
    )
    resume: bool = setting(False, "Go on from the blocks in checkpoint_dir, if there are any.")

    def __post_init__(self) -> None:
        super().__post_init__()
        conversions = {"checkpoint_dir": os.fspath, "modules": tuple}
        conversions |= dict.fromkeys(("ridge_lambda", "mix_alpha", "anchor_rho"), float)
        for name, convert in conversions.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, convert(value))

    def clashes(self) -> Iterator[str]:
        """Yield a phrase for each setting that contradicts another one. `rule_of` checks rules."""
        if self.resume and self.checkpoint_dir is None:
            yield "resume needs checkpoint_dir, the folder that keeps the blocks"

    @property
    def strengths(self) -> dict[str, float]:
        """The strengths of the paper's rule by name. Other rules have none of these."""
        names = ("ridge_lambda", "mix_alpha", "anchor_rho") if self.rule == "paper" else ()
        return {name: getattr(self, name) for name in names}

    @classmethod
    def plus(cls, **changes: Any) -> "FeatCalSettings":
        """Return the settings of FeatCal+ (docs/method.md), with changes by name."""
        return cls(**{"rule": "plus", **changes})

    def replace(self, **changes: Any) -> "FeatCalSettings":
        """Return a checked copy with changes by name."""
        return replace(self, **changes)

    def of_the_model(self) -> "FeatCalSettings":
        """Return a copy with defaults for all settings that do not change the model."""
        defaults = {name: getattr(FeatCalSettings, name) for name in SETTINGS_OF_THE_RUN}
        return self.replace(**defaults)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values by name, fit for JSON and YAML."""
        return {name: _plain(getattr(self, name)) for name in FeatCalSettings.names()}


def with_prefix(message: str, prefix: str) -> str:
    """Return a message that says how settings are set at one door of the package.

    Messages have bare names of settings. A name counts if it has an underscore or is followed by a
    value, as `seed=3`, or "must be", and does not follow a prefix or a key.

    Args:
        message: The message.
        prefix: What stands before a name there, such as `method.` for FusionBench.
    """
    names = "|".join(FeatCalSettings.names())
    return re.sub(
        rf"(?<![\w.@/'-])(?<!--set )(?=\w+(?:_|=| must be ))({names})\b", rf"{prefix}\1", message
    )


def _plain(value: Any) -> Any:
    """Return a setting's value for JSON: families and rules that are objects as their repr."""
    if isinstance(value, Mapping):
        return {str(key): entry for key, entry in value.items()}
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, str | int | float) else repr(value)
