"""Options of a calibration besides models, samples and a rule: keywords of `calibrate`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypedDict

from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.files.budgets import is_read_budget
from fusion_bench_featcal.settings.fields import Settings, is_text_list, setting, settings_of

SETTINGS_OF_THE_RUN = ("activations", "checkpoint_dir", "resume")
"""Options for storage and resuming, which do not change the calibrated model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Draw(Settings):
    """The samples of each task."""

    samples_per_task: int | None = setting(
        None, "Number of samples that are used per task. Null: all.", ge=1
    )
    seed: int = setting(
        42, "Random seed. The random numbers of a task also depend on its name.", ge=0
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks(Settings):
    """The parts of a model that are changed."""

    modules: Sequence[str] | None = setting(
        None,
        "Patterns of the modules to calibrate: a name or its end, `*` for anything, `!` in front "
        "to exclude. Null: every linear module and convolution of the blocks, and norms if the "
        "rule calibrates them.",
        accepts="a non-empty list of patterns",
        check=lambda value: is_text_list(value) and len(value) > 0,
        convert=tuple,
    )
    family: Any = setting(
        "auto",
        "How the model is divided into blocks: auto, clip, encoder_decoder, llama, open_clip, "
        "stack, stages, t5, whisper, a list of the blocks' names, or a family of your own, "
        "{_target_: my_module.MyFamily}.",
        accepts="a family's name, a list of blocks, a mapping with its `name` or `_target_`, or a "
        "Family",
        check=lambda value: value is not None and value != "",
    )


@dataclass(frozen=True, kw_only=True)
class Options(Draw, Blocks):
    """Options of one calibration, of any rule.

    For a setting with `by_rule`, null stands for the rule's attribute of the same name.

    Raises:
        ValueError: If a value is not accepted, or two options contradict each other.
    """

    augment: str | None = setting(
        None,
        "Augmented samples: randomly jittered images that are used in addition to the samples. "
        "`none`, `auto` (if the samples are images) or `jitter` (samples without images are an "
        "error). Null: the rule's default.",
        choices=("none", "auto", "jitter"),
        by_rule=True,
    )
    decoder_rows: str | None = setting(
        None,
        "Decoder positions that count. `all`: all but padding. `targets`: only positions that "
        "predict a target token. `auto`: all, but if there are labels, only `targets` in the last "
        "block, and at least half of the weight for `targets` in earlier blocks. Null: the rule's "
        "default.",
        choices=("all", "targets", "auto"),
        by_rule=True,
    )
    expert_read_budget: float | str | None = setting(
        None,
        "Limit on the bytes of expert weights that are read, including what the merging method "
        "reads. Weights that are not read are replaced by the merged model's. Null: no limit.",
        accepts="a whole number of bytes >= 1, an amount such as 800MB or 1.5GiB (units B, KB to "
        "TB, KiB to TiB), or a share of a full read up to 100%, such as 50%",
        check=is_read_budget,
    )
    activations: str = setting(
        "device",
        "Where the samples' features are stored between blocks. It changes only memory.",
        choices=("device", "host"),
    )
    checkpoint_dir: str | None = setting(
        None,
        "Folder that keeps finished blocks, so that an interrupted run can continue. Null: none.",
        accepts="a folder's path",
        check=lambda value: isinstance(value, str | os.PathLike) and bool(os.fspath(value)),
        convert=os.fspath,
    )
    resume: bool = setting(False, "Continue after finished blocks, if there are any.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume and self.checkpoint_dir is None:
            folder = option("checkpoint_dir")
            raise ValueError(f"{option('resume')} needs {folder}, the folder that keeps the blocks")

    def with_rule(self, rule: object, **changes: Any) -> Self:
        """Return the options with changes by name, and the rule's values in place of null."""
        unset = [name for name in self.names_by_rule() if getattr(self, name) is None]
        changes |= {name: getattr(rule, name) for name in unset}
        return replace(self, **changes) if changes else self

    @classmethod
    def names_by_rule(cls) -> tuple[str, ...]:
        """Return the names of the settings whose null stands for the rule's value."""
        return tuple(field.name for field in settings_of(cls) if field.metadata.get("by_rule"))

    def model_options(self) -> dict[str, object]:
        """Return by name the options that change the calibrated model, except for the family."""
        others = (*SETTINGS_OF_THE_RUN, "family")
        return {name: getattr(self, name) for name in Options.names() if name not in others}


class OptionKeywords(TypedDict, total=False):
    """The options as typed keywords of `calibrate`, except for its parameter `family`."""

    samples_per_task: int | None
    seed: int
    augment: str | None
    modules: Sequence[str] | None
    decoder_rows: str | None
    expert_read_budget: float | str | None
    activations: str
    checkpoint_dir: str | None
    resume: bool
