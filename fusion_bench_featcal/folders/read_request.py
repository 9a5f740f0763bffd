"""Reading one request: options and a recipe, models named by mergekit's config, and checks.

No model or data is read here, and torch is not imported, because that takes seconds.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusion_bench_featcal.errors.nearest_names import nearest_hint, refuse_unknown
from fusion_bench_featcal.errors.words import using_vocabulary
from fusion_bench_featcal.files import check_target, is_missing
from fusion_bench_featcal.files.names import refuse_unusable_names
from fusion_bench_featcal.files.untrusted import read_yaml
from fusion_bench_featcal.folders.mergekit import task_weights, with_merge_config
from fusion_bench_featcal.folders.options import WORDS, with_full_paths
from fusion_bench_featcal.folders.request import Request, option_label
from fusion_bench_featcal.settings.fields import check_values

_RESERVED = ("base", "merged", "_pretrained_")


@using_vocabulary(WORDS)
def read_request(values: Mapping[str, object], source: str = "featcal calibrate") -> Request:
    """Return a request with all options set.

    Args:
        values: Options by name. They have priority over the recipe that `config` names.
        source: Name of the caller, for messages.

    Raises:
        ValueError: If an option is unknown or missing, or its value cannot be used.
    """
    chosen = _check_options(values, f"{source}: ")
    if file := chosen.pop("config", None):
        path = Path(file).expanduser()
        content = read_yaml(path)
        if not isinstance(content, Mapping) or "config" in content:
            raise ValueError(f"--config {path} is not a recipe: it needs lines `option: value`")
        recipe = _check_options(content, f"{file}: ")
        recipe = with_full_paths(recipe, Request, path.parent)
        chosen = recipe | {
            name: recipe.get(name, {}) | value if isinstance(value, dict) else value
            for name, value in chosen.items()
        }
    request = _complete(Request(**chosen))
    _check_names(request)
    _check_paths(request)
    _check_combinations(request)
    vars(request)["settings"] = request.make_settings()
    return request


def check_folder(request: Request) -> None:
    """Refuse a folder for the model that cannot be used. A plan needs none."""
    if request.out is None:
        return
    check_target(request.folder, "--out")
    for label, location in request.models.items():
        model = Path(location).expanduser()
        if model.is_dir() and model.resolve() in request.folder.resolve().parents:
            raise ValueError(f"--out {request.out} is inside {label}: name a folder outside it")
    if not request.resume and request.has_blocks:
        raise ValueError(
            f"{request.blocks_folder} has blocks of an interrupted run: continue with --resume, or "
            "remove it"
        )


def _check_options(values: Mapping[str, object], prefix: str) -> dict[str, Any]:
    """Return options that are not None, with paths as texts. Refuse unknown names and values."""

    def as_text(value: object) -> Any:
        if isinstance(value, Mapping):
            return {name: as_text(entry) for name, entry in value.items()}
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    options = {name: as_text(value) for name, value in values.items() if value is not None}
    check_values(Request, options, prefix)
    return options


def _complete(request: Request) -> Request:
    """Return the request with base, experts and their weights from mergekit's config."""
    merged, merge = request.merged, request.merge
    if (merged is None) == (merge is None):
        raise ValueError(
            "give MERGED, the merged model's folder, or --merge HOW"
            if merged is None
            else f"{merged} is already merged, but --merge makes a new merge: leave one of them out"
        )
    if request.out is None and not request.plan:
        raise ValueError("give --out DIR, a new folder for the model")
    notes, base, experts, origin = list[str](), request.base, request.expert, "--expert"
    if (merger := request.merger) and merger.scale and merger.scale > 1:
        effect = f"moves {merger.scale:g} times as far from the base as each expert"
        notes.append(f"--merge {merge} {effect}: usual scales are 0.1 to 1")
    if merged is not None:
        base, experts, origin = with_merge_config(merged, base, experts, notes)
    if not experts:
        raise ValueError("name each expert with --expert NAME=DIR")
    refuse_unusable_names(experts, origin, _RESERVED)
    changed = {"base": base, "expert": dict(experts)}
    by_config = tuple(name for name in changed if changed[name] != getattr(request, name))
    # The paper's rule keeps weights of the merge, because its result stays near the merged model.
    is_plus = request.set.get("rule", request.preset) == "plus"
    is_replaced = merged is not None and is_plus and "task_weights" not in request.set
    if is_replaced and (weights := task_weights(str(merged), experts, notes)):
        changed["set"] = {**request.set, "task_weights": weights}
    return replace(request, **changed, notes=tuple(notes), by_config=by_config)


def _check_names(request: Request) -> None:
    """Refuse options for unknown experts, and experts without data."""
    names_of_tasks = {
        "data": request.data,
        "eval": request.eval,
        "prompt": (name for name in request.prompt if name != "*"),
        "columns": (key.rpartition(":")[0] for key in request.columns if ":" in key),
    }
    if request.calibrates:
        # Other tasks have test examples alone, but an expert without them may be mistyped.
        untested = request.expert.keys() - request.eval.keys()
        further = {task for task in request.eval if not nearest_hint(task, untested)}
        names_of_tasks["eval"] = request.eval.keys() - further
    for option, names in names_of_tasks.items():
        refuse_unknown(names, request.expert, f"--{option}: expert ")
    missing = [task for task in request.expert if task not in request.data]
    if missing and (request.calibrates or request.merged is not None):
        instead = "" if request.calibrates else ". To merge without samples, use --merge swudi"
        raise ValueError(
            f"no data for {', '.join(missing)}: every expert needs samples of its task, "
            f"--data {missing[0]}=FILE{instead}"
        )


def _check_paths(request: Request) -> None:
    """Refuse paths of models and data that do not exist."""
    if (file := request.chat_template) is not None and not Path(file).expanduser().is_file():
        raise ValueError(f"--chat-template {file}: there is no such file here")
    data = {option_label(option, path): path for option, path in request.data_options.items()}
    for option, path in (request.models | data | request.processors).items():
        if is_missing(path) and ":" not in path:  # a folder may name its split
            raise ValueError(f"{option}: there is no such file or folder here")


def _check_combinations(request: Request) -> None:
    """Refuse options that contradict each other, and prompts without a class name."""
    if request.strict and request.no_eval:
        raise ValueError("--strict compares scores, but --no-eval skips them: leave one out")
    if not request.calibrates:
        is_paper = request.preset != Request.preset
        unused = {"--strict": request.strict, "--set": request.set, "--preset": is_paper}
        if names := [name for name, value in unused.items() if value]:
            raise ValueError(
                f"{', '.join(names)}: without --data the experts are only merged, not calibrated. "
                f"Leave {names[0]} out, or give samples with --data NAME=FILE"
            )
    if request.merge and "expert_read_budget" in request.set:
        raise ValueError(
            "--merge reads every expert completely: leave --set expert_read_budget out"
        )
    for text in request.prompt.values():
        if "{}" not in text:
            raise ValueError(f"--prompt {text!r} has no {{}} for the class name")
