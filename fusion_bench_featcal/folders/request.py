"""Arguments of `featcal calibrate`, checked before anything is loaded."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion_bench_featcal.error_block import first_line
from fusion_bench_featcal.files import ReportError, prepare_directory
from fusion_bench_featcal.folders.mergekit import FILE, UnreadableRecipe, read_recipe
from fusion_bench_featcal.nearest_names import (
    nearest_hint,
    refuse_unknown_settings,
    refuse_unusable_names,
)
from fusion_bench_featcal.settings import PLUS, FeatCalSettings
from fusion_bench_featcal.untrusted import parse_yaml

PRESETS: Mapping[str, Mapping[str, Any]] = {"plus": PLUS, "paper": {}}
MERGERS = ("simple_average", "task_arithmetic:SCALE")
MAX_LENGTH = 1024
"""Tokens of a text where `max_length` is not set: texts of any length would take any memory."""

_RESERVED = ("base", "merged", "_pretrained_")
# Settings that the command sets by options of its own, and those of model pools.
_ELSEWHERE = {
    "calibration_data": "--data",
    "calibration_split": "--data NAME=ID:SPLIT",
    "checkpoint_dir": "--checkpoints",
    "resume": "--resume",
}


@dataclass(frozen=True)
class Request:
    """One calibration of models in folders.

    Attributes:
        merged: Folder or hub id of the merged model; None: it is merged on the way.
        merge: `simple_average` or `task_arithmetic`, where there is no merged model.
        scale: Scaling factor of task arithmetic.
        base: Folder or hub id of the base model; None needs `anchor_rho` 1.
        experts: Task -> folder or hub id of its expert.
        data: Task -> calibration data: a file, a folder or a hub id.
        tests: Task -> data to evaluate on; tasks without hold back a part of `data`.
        test_rows: Most rows of a task that are evaluated.
        out: Folder for the calibrated model.
        settings: Settings of the calibration.
        device: Device on which to calibrate and evaluate.
        checkpoints: Folder for finished blocks.
        tokenizer: Folder or hub id of tokenizer or processor; None: the merged model's or base's.
        chat_template: File with a chat template in place of the tokenizer's.
        text_tower: Folder or hub id of a whole CLIP for zero-shot heads; None: merged or base.
        prompts: Task -> prompt of a class for zero-shot heads, with {} for its name.
        evaluate: Whether models are evaluated.
        any_base: Whether models may lie as far from the base as unrelated ones.
        force: Whether experts may be no better than guessing, or worse than the base.
        notes: Sentences on what the command decided by itself.
    """

    merged: str | None
    merge: str | None
    scale: float
    base: str | None
    experts: Mapping[str, str]
    data: Mapping[str, str]
    tests: Mapping[str, str]
    test_rows: int
    out: Path
    settings: FeatCalSettings
    device: str
    checkpoints: Path
    tokenizer: str | None
    chat_template: Path | None
    text_tower: str | None
    prompts: Mapping[str, str]
    evaluate: bool
    any_base: bool = False
    force: bool = False
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: Any) -> "Request":
        """Check the command's options.

        Args:
            options: The parsed command line of `featcal calibrate`.

        Raises:
            ValueError: If something is missing, unknown or does not fit together.
            ReportError: If the folder for the model cannot be written.
        """
        notes: list[str] = []
        base, experts = options.base, _pairs(options.expert, "--expert")
        if options.merged is None and options.merge is None:
            raise ValueError("give the merged model's folder, or --merge task_arithmetic:0.3")
        if options.merged is not None and options.merge is not None:
            raise ValueError(f"{options.merged} is merged already: leave out it or --merge")
        if options.merged is not None:
            _check_merged(options.merged, experts)
            base, experts = _with_recipe(options.merged, base, experts, notes)
        if not experts:
            raise ValueError(
                "name the experts: --expert NAME=DIR for each (or a merged model's folder with "
                f"mergekit's {FILE})"
            )
        place = "--expert" if options.expert else f"{options.merged}/{FILE}"
        refuse_unusable_names(experts, place, _RESERVED)
        data = _matched(_pairs(options.data, "--data"), experts, "--data", notes)
        missing = [task for task in experts if task not in data]
        if missing:
            raise ValueError(
                f"no data of {', '.join(missing)}: every expert needs samples of its task, "
                f"--data {missing[0]}=FILE"
            )
        merge, scale = _merger(options.merge)
        out = _free(Path(options.out).expanduser())
        checkpoints = Path(f"{out}.blocks")
        if not options.resume and checkpoints.is_dir() and any(checkpoints.iterdir()):
            raise ValueError(
                f"{checkpoints} has blocks of an interrupted run: go on with --resume, or remove it"
            )
        return cls(
            merged=options.merged,
            merge=merge,
            scale=scale,
            base=base,
            experts=experts,
            data=data,
            tests=_matched(_pairs(options.eval, "--eval"), experts, "--eval", notes),
            test_rows=options.eval_rows,
            out=out,
            settings=_settings(options, checkpoints),
            device=_device(options.device),
            checkpoints=checkpoints,
            tokenizer=options.tokenizer,
            chat_template=_file(options.chat_template, "--chat-template"),
            text_tower=options.text_tower,
            prompts=_prompts(options.prompt, experts),
            evaluate=not options.no_eval,
            any_base=options.any_base,
            force=options.force,
            notes=tuple(notes),
        )


def _pairs(words: Iterable[str] | None, option: str) -> dict[str, str]:
    """Read `NAME=VALUE` words.

    Raises:
        ValueError: If one has no name or no value, or a name stands there twice.
    """
    pairs: dict[str, str] = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise ValueError(f"{option} takes NAME=VALUE, such as {option} math=DIR, got {word!r}")
        if name in pairs:
            raise ValueError(f"{option} {name}=... stands there twice")
        pairs[name] = value
    return pairs


def _check_merged(merged: str, experts: Mapping[str, str]) -> None:
    """Refuse a merged model that can be neither a folder nor, with its experts, on the hub."""
    place = Path(merged).expanduser()
    if not place.is_dir() and (place.exists() or not experts):
        raise ValueError(
            f"MERGED {merged}: there is no such folder here. Correct it, or for a model on the hub "
            "name --base ID and --expert NAME=ID for each expert"
        )


def _with_recipe(
    merged: str, base: str | None, experts: dict[str, str], notes: list[str]
) -> tuple[str | None, dict[str, str]]:
    """Complete base and experts by the merged model's mergekit config.

    Raises:
        ValueError: If a given base or expert is not one that the model was merged from.
    """
    try:
        recipe = read_recipe(Path(merged).expanduser())
    except UnreadableRecipe as error:
        if not experts:
            raise
        notes.append(f"not read: {first_line(error)}")
        return base, experts
    if recipe is None:
        return base, experts
    if base is not None and recipe.base is not None and not _same_place(base, recipe.base):
        raise ValueError(
            f"--base {base} is not the base that {merged} was merged on: its {FILE} names "
            f"{recipe.base}"
        )
    if base is None and recipe.base is not None:
        base = recipe.base
        notes.append(f"base, by {FILE}: {base}")
    if not experts:
        experts = dict(recipe.experts)
        _check_places(merged, [recipe.base or "", *experts.values()])
        listed = ", ".join(f"{name}={location}" for name, location in experts.items())
        notes.append(f"experts, by {FILE} ({recipe.method}): {listed}")
    else:
        notes += _check_experts(merged, experts, recipe.experts)
    return base, experts


def _check_places(merged: str, locations: Iterable[str]) -> None:
    """Refuse folders of a mergekit config that are not there (any more)."""
    for location in locations:
        is_path = location.startswith((".", "/", "~")) or location.count("/") > 1
        if is_path and not Path(location).expanduser().is_dir():
            raise ValueError(
                f"{FILE} in {merged} names {location}, where there is no folder (now): name the "
                "models by --base DIR and --expert NAME=DIR"
            )


def _check_experts(
    merged: str, experts: Mapping[str, str], known: Mapping[str, str]
) -> Iterable[str]:
    for name, location in experts.items():
        if not any(_same_place(location, other) for other in known.values()):
            raise ValueError(
                f"--expert {name}={location} is no model that {merged} was merged from: its {FILE} "
                f"names {', '.join(known.values())}"
            )
    left = [v for v in known.values() if not any(_same_place(v, e) for e in experts.values())]
    if left:
        yield f"merged from {', '.join(left)} as well, for which no --expert stands"


def _same_place(one: str, other: str) -> bool:
    """Return whether two locations are one folder, or one hub id."""
    first, second = Path(one).expanduser(), Path(other).expanduser()
    if first.exists() and second.exists():
        return first.resolve() == second.resolve()
    # one of them may be where the other was downloaded to
    return one == other or first.exists() != second.exists()


def _matched(
    given: Mapping[str, str], experts: Mapping[str, str], option: str, notes: list[str]
) -> dict[str, str]:
    """Return data by expert; a name may be a part of one expert's name.

    Raises:
        ValueError: If a name fits no expert, or several.
    """
    matched: dict[str, str] = {}
    for name, value in given.items():
        fitting = [e for e in experts if e == name] or [e for e in experts if name in e]
        if len(fitting) != 1:
            raise ValueError(
                f"{option} {name}=...: {'several experts fit' if fitting else 'there is no such'}"
                f"{'' if fitting else ' expert'}{nearest_hint(name, experts)}; the experts are "
                f"{', '.join(experts)}"
            )
        if fitting[0] != name:
            notes.append(f"{option} {name} is of {fitting[0]}")
        if fitting[0] in matched:
            raise ValueError(f"{option}: {fitting[0]} has data twice")
        matched[fitting[0]] = value
    return matched


def _merger(text: str | None) -> tuple[str | None, float]:
    """Read `task_arithmetic:0.3` or `simple_average`."""
    if text is None:
        return None, 1.0
    name, _, scale = text.partition(":")
    if name == "simple_average" and not scale:
        return name, 1.0
    if name == "task_arithmetic":
        try:
            return name, float(scale or 0.3)
        except ValueError:
            pass
    raise ValueError(
        f"--merge takes {' or '.join(MERGERS)}, got {text!r}; other mergers run by fusion_bench "
        "method=featcal method@method.base_method=..., or give the folder of a merged model"
    )


def _settings(options: Any, checkpoints: Path) -> FeatCalSettings:
    """Return the settings of the preset and of `--set`.

    Raises:
        ValueError: If a setting is unknown or out of range.
    """
    values: dict[str, Any] = dict(PRESETS[options.preset])
    values["max_length"] = MAX_LENGTH
    given = {}
    for word in options.set or ():  # a later one counts
        ((name, text),) = _pairs([word], "--set").items()
        if name in _ELSEWHERE:
            raise ValueError(f"--set {name}: use {_ELSEWHERE[name]}")
        try:
            value = parse_yaml(text)
        except ValueError as error:
            raise ValueError(f"--set {name}={text} is no YAML: {error}") from error
        given[name] = _number(value)
    refuse_unknown_settings(given, FeatCalSettings.names(), owner="featcal")
    kept = {"checkpoint_dir": str(checkpoints), "resume": options.resume}
    return FeatCalSettings(**(values | given | kept))


def _number(value: Any) -> Any:
    """Return a number for a text such as 1e-5, which YAML takes for a word."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


def _free(out: Path) -> Path:
    """Refuse a folder with files in it, or one that cannot be made."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} exists and is not empty: name a new folder")
    try:
        prepare_directory(out.absolute().parent, "--out")
    except ReportError as error:
        raise ValueError(str(error)) from error
    return out


def _device(name: str) -> str:
    """Refuse a device that PyTorch does not know or cannot use."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise ValueError(f"--device {name} cannot be used ({reason}): leave it out") from error
    return name


def _file(path: str | None, option: str) -> Path | None:
    if path is None:
        return None
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{option} {path}: there is no such file")
    return file


def _prompts(words: Iterable[str] | None, experts: Iterable[str]) -> dict[str, str]:
    """Read prompts of single tasks, `NAME=TEXT`, and one of all others."""
    prompts = dict.fromkeys(experts, "a photo of a {}.")
    single: dict[str, str] = {}
    for word in words or ():
        name, _, text = word.partition("=")
        own = text if name in prompts else word
        if "{}" not in own:
            raise ValueError(f"--prompt {own!r} has no {{}} for the class name")
        if name in prompts:
            single[name] = own
        else:
            prompts = dict.fromkeys(prompts, own)
    return prompts | single


def in_words_of_the_command(error: Exception | str) -> str:
    """Return a message with the command's options in place of settings in YAML."""
    text = str(error)
    for pattern, option in _OPTIONS:
        text = re.sub(pattern, option, text)
    return text


_OPTIONS = (
    (r"or set modelpool\.tokenizer", "or name a template by --chat-template FILE"),
    (r"modelpool\.models\._pretrained_", "--base"),
    (r"modelpool\.models\.([\w.-]*\w)", r"--expert \1"),
    (r"modelpool\.models\b", "--base and --expert"),
    (r"modelpool\.\w+_datasets\.([\w.-]*\w)", r"--data \1"),
    (r"modelpool\.(tokenizer|processor)", "--tokenizer"),
    (r"method\.resume=true", "--resume"),
    (r"method\.checkpoint_dir", "--out"),
    (r"(?<!@)\bmethod\.base_method", "--merge"),
    (r"method=featcal/plus", "--preset plus"),
    (r"\bset method\.(\w+)", r"give --set \1"),
    (r"(?<!@)\bmethod\.(\w+)=", r"--set \1="),
    (r"(?<!@)\bmethod\.(\w+)", r"--set \1"),
)
