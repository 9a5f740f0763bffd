"""The data of every task, opened as its kind of models asks for it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from fusion_bench_featcal.data.text_samples import TextEncoder
from fusion_bench_featcal.folders.classifiers import open_classifier_task
from fusion_bench_featcal.folders.language import open_language_task
from fusion_bench_featcal.folders.model_folder import (
    IMAGE_CLASSIFIER,
    TEXT_CLASSIFIER,
    ModelFolder,
)
from fusion_bench_featcal.folders.models import Models
from fusion_bench_featcal.folders.pictures import ZeroShot, open_image_task
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import Task


def open_tasks(models: Models, request: Request, processor: Any) -> dict[str, Task]:
    """Open every task's data, as the kind of models asks for it."""
    kind = models.home.kind
    if kind in ("causal", "seq2seq"):
        encoder = TextEncoder(processor, kind, request.settings.max_length)
        return {
            task: open_language_task(task, request, encoder, partial(models.load_expert, task))
            for task in request.expert
        }
    labels = {
        task: _class_names(models.base if expert.is_adapter and models.base else expert)
        if not request.no_eval
        else ()
        for task, expert in models.experts.items()
    }
    if kind == TEXT_CLASSIFIER:
        return {
            task: open_classifier_task(task, request, processor, labels[task])
            for task in request.expert
        }
    if kind == IMAGE_CLASSIFIER:
        return {
            task: open_image_task(task, request, processor, classes=labels[task])
            for task in request.expert
        }
    clip = _zero_shot(models, request)
    return {task: open_image_task(task, request, processor, clip=clip) for task in request.expert}


def _class_names(expert: ModelFolder) -> Sequence[str]:
    """Names of the classes of an expert's head by their numbers, the `id2label` of its config.

    Raises:
        ValueError: If `label2id` has others (LABEL_0, ... is none), or a number is missing.
    """
    config: Any = expert.empty.config
    names = {number: str(name) for number, name in config.id2label.items()}
    named = {(name, str(number)) for number, name in names.items()}
    stored = {(str(n), str(i)) for n, i in ((expert.config or {}).get("label2id") or {}).items()}
    unnamed = {(f"LABEL_{number}", str(number)) for number in names}
    whole = stored <= named and {name for name, _ in stored} == {*names.values()}
    if {*names} != {*range(len(names))} or not (whole or stored in (set(), unnamed)):
        raise ValueError(
            f"{expert.option}: id2label and label2id of its config.json do not fit together. Each "
            "class needs a name and a number from 0, the same in both"
        )
    return [names[number] for number in range(len(names))]


def _zero_shot(models: Models, request: Request) -> ZeroShot | None:
    """Zero-shot heads of a whole CLIP; None where none is at hand."""
    if request.no_eval:
        return None
    if request.text_tower is not None:
        return ZeroShot(ModelFolder("text tower", request.text_tower, "--text-tower"))
    for model in (models.merged, models.base):
        if model is not None and model.architecture.__name__ == "CLIPModel":
            return ZeroShot(model)
    return None
