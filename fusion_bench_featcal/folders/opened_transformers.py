"""Models of transformers for `featcal calibrate`: language models, classifiers, CLIP, images."""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.data.text_limits import NO_LIMIT, longest_text, positions_of
from fusion_bench_featcal.data.text_samples import TextEncoder
from fusion_bench_featcal.experts.source import total_bytes
from fusion_bench_featcal.folders.images import ZeroShot, open_image_task
from fusion_bench_featcal.folders.model_folder import (
    IMAGE_ENCODER,
    LANGUAGE_MODELS,
    TEXT_MODELS,
    ModelFolder,
    class_names,
)
from fusion_bench_featcal.folders.models import Models
from fusion_bench_featcal.folders.request import MAX_LENGTH, Request
from fusion_bench_featcal.folders.tasks import Task
from fusion_bench_featcal.folders.texts import open_class_task, open_language_task
from fusion_bench_featcal.folders.tokenizers import doubts_on_chats, doubts_on_tokens
from fusion_bench_featcal.folders.writing import (
    write_heads,
    write_other_files,
    write_processor,
    write_weights,
)
from fusion_bench_featcal.models.saving import TRANSFORMERS, card_tags, correct_configs
from fusion_bench_featcal.run.result import CalibrationResult
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.settings.rules import completed


class OpenedTransformers:
    """See `Opened`. Weights are sources, and tensors are read when they are needed."""

    def __init__(self, request: Request) -> None:
        """Find all models, and compare configs, shapes and a sample of the weights."""
        self.request, self.models = request, Models.of(request)
        self.processor = self.models.processor()
        self.experts, self.has_heads = self.models.experts, self.models.has_heads
        self.own_head = self.models.like.name
        self.settings = self._settings()
        self.doubts = list[str]()
        self.notes = [*self.models.notes, *self._note_on_length()]

    def _doubts_on_texts(self, tasks: Mapping[str, Task]) -> list[str]:
        """Describe experts whose tokenizers, or templates of chats, read texts otherwise."""
        models = self.models
        named = self.processor, models.processor_option, models.expert_tokenizers
        rows = {models.experts[name].label: task.batches.texts for name, task in tasks.items()}
        doubts = doubts_on_tokens(*named, rows)
        if self.request.chat_template is None and any(
            text.form == "chat" for texts in rows.values() for text in texts
        ):
            doubts += doubts_on_chats(*named)
        return doubts

    @property
    def title(self) -> str:
        """Kind and class of the models."""
        like = self.models.like
        return f"{like.kind}: {like.calibrated_class.__name__}"

    @property
    def size(self) -> int:
        """Bytes of the model."""
        return self.models.like.size

    @property
    def read(self) -> int:
        """Bytes of all experts."""
        return sum(map(total_bytes, self.models.sources.values()))

    @property
    def merged_weights(self) -> Any:
        """The merged model's weights."""
        return self.models.merged_source

    def _settings(self) -> FeatCalSettings:
        """Return the request's settings with the longest text of the models, None for images."""
        request, length = self.request, self.request.settings.max_length
        kind = self.models.like.kind
        unread = () if kind in LANGUAGE_MODELS else ("calibration_targets", "generated_tokens")
        unread += () if kind in TEXT_MODELS else ("max_length",)
        for name in (name for name in unread if name in request.set):
            raise ValueError(f"--set {name} has no part in a model of kind {kind}: leave it out")
        if kind not in TEXT_MODELS:
            length = None
        elif request.text_tower or request.prompt:
            raise ValueError(
                "--text-tower is for CLIP, --prompt for CLIP and encoders, and these are "
                f"{kind} models"
            )
        elif "max_length" not in request.set:
            length = min(MAX_LENGTH, longest_text(self.processor, self._positions)[0])
        return completed(request.settings.replace(max_length=length))

    @cached_property
    def _positions(self) -> int:
        """Positions of text models."""
        is_text = self.models.like.kind in TEXT_MODELS
        return positions_of(self.models.like.empty) if is_text else NO_LIMIT

    def _note_on_length(self) -> list[str]:
        """Return a sentence on texts that are cut earlier than the tokenizer's limit."""
        length = self.settings.max_length
        if length != self._positions or "max_length" in self.request.set:
            return []
        most, limit = longest_text(self.processor, self._positions)
        return [f"texts are cut at {most} tokens: {limit}"] if most == length else []

    def open_tasks(self) -> dict[str, Task]:
        """Open every task's data, for the kind of models."""
        models, processor, request = self.models, self.processor, self.request
        kind, length = models.like.kind, self.settings.max_length
        if kind in LANGUAGE_MODELS:
            encoder = TextEncoder(processor, kind, length, self._positions, models.ends)  # type: ignore[arg-type]
            tasks = {
                task: open_language_task(task, request, encoder, partial(models.load_expert, task))
                for task in request.expert
            }
            self.doubts += self._doubts_on_texts(tasks)
            return tasks
        if kind not in TEXT_MODELS:
            heads = {} if request.no_eval else _image_heads(models)
            return {t: open_image_task(t, request, processor, heads.get(t)) for t in request.expert}
        encoder = TextEncoder(processor, "classification", length, self._positions)
        heads = {} if request.no_eval else _class_names(models)
        configs = [model.config for model in (models.like, *models.experts.values())]
        pads = all(config.get("pad_token_id") is not None for config in configs if config)
        tasks = {
            task: open_class_task(task, request, encoder, heads.get(task, ()), pads=pads)
            for task in request.expert
        }
        self.doubts += self._doubts_on_texts(tasks)
        return tasks

    def load(self, weights: Any) -> Any:
        """Return the merged model with the given weights of its body, on the device."""
        return self.models.load(weights)

    def load_expert(self, task: str) -> Any:
        """Return an expert on the device."""
        return self.models.load_expert(task)

    def head_of(self, expert: Any) -> Any:
        """Return an expert's classifier without its body."""
        return self.models.without_body(expert)

    def with_head(self, task: str, model: Any, head: Any) -> Any:
        """Return an expert's classifier with a model's body, or the model of other kinds."""
        models = self.models
        return models.with_body(task, head, models.body(model)) if self.has_heads else model

    def calibrate(self, tasks: Mapping[str, Task]) -> tuple[CalibrationResult, Any, list[str]]:
        """Calibrate the merged model. Returns the result, the calibrated weights, and no notes."""
        models = self.models
        result = calibrate(
            models.empty_body,
            models.base_source,
            models.sources,
            {name: task.batches for name, task in tasks.items()},
            self.settings.replace(family=models.family),
            device=self.request.device,
            merged_weights=models.merged_source,
        )
        return result, result.weights, []

    def write(self, weights: Any, heads: Mapping[str, Any], folder: Path) -> None:
        """Write weights, heads, tokenizer or image processor, and files beside them."""
        write_weights(self.models, weights, folder)
        write_heads(self.models, heads, folder)
        write_processor(self.models, self.processor, folder)
        write_other_files(self.models, folder)
        correct_configs(self.models.like.whole, folder)

    def card_head(self, folder: Path) -> tuple[Mapping[str, str], Sequence[str]]:
        """Return the library, and the tags of the merged model's card."""
        merged = self.models.merged
        return TRANSFORMERS, [] if merged is None else card_tags(merged.folder)


def _image_heads(models: Models) -> dict[str, Any]:
    """Return each task's class names, or zero-shot heads."""
    if models.like.kind == IMAGE_ENCODER:
        raise ValueError(f"{models.like.label} has no head to be scored with: give --no-eval")
    is_clip = models.like.kind == "clip"
    return dict.fromkeys(models.experts, _zero_shot(models)) if is_clip else _class_names(models)


def _class_names(models: Models) -> dict[str, Any]:
    return {
        task: class_names(models.base if expert.is_adapter and models.base else expert)
        for task, expert in models.experts.items()
    }


def _zero_shot(models: Models) -> ZeroShot | None:
    """Return zero-shot heads of a whole CLIP, or None if there is no such model."""
    request = models.request
    if request.text_tower is not None:
        return ZeroShot(ModelFolder("text tower", request.text_tower, "--text-tower"))
    for model in (models.merged, models.base):
        if model is not None and model.architecture.__name__ == "CLIPModel":
            return ZeroShot(model)
    return None
