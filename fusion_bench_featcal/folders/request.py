"""One calibration of models in folders: its options, and the checks before anything is loaded."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fusion_bench_featcal.error_block import first_line
from fusion_bench_featcal.files import ReportError, prepare_directory
from fusion_bench_featcal.folders import options
from fusion_bench_featcal.folders.mergekit import with_merge_config
from fusion_bench_featcal.folders.options import option
from fusion_bench_featcal.nearest_names import refuse_unknown_settings, refuse_unusable_names
from fusion_bench_featcal.settings import PLUS, FeatCalSettings

PRESETS: Mapping[str, Mapping[str, Any]] = {"plus": PLUS, "paper": {}}
MERGERS = ("simple_average", "task_arithmetic:SCALE")
MAX_LENGTH = 1024
"""Tokens of a text where `max_length` is not set: texts of any length would take any memory."""
PROMPT = "a photo of a {}."

_RESERVED = ("base", "merged", "_pretrained_")
# Settings that the command sets by options of its own, and those of model pools.
_ELSEWHERE = {
    "calibration_data": "--data",
    "calibration_split": "--data NAME=ID:SPLIT",
    "checkpoint_dir": "--checkpoints",
    "resume": "--resume",
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of one calibration, with the same names on the command line, in recipes and Python.

    Attributes:
        notes: Sentences on what was decided beside the options.
    """

    merged: str | None = option(
        None, "the merged model: a folder or hub id, of which mergekit's mergekit_config.yml names "
        "base and experts; or a recipe.yaml", metavar="MERGED", is_location=True,
    )  # fmt: skip
    merge: str | None = option(
        None, "without MERGED: task_arithmetic:0.3, simple_average", metavar="HOW"
    )
    base: str | None = option(
        None, "the model that the experts were tuned from", metavar="DIR", is_location=True
    )
    expert: Mapping[str, str] = option(
        dict, "an expert: a folder or hub id, whole or a LoRA adapter (repeatable)",
        kind=dict, word=options.pair, metavar="NAME=DIR", is_location=True,
    )  # fmt: skip
    data: Mapping[str, str] = option(
        dict, "an expert's samples: a .jsonl, .csv or .parquet file, a folder of images, a saved "
        "data set FOLDER[:SPLIT] or a hub data set ID:SPLIT (repeatable)",
        kind=dict, word=options.pair, metavar="NAME=PATH", is_location=True,
    )  # fmt: skip
    columns: Mapping[str, Any] = option(
        dict, "columns of --data and --eval with names of their own, such as "
        "prompt=instruction,target=output; with NAME: those of one task (repeatable)",
        kind=dict, word=options.columns, metavar="[NAME:]PART=COLUMN,...",
    )  # fmt: skip
    eval: Mapping[str, str] = option(
        dict, "data to evaluate on (default: a fifth of --data, held back)",
        kind=dict, word=options.pair, metavar="NAME=PATH", is_location=True,
    )  # fmt: skip
    eval_rows: int = option(200, "most rows of a task that are evaluated", kind=int, metavar="N")
    no_eval: bool = option(False, "calibrate and save only", kind=bool)
    out: Path = option(
        None, "a new folder for the model", kind=Path, metavar="DIR", is_recorded=False
    )
    as_lora: int | None = option(
        None, "also save OUT/adapter, a LoRA adapter of that rank over the base", kind=int,
        metavar="RANK",
    )  # fmt: skip
    evaluate: Mapping[str, str] = option(
        dict, "scores beside accuracy and loss, before and after: lm-eval:TASK,..., or "
        "functions of model and tokenizer, MODULE:FUNCTION,... (repeatable)",
        kind=dict, word=options.scorer, metavar="MODULE:NAME,...",
    )  # fmt: skip
    strict: bool = option(
        False, "save nothing, and exit with 1, if a task ends no closer to its expert", kind=bool
    )
    preset: str = option(
        "plus", "settings: FeatCal+ (default) or the paper's", choices=tuple(PRESETS)
    )
    set: Mapping[str, Any] = option(
        dict, "a setting, such as samples_per_task=64 (repeatable; featcal settings)",
        kind=dict, word=options.setting, metavar="SETTING=VALUE",
    )  # fmt: skip
    tokenizer: str | None = option(
        None, "tokenizer or image processor (default: MERGED's)", metavar="DIR", is_location=True
    )
    chat_template: Path | None = option(
        None, "in place of the tokenizer's own", kind=Path, metavar="FILE", is_location=True
    )
    text_tower: str | None = option(
        None, "a whole CLIP, for zero-shot heads", metavar="DIR", is_location=True
    )
    prompt: Mapping[str, str] = option(
        dict, f"prompt of a class for zero-shot heads ({PROMPT}); of one task with its NAME "
        "(repeatable)", kind=dict, word=options.prompt, metavar="[NAME=]TEXT",
    )  # fmt: skip
    device: str = option("cpu", "cpu (default) or cuda")
    any_base: bool = option(
        False, "do not refuse models that lie as far from the base as unrelated ones", kind=bool
    )
    force: bool = option(
        False, "do not refuse experts that are no better than guessing on their own rows", kind=bool
    )
    shard_size: str | None = option(
        None, "largest file of weights, such as 2GB (default: that of transformers)", metavar="SIZE"
    )
    plan: bool = option(
        False, "say what would be fetched and run and what it takes, and do nothing",
        kind=bool, is_recorded=False,
    )  # fmt: skip
    verbose: bool = option(
        False, "also print settings, and the tables of the report", kind=bool, short="v",
        is_recorded=False,
    )  # fmt: skip
    resume: bool = option(False, "go on after an interruption", kind=bool, is_recorded=False)
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, Any], place: str = "featcal calibrate") -> "Request":
        """Make a request of options, and of those of a recipe that `merged` names.

        Args:
            given: Options by name. They come before the recipe's.
            place: Name of what they stand in, for messages.

        Raises:
            ValueError: If an option is missing, unknown or of another type, a name fits nothing,
                or a model that mergekit's config names is not there.
        """
        values = options.checked(given, cls, place)
        recipe = Path(values.get("merged") or "").expanduser()
        if recipe.suffix in (".yaml", ".yml"):
            del values["merged"]
            written = options.checked(options.read_recipe(recipe), cls, str(recipe))
            values = options.with_changes(written, values)
        return cls(**values)._completed()

    @property
    def checkpoints(self) -> Path:
        """The folder for finished blocks."""
        return Path(f"{self.out}.blocks")

    @property
    def models(self) -> dict[str, str]:
        """Folders and hub ids of all models, by the option with its value that names each."""
        named = {"the merged model": self.merged, "--base": self.base}
        named |= {"--tokenizer": self.tokenizer, "--text-tower": self.text_tower}
        models = {f"{name} {place}": place for name, place in named.items() if place is not None}
        return models | {f"--expert {task}={place}": place for task, place in self.expert.items()}

    @property
    def recipe(self) -> str:
        """The text of a recipe that repeats this calibration."""
        return options.recipe_text(self)

    @cached_property
    def settings(self) -> FeatCalSettings:
        """Settings of the calibration: those of the preset, and of `set`.

        Raises:
            ValueError: If a setting is unknown or out of range.
        """
        for name in _ELSEWHERE.keys() & self.set.keys():
            raise ValueError(f"--set {name}: use {_ELSEWHERE[name]}")
        given = {name: _number(value) for name, value in self.set.items()}
        refuse_unknown_settings(given, FeatCalSettings.names(), owner="featcal")
        kept = {"checkpoint_dir": str(self.checkpoints), "resume": self.resume}
        return FeatCalSettings(
            **{"max_length": MAX_LENGTH, **PRESETS[self.preset], **given, **kept}
        )

    @cached_property
    def merger(self) -> tuple[str | None, float]:
        """Name and scale of the merger, where there is no merged model."""
        name, _, scale = (self.merge or "").partition(":")
        if self.merge is None or self.merge == "simple_average":
            return self.merge, 1.0
        try:
            if name == "task_arithmetic":
                return name, float(scale)
        except ValueError:
            pass
        raise ValueError(
            f"--merge takes {' or '.join(MERGERS)}, got {self.merge!r}; other mergers run by "
            "fusion_bench method=featcal method@method.base_method=..., or give the folder of a "
            "merged model"
        )

    def columns_of(self, task: str) -> dict[str, str]:
        """Return a task's columns by what they hold."""
        common = {name: c for name, c in self.columns.items() if not isinstance(c, Mapping)}
        return common | dict(self.columns.get(task) or {})

    def prompt_of(self, task: str) -> str:
        """Return a task's prompt of a class, with {} for its name."""
        return self.prompt.get(task, self.prompt.get("", PROMPT))

    def check_place(self) -> None:
        """Refuse a folder or device that cannot be used.

        Raises:
            ValueError: Naming the option.
        """
        out, blocks = self.out, self.checkpoints
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"--out {out} exists and is not empty: name a new folder")
        try:
            prepare_directory(out.absolute().parent, "--out")
        except ReportError as error:
            raise ValueError(str(error)) from error
        if not self.resume and blocks.is_dir() and any(blocks.iterdir()):
            raise ValueError(
                f"{blocks} has blocks of an interrupted run: go on with --resume, or remove it"
            )
        _check_device(self.device)

    def _completed(self) -> "Request":
        """Return the request with the models that mergekit's config names, and data by expert."""
        if (self.merged is None) == (self.merge is None):
            raise ValueError(
                "give MERGED, the merged model's folder or a recipe.yaml, or --merge HOW"
                if self.merged is None
                else f"{self.merged} is merged already, and --merge merges: leave one of them out"
            )
        if self.out is None:
            raise ValueError("give --out DIR, a new folder for the model")
        notes = list(self.notes)
        merge = "task_arithmetic:0.3" if self.merge == "task_arithmetic" else self.merge
        base, experts, place = self.base, self.expert, "--expert"
        if self.merged is not None:
            base, experts, place = with_merge_config(self.merged, base, experts, notes)
        if not experts:
            raise ValueError("name the experts: --expert NAME=DIR for each")
        refuse_unusable_names(experts, place, _RESERVED)
        by_expert = {
            name: options.by_expert(getattr(self, name), experts, name, notes)
            for name in ("data", "eval", "columns", "prompt")
        }
        complete = dataclasses.replace(
            self, merge=merge, base=base, expert=dict(experts), **by_expert, notes=tuple(notes)
        )
        complete._check()
        return complete

    def _check(self) -> None:
        missing = [task for task in self.expert if task not in self.data]
        if missing:
            raise ValueError(
                f"no data of {', '.join(missing)}: every expert needs samples of its task, "
                f"--data {missing[0]}=FILE"
            )
        if self.chat_template is not None and not self.chat_template.is_file():
            raise ValueError(f"--chat-template {self.chat_template}: there is no such file")
        if self.no_eval and self.evaluate:
            raise ValueError("--no-eval skips --evaluate: leave one of them out")
        if self.as_lora is not None and self.as_lora < 1:
            raise ValueError(f"--as-lora {self.as_lora}: the rank is at least 1")
        if self.strict and self.no_eval and self.settings.held_out == 0:
            raise ValueError("--strict with --no-eval needs held-out samples: --set held_out=auto")
        if self.shard_size and not re.fullmatch(r"\d+(KB|MB|GB|TB)", self.shard_size):
            raise ValueError(f"--shard-size {self.shard_size}: give a size such as 500MB or 2GB")
        for name, value in self.columns.items():
            if not isinstance(value, str | Mapping):
                raise ValueError(
                    f"--columns: {name} is {value!r:.60}, neither a column nor an expert's mapping "
                    "of PART: COLUMN"
                )
        for text in self.prompt.values():
            if "{}" not in text:
                raise ValueError(f"--prompt {text!r} has no {{}} for the class name")
        _ = self.settings, self.merger  # refused early


def _number(value: Any) -> Any:
    """Return a number for a text such as 1e-5, which YAML takes for a word."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


def _check_device(name: str) -> None:
    """Refuse a device that PyTorch does not know or cannot use."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise ValueError(f"--device {name} cannot be used ({reason}): leave it out") from error
