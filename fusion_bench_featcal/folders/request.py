"""One calibration of models in folders: its options, and the checks before anything is loaded."""

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.errors.words import using_vocabulary
from fusion_bench_featcal.files import check_target, destination, is_missing
from fusion_bench_featcal.files.names import refuse_unusable_names
from fusion_bench_featcal.files.untrusted import read_yaml
from fusion_bench_featcal.folders import options
from fusion_bench_featcal.folders.merge_config import FILE
from fusion_bench_featcal.folders.mergekit import task_weights, with_merge_config
from fusion_bench_featcal.folders.options import mapping
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.settings.fields import check_values, setting

MAX_LENGTH = 1024
"""Tokens of a text if `max_length` is not set, because memory grows with the longest text."""
PROMPT = "a photo of a {}."
_RESERVED = ("base", "merged", "_pretrained_")
# Settings that the command sets by --data, --out and --resume
_SET_BY_OPTIONS = ("calibration_data", "calibration_split", "checkpoint_dir", "resume")
_POOL_OPTION = "calibration_corruption"
SETTABLE = [
    name for name in FeatCalSettings.names() if name not in (*_SET_BY_OPTIONS, _POOL_OPTION)
]
"""Settings for `--set`."""


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
        None, "without MERGED: task_arithmetic:0.3, simple_average", metavar="HOW"
    )
    base: str | None = setting(
        None, "the model that the experts were tuned from", metavar="DIR", is_location=True
    )
    expert: Mapping[str, str] = mapping(
        "an expert: a folder or hub id, whole or an adapter (repeatable)",
        "NAME=DIR", is_location=True,
    )  # fmt: skip
    data: Mapping[str, str] = mapping(
        "an expert's samples: a .jsonl, .csv or .parquet file, a folder of images, a saved "
        "dataset FOLDER[:SPLIT] or a hub dataset ID:SPLIT (repeatable)",
        "NAME=PATH", is_location=True,
    )  # fmt: skip
    columns: Mapping[str, str] = mapping(
        "other names of columns of --data and --eval, such as prompt=instruction,target=output. "
        "NAME: for one task only (repeatable)",
        "[NAME:]PART=COLUMN,...", options.columns,
    )  # fmt: skip
    eval: Mapping[str, str] = mapping(
        "data to evaluate on (default: a fifth of --data, held back)",
        "NAME=PATH", is_location=True,
    )  # fmt: skip
    eval_rows: int = setting(
        200, "maximum rows per task to evaluate (default: 200)", ge=1, metavar="N"
    )
    no_eval: bool = setting(False, "calibrate and save only")
    out: str | None = setting(None, "a new folder for the model", metavar="DIR", is_recorded=False)
    strict: bool = setting(
        False, "save nothing, and exit with 1, if a task is worse or the verdict is in doubt"
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
        None, "a whole CLIP, for zero-shot heads", metavar="DIR", is_location=True
    )
    prompt: Mapping[str, str] = mapping(
        f"text of a class name (CLIP: {PROMPT}). Encoders are scored by class names only if it is "
        "set. NAME= for one task (repeatable)",
        "[NAME=]TEXT", options.prompt,
    )  # fmt: skip
    device: str = setting("cpu", "cpu (default) or cuda")
    plan: bool = setting(False, "show reads, files and downloads, and stop", is_recorded=False)
    resume: bool = setting(False, "resume after an interruption", is_recorded=False)
    notes: tuple[str, ...] = ()
    by_config: tuple[str, ...] = ()

    @classmethod
    @using_vocabulary(options.WORDS)
    def of(cls, values: Mapping[str, object], source: str = "featcal calibrate") -> "Request":
        """Build a request from options, and from a recipe if `config` names one.

        Args:
            values: Options by name. They have priority over the recipe.
            source: Name of the caller, for messages.
        """
        chosen = _checked(values, f"{source}: ")
        if file := chosen.pop("config", None):
            path = Path(file).expanduser()
            content = read_yaml(path)
            if not isinstance(content, Mapping) or "config" in content:
                raise ValueError(f"--config {path} is no recipe: it needs lines of `option: value`")
            recipe = _checked(content, f"{file}: ")
            recipe = options.with_full_paths(recipe, cls, path.parent)
            chosen = recipe | {
                name: recipe.get(name, {}) | value if isinstance(value, dict) else value
                for name, value in chosen.items()
            }
        request = cls(**chosen)._completed()
        request._check()
        _ = request.settings  # raises
        return request

    @cached_property
    def folder(self) -> Path:
        """The folder for the model."""
        return destination(self.out or "")

    @cached_property
    def checkpoints(self) -> Path:
        """The folder for finished blocks."""
        return destination(f"{self.folder}.blocks")

    @property
    def has_blocks(self) -> bool:
        """Return whether blocks of an interrupted run, or foreign files, are in their folder."""
        names = {path.name for path in self.checkpoints.glob("*")} - {options.INPUTS_FILE}
        return not all(name.startswith(".") for name in names)  # a lock, or unfinished files

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
            f"{labelled(option, location)}{origins.get(option.split()[0], '')}": location
            for option, location in self.model_options.items()
        }
        tower = self.text_tower
        return locations if tower is None else locations | {labelled("--text-tower", tower): tower}

    @property
    def recipe(self) -> str:
        """The text of a recipe in `folder` that repeats this calibration."""
        return options.recipe_text(self, self.folder)

    @cached_property
    def settings(self) -> FeatCalSettings:
        """Settings of the calibration, which are the preset with changes by `set`."""
        refuse_unknown(self.set, SETTABLE, "--set ")
        run = {"checkpoint_dir": str(self.checkpoints), "resume": self.resume}
        return FeatCalSettings(**{"max_length": MAX_LENGTH, "rule": self.preset, **self.set, **run})

    @cached_property
    def merger(self) -> tuple[str | None, float]:
        """Name and scale of the merger, if there is no merged model."""
        name, _, scale = (self.merge or "").partition(":")
        if self.merge is None or self.merge == "simple_average":
            return self.merge, 1.0
        if name == "task_arithmetic" and re.fullmatch(r"\d*\.?\d+", scale) and float(scale):
            return name, float(scale)
        raise ValueError(
            "--merge takes simple_average or task_arithmetic:SCALE with a scale above 0, got "
            f"{self.merge!r}; other mergers run by fusion_bench method=featcal "
            "method@method.base_method=..., or give the folder of a merged model"
        )

    def columns_of(self, task: str) -> dict[str, str]:
        """Return a task's columns by their standard names. NAME:PART has priority over PART."""
        common = {part: column for part, column in self.columns.items() if ":" not in part}
        prefix = f"{task}:"
        return common | {
            key.removeprefix(prefix): column
            for key, column in self.columns.items()
            if key.startswith(prefix)
        }

    def prompt_of(self, task: str, default: str = PROMPT) -> str:
        """Return a task's prompt for a class, with {} in place of the class name."""
        return self.prompt.get(task, self.prompt.get("*", default))

    def check_folder(self) -> None:
        """Refuse a folder for the model that cannot be used. A plan needs none."""
        if self.out is None:
            return
        check_target(self.folder, "--out")
        for label, location in self.models.items():
            model = Path(location).expanduser()
            if model.is_dir() and model.resolve() in self.folder.resolve().parents:
                raise ValueError(f"--out {self.out} is inside {label}: name a folder outside it")
        if not self.resume and self.has_blocks:
            raise ValueError(
                f"{self.checkpoints} has blocks of an interrupted run: go on with --resume, or "
                "remove it"
            )

    def _completed(self) -> "Request":
        """Return the request with models from mergekit's config, and data by expert."""
        if (self.merged is None) == (self.merge is None):
            raise ValueError(
                "give MERGED, the merged model's folder, or --merge HOW"
                if self.merged is None
                else f"{self.merged} is merged already, and --merge merges: leave one of them out"
            )
        if self.out is None and not self.plan:
            raise ValueError("give --out DIR, a new folder for the model")
        _, scale = self.merger
        effect = f"goes {scale:g} times as far as each expert"
        notes = [f"--merge {self.merge} {effect}: usual scales are 0.1 to 1"] if scale > 1 else []
        base, experts, origin = self.base, self.expert, "--expert"
        if self.merged is not None:
            base, experts, origin = with_merge_config(self.merged, base, experts, notes)
        if not experts:
            raise ValueError("name the experts: --expert NAME=DIR for each")
        refuse_unusable_names(experts, origin, _RESERVED)
        changed = {"base": base, "expert": dict(experts)}
        by_config = tuple(name for name in changed if changed[name] != getattr(self, name))
        rule = self.set.get("rule", self.preset)  # the paper's rule stays near the merge
        keeps_merge = self.merged is None or rule != "plus" or "task_weights" in self.set
        weights = {} if keeps_merge else task_weights(str(self.merged), experts, notes)
        changed |= {"set": {**self.set, "task_weights": weights}} if weights else {}
        return dataclasses.replace(self, **changed, notes=tuple(notes), by_config=by_config)

    def _check(self) -> None:
        names_of_tasks = {
            "data": self.data,
            "eval": self.eval,
            "prompt": (name for name in self.prompt if name != "*"),
            "columns": (key.rpartition(":")[0] for key in self.columns if ":" in key),
        }
        for option, names in names_of_tasks.items():
            refuse_unknown(names, self.expert, f"--{option}: expert ")
        missing = [task for task in self.expert if task not in self.data]
        if missing:
            raise ValueError(
                f"no data of {', '.join(missing)}: every expert needs samples of its task, "
                f"--data {missing[0]}=FILE"
            )
        paths = self.data_options | ({"--tokenizer": self.tokenizer} if self.tokenizer else {})
        locations = self.models | {labelled(option, path): path for option, path in paths.items()}
        if (file := self.chat_template) is not None and not Path(file).expanduser().is_file():
            raise ValueError(f"--chat-template {file}: there is no such file here")
        for option, path in locations.items():  # before torch is imported: that takes seconds
            if is_missing(path) and ":" not in path:  # a folder may name its split
                raise ValueError(f"{option}: there is no such file or folder here")
        if self.strict and self.no_eval:
            raise ValueError("--strict compares scores, which --no-eval skips: leave one out")
        if self.merge and "expert_read_budget" in self.set:
            raise ValueError("--merge reads all of each expert: leave --set expert_read_budget out")
        for text in self.prompt.values():
            if "{}" not in text:
                raise ValueError(f"--prompt {text!r} has no {{}} for the class name")


def labelled(option: str, location: str) -> str:
    """Return an option with its value, for messages."""
    sign = "=" if " " in option else " "
    return f"{'the merged model' if option == 'MERGED' else option}{sign}{location}"


def _checked(values: Mapping[str, object], prefix: str) -> dict[str, Any]:
    """Return options that are not None, with paths as texts. Refuse unknown names and values."""
    options = {name: _path_as_text(value) for name, value in values.items() if value is not None}
    check_values(Request, options, prefix)
    return options


def _path_as_text(value: object) -> Any:
    if isinstance(value, Mapping):
        return {name: _path_as_text(entry) for name, entry in value.items()}
    return os.fspath(value) if isinstance(value, os.PathLike) else value
