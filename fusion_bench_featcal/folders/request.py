"""Options of one calibration of models in folders: their help, settings and paths.

`read_request` of `read_request.py` completes and checks them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.files import destination
from fusion_bench_featcal.folders import options
from fusion_bench_featcal.folders.merge_config import FILE
from fusion_bench_featcal.folders.options import mapping
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.settings.fields import setting

MAX_LENGTH = 1024
"""Tokens of a text if `max_length` is not set, because memory grows with the longest text."""
PROMPT = "a photo of a {}."
SWUDI = "swudi"
"""Merger without samples for experts that were tuned whole (`models/merging.py`)."""
# Settings that the command sets by --data, --out and --resume
_SET_BY_OPTIONS = ("calibration_data", "calibration_split", "checkpoint_dir", "resume")
_POOL_OPTION = "calibration_corruption"
SETTABLE = [
    name for name in FeatCalSettings.names() if name not in (*_SET_BY_OPTIONS, _POOL_OPTION)
]
"""Settings for `--set`."""


class Merger(NamedTuple):
    """The merging method of the run.

    Attributes:
        name: `task_arithmetic`, `simple_average` or `swudi`.
        scale: Scale of the sum of task vectors of task arithmetic, else None.
    """

    name: str
    scale: float | None


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of one calibration, with equal names on the command line, in recipes and Python.

    Attributes:
        notes: Sentences on automatic decisions.
        by_config: Options with values from mergekit's config.
    """

    merged: str | None = setting(
        None,
        "the merged model, a folder or hub id whose mergekit_config.yml may name base and experts",
        metavar="MERGED",
        is_location=True,
    )
    config: str | None = setting(
        None, "a YAML file of options, such as the recipe.yaml beside a result", metavar="FILE",
        is_recorded=False,
    )  # fmt: skip
    merge: str | None = setting(
        None,
        "merge the experts instead of giving MERGED: swudi, task_arithmetic:0.3 or simple_average",
        metavar="HOW",
    )
    base: str | None = setting(
        None, "the model that the experts were fine-tuned from", metavar="DIR", is_location=True
    )
    expert: Mapping[str, str] = mapping(
        "an expert: folder or hub id of a complete model or an adapter (repeatable)",
        "NAME=DIR", is_location=True,
    )  # fmt: skip
    data: Mapping[str, str] = mapping(
        "an expert's samples: a .jsonl, .csv or .parquet file, a folder of images, a saved "
        "dataset FOLDER[:SPLIT] or a hub dataset ID:SPLIT (repeatable). Without samples, --merge "
        "only merges",
        "NAME=PATH", is_location=True,
    )  # fmt: skip
    columns: Mapping[str, str] = mapping(
        "columns of --data and --eval that have other names than expected, such as "
        "prompt=instruction,target=output. With NAME: for one task only (repeatable)",
        "[NAME:]PART=COLUMN,...", options.columns,
    )  # fmt: skip
    eval: Mapping[str, str] = mapping(
        "test examples of an expert's task (default: a fifth of --data, held out), or of another "
        "task, on which the base, merged and repaired models are compared",
        "NAME=PATH", is_location=True,
    )  # fmt: skip
    eval_rows: int = setting(
        200, "maximum number of test examples per task (default: 200)", ge=1, metavar="N"
    )
    no_eval: bool = setting(False, "only calibrate and save")
    out: str | None = setting(None, "a new folder for the model", metavar="DIR", is_recorded=False)
    strict: bool = setting(
        False, "if a task is worse or there are warnings, save nothing and exit with 1"
    )
    preset: str = setting(
        "plus", "settings: FeatCal+ (default) or the paper's", choices=("plus", "paper")
    )
    set: Mapping[str, Any] = mapping(
        "a setting, as in --set samples_per_task=64 (repeatable, see featcal settings)",
        "SETTING=VALUE", options.setting_word, texts=False, last_counts=True,
    )  # fmt: skip
    tokenizer: str | None = setting(
        None, "tokenizer or image processor (default: MERGED's)", metavar="DIR", is_location=True
    )
    chat_template: str | None = setting(
        None, "chat template to use instead of the tokenizer's", metavar="FILE", is_location=True
    )
    text_tower: str | None = setting(
        None, "a complete CLIP model, for zero-shot heads", metavar="DIR", is_location=True
    )
    prompt: Mapping[str, str] = mapping(
        f"prompt for class names (CLIP: {PROMPT}). Encoders are scored by class names only if it "
        "is set. With NAME= for one task only (repeatable)",
        "[NAME=]TEXT", options.prompt,
    )  # fmt: skip
    device: str = setting("cpu", "cpu (default) or cuda")
    push: str | None = setting(
        None,
        "upload the saved model to this repository on the hub. A new repository is private",
        accepts="OWNER/NAME, a model on the hub", check=lambda name: str(name).count("/") == 1,
        metavar="OWNER/NAME", is_recorded=False,
    )  # fmt: skip
    plan: bool = setting(
        False, "only show reads, files and downloads, without a run", is_recorded=False
    )
    resume: bool = setting(False, "continue an interrupted run", is_recorded=False)
    notes: tuple[str, ...] = ()
    by_config: tuple[str, ...] = ()

    @cached_property
    def folder(self) -> Path:
        """The folder for the model."""
        return destination(self.out or "")

    @cached_property
    def blocks_folder(self) -> Path:
        """The folder for finished blocks."""
        return destination(f"{self.folder}.blocks")

    @property
    def has_blocks(self) -> bool:
        """Return whether blocks of an interrupted run, or foreign files, are in their folder."""
        names = {path.name for path in self.blocks_folder.glob("*")} - {options.INPUTS_FILE}
        return not all(name.startswith(".") for name in names)  # a lock, or unfinished files

    @property
    def calibrates(self) -> bool:
        """Return whether the merged model is calibrated. Without samples it is only merged."""
        return bool(self.data)

    @property
    def tasks(self) -> list[str]:
        """Tasks with data: samples or, if the model is only merged, test examples."""
        tests = {} if self.no_eval else self.eval
        return [task for task in self.expert if task in self.data or task in tests]

    @property
    def further(self) -> list[str]:
        """Tasks with test examples that have no expert, and therefore no samples."""
        is_scored = self.calibrates and not self.no_eval
        return [task for task in self.eval if task not in self.expert] if is_scored else []

    @property
    def model_options(self) -> dict[str, str]:
        """Option (`MERGED`, `--base`, `--expert TASK`) -> folder or hub id, of models that run."""
        experts = {f"--expert {task}": location for task, location in self.expert.items()}
        by_option = {"MERGED": self.merged, **experts, "--base": self.base}
        return {option: location for option, location in by_option.items() if location is not None}

    @property
    def data_options(self) -> dict[str, str]:
        """Option (`--data TASK`, `--eval TASK`) -> location of data."""
        flags = {"--data": self.data, "--eval": self.eval}
        return {f"{flag} {task}": location
                for flag, data in flags.items() for task, location in data.items()}  # fmt: skip

    @property
    def models(self) -> dict[str, str]:
        """Option with its value, and the file that names it -> folder or hub id, for all models."""
        instead = {"base": "--base DIR", "expert": "--expert NAME=DIR for every expert"}
        origins = {
            f"--{name}": f" (named by {self.merged}/{FILE}, which {instead[name]} overrides)"
            for name in self.by_config
        }
        locations = {
            f"{option_label(option, location)}{origins.get(option.split()[0], '')}": location
            for option, location in self.model_options.items()
        }
        tower = self.text_tower
        return locations | ({} if tower is None else {option_label("--text-tower", tower): tower})

    @property
    def processors(self) -> dict[str, str]:
        """`--tokenizer` with its value -> folder or hub id. Empty without this option."""
        location = self.tokenizer
        return {} if location is None else {option_label("--tokenizer", location): location}

    @property
    def recipe(self) -> str:
        """The text of a recipe in `folder` that repeats this calibration."""
        return options.recipe_text(self, self.folder)

    def make_settings(self) -> FeatCalSettings:
        """Return the settings of the calibration, which are the preset with changes by `set`.

        Raises:
            ValueError: If a setting is unknown, or its value is not accepted.
        """
        refuse_unknown(self.set, SETTABLE, "--set ")
        run = {"checkpoint_dir": str(self.blocks_folder), "resume": self.resume}
        return FeatCalSettings(**{"max_length": MAX_LENGTH, "rule": self.preset, **self.set, **run})

    settings = cached_property(make_settings)

    @cached_property
    def merger(self) -> Merger | None:
        """The merger that `merge` names, or None if there is a merged model.

        Raises:
            ValueError: If the name or the scale is not accepted.
        """
        name, _, scale = (self.merge or "").partition(":")
        if self.merge is None:
            return None
        if self.merge in ("simple_average", SWUDI):
            return Merger(name, None)
        if name == "task_arithmetic" and re.fullmatch(r"\d*\.?\d+", scale) and float(scale):
            return Merger(name, float(scale))
        raise ValueError(
            "--merge takes swudi, simple_average or task_arithmetic:SCALE with a scale above 0, "
            f"got {self.merge!r}. For other merging methods, give the folder of a merged model, or "
            "run fusion_bench method=featcal method@method.base_method=..."
        )

    def columns_of(self, task: str) -> dict[str, str]:
        """Return a task's columns by their standard names. NAME:PART has priority over PART."""
        common = {part: column for part, column in self.columns.items() if ":" not in part}
        own = [key for key in self.columns if key.startswith(f"{task}:")]
        return common | {key.removeprefix(f"{task}:"): self.columns[key] for key in own}

    def prompt_of(self, task: str, default: str = PROMPT) -> str:
        """Return a task's prompt for a class, with {} in place of the class name."""
        return self.prompt.get(task, self.prompt.get("*", default))


def option_label(option: str, location: str) -> str:
    """Return an option with its value, for messages."""
    sign = "=" if " " in option else " "
    return f"{'the merged model' if option == 'MERGED' else option}{sign}{location}"
