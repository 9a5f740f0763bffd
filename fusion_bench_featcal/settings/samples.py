"""Settings of the samples that a pool's data give: their number, split, corruption and texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusion_bench_featcal.settings.fields import Settings, is_integer, setting
from fusion_bench_featcal.settings.options import Draw

CORRUPTIONS = ("gaussian_noise", "motion_blur", "fog")
SEVERITIES = (1, 2, 3, 4, 5)


def _is_corruption(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and set(value) == {"kind", "severity"}
        and value["kind"] in CORRUPTIONS
        and is_integer(value["severity"], 1)
        and value["severity"] in SEVERITIES
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolDraw(Draw):
    """The number and source of the samples that are drawn for each task from a pool's data."""

    samples_per_task: int = setting(
        256,
        "Number of unlabeled samples per task. A task with fewer samples uses all of them.",
        ge=1,
    )
    calibration_split: str = setting(
        "train",
        "Split of the data that samples are taken from.",
        choices=("train", "val", "test"),
    )
    calibration_corruption: Mapping[str, Any] | None = setting(
        None,
        "Corruption of image samples, {kind: fog, severity: 3}: gaussian_noise, motion_blur or fog "
        "of severity 1 to 5, as in ImageNet-C.",
        accepts="{kind: ..., severity: ...}",
        check=_is_corruption,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Texts(Settings):
    """Targets and length of texts."""

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
