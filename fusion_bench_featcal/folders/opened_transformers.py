"""Models and data of transformers for `featcal calibrate`.

`open_transformers` opens language models, speech models, classifiers, encoders of images and CLIP.
"""

from collections.abc import Mapping
from typing import Any

from fusion_bench_featcal.data.image_texts import ImageTextBatches
from fusion_bench_featcal.data.text_limits import NO_LIMIT, declared, longest_text, positions_of
from fusion_bench_featcal.data.text_samples import (
    CausalTextEncoder,
    ClassifierTextEncoder,
    Seq2SeqTextEncoder,
)
from fusion_bench_featcal.folders.images import ZeroShot, open_image_task
from fusion_bench_featcal.folders.input_models import InputModels
from fusion_bench_featcal.folders.merger import warnings_on_merger
from fusion_bench_featcal.folders.model_folder import (
    CLASSIFIERS,
    IMAGE_ENCODER,
    LANGUAGE_MODELS,
    SPEECH,
    TEXT_MODELS,
    ModelFolder,
    class_names,
)
from fusion_bench_featcal.folders.opened import Opened
from fusion_bench_featcal.folders.request import MAX_LENGTH, Request
from fusion_bench_featcal.folders.speech import open_speech_task
from fusion_bench_featcal.folders.tasks import OTHER_TEXT
from fusion_bench_featcal.folders.text_classes import open_class_task
from fusion_bench_featcal.folders.texts import open_language_task, open_other_text
from fusion_bench_featcal.folders.tokenizers import (
    refuse_languages,
    warnings_on_chats,
    warnings_on_tokens,
)
from fusion_bench_featcal.folders.transformers_models import TransformersModels
from fusion_bench_featcal.results.notes import Note, notes_of
from fusion_bench_featcal.settings import FeatCalSettings


def open_transformers(inputs: InputModels) -> Opened:
    """Open models and data.

    Raises:
        ValueError: If they do not fit each other, or an option has no part in the kind of models.
        CalibrationError: If a model or an example cannot be used.
    """
    request, models = inputs.request, TransformersModels(inputs)
    source, processor = models.structure_source, models.processor.loaded
    kind, names = source.kind, [*request.tasks, *request.further]
    if request.further and kind in CLASSIFIERS:
        raise ValueError(
            f"--eval {request.further[0]}: the evaluation needs the head of an expert of this "
            "name, but there is none"
        )
    positions = positions_of(source.empty) if kind in TEXT_MODELS else NO_LIMIT
    settings, note = _complete_settings(request, kind, processor, positions)
    length, ends = settings.max_length, models.ends
    first_token = declared("forced_bos_token_id", *inputs.by_name.values())
    if kind in LANGUAGE_MODELS:
        encoder_class = {"causal": CausalTextEncoder, "seq2seq": Seq2SeqTextEncoder}[kind]
        encoder = encoder_class(processor, length, positions, ends, first_token)
        tasks = {task: open_language_task(task, models, encoder) for task in names}
        if kind == "causal" and request.calibrates and not request.no_eval:
            tasks.setdefault(OTHER_TEXT, open_other_text(models, encoder))
    elif kind == SPEECH:
        encoder = Seq2SeqTextEncoder(processor, length, positions, ends, first_token)
        config: Any = source.empty.config
        extractor, start = models.processor.feature_extractor(), config.decoder_start_token_id
        tasks = {t: open_speech_task(t, request, encoder, extractor, start) for t in names}
    elif kind in TEXT_MODELS:
        encoder = ClassifierTextEncoder(processor, length, positions)
        heads = {} if request.no_eval else _class_names(inputs)
        configs = [model.config for model in (source, *models.inputs.experts.values())]
        pads = all(config.get("pad_token_id") is not None for config in configs if config)
        tasks = {
            task: open_class_task(task, request, encoder, heads.get(task, ()), pads=pads)
            for task in names
        }
    else:
        heads = {} if request.no_eval else _image_heads(inputs, source)
        tasks = {t: open_image_task(t, request, processor, heads.get(t)) for t in names}
    if kind in ("seq2seq", SPEECH):
        refuse_languages(models.processor.tokenizers, [source, *models.inputs.experts.values()])
    further = {task: tasks.pop(task) for task in [*tasks] if task not in request.tasks}
    if any(isinstance(task.batches, ImageTextBatches) for task in tasks.values()):
        _refuse_text_models(models)
    notes = notes_of([*models.notes(), *filter(None, [note]), *settings.extremes])
    warnings = _warnings_on_texts(models, request, tasks) if kind in TEXT_MODELS else []
    warnings += warnings_on_merger(models.paired.merged_weights, models.paired.experts)
    return Opened(models, settings, tasks, notes + warnings, further)


def _complete_settings(
    request: Request, kind: str, tokenizer: object, positions: int
) -> tuple[FeatCalSettings, str | None]:
    """Return all settings, and a sentence if the models cut texts.

    `max_length` becomes the length of the longest text that the models read, or None for images.
    """
    unread = () if kind in LANGUAGE_MODELS else ("calibration_targets", "generated_tokens")
    unread += () if kind in TEXT_MODELS else ("max_length",)
    for name in (name for name in unread if name in request.set):
        raise ValueError(f"--set {name} has no effect on a model of kind {kind}: leave it out")
    settings = request.settings
    if kind not in TEXT_MODELS:
        return settings.complete(max_length=None), None
    if request.text_tower or request.prompt:
        raise ValueError(
            f"--text-tower is for CLIP, --prompt for CLIP and encoders, but these are {kind} models"
        )
    if "max_length" in request.set:
        return settings.with_rule_defaults, None
    most, limit = longest_text(tokenizer, positions)
    is_cut = kind != SPEECH and most <= MAX_LENGTH and most == positions
    note = f"texts are truncated at {most} tokens, {limit}" if is_cut else None
    return settings.complete(max_length=min(MAX_LENGTH, most)), note


def _warnings_on_texts(
    models: TransformersModels, request: Request, tasks: Mapping[str, Any]
) -> list[Note]:
    """Warn about experts whose tokenizer or chat template reads texts differently."""
    experts = models.inputs.experts
    rows = {experts[name].label: task.batches.texts for name, task in tasks.items()}
    texts = {
        label: [(row.prompt, row.target, row.pair) for row in task_rows]
        for label, task_rows in rows.items()
    }
    warnings = warnings_on_tokens(models.processor.tokenizers, texts)
    has_chats = any(text.form == "chat" for task_rows in rows.values() for text in task_rows)
    if request.chat_template is None and has_chats:
        warnings += warnings_on_chats(models.processor.tokenizers)
    return warnings


def _refuse_text_models(models: TransformersModels) -> None:
    """Refuse experts and a base without the towers that images run."""
    paired, labels = models.paired, {n: m.label for n, m in models.inputs.by_name.items()}
    for name, model in {**paired.experts, "base": paired.base}.items():
        if model is not None and any(tensor not in model.keys for tensor in paired.unused):
            raise ValueError(
                f"{labels[name]} lacks the tower of {models.structure_source.label}, which "
                "examples with images calibrate. Name a complete model, or remove the images of "
                "all tasks"
            )


def _image_heads(inputs: InputModels, structure_source: ModelFolder) -> dict[str, Any]:
    """Return each task's class names, or zero-shot heads of a whole CLIP, None without one."""
    if structure_source.kind == IMAGE_ENCODER:
        raise ValueError(f"{structure_source.label} has no head to score with: give --no-eval")
    if structure_source.kind != "clip":
        return _class_names(inputs)
    named = filter(None, (inputs.merged, inputs.base))
    whole = (model for model in named if model.architecture.__name__ == "CLIPModel")
    source = inputs.text_tower or next(whole, None)
    tasks = [*inputs.experts, *inputs.request.further]
    return dict.fromkeys(tasks, source and ZeroShot(source))


def _class_names(inputs: InputModels) -> dict[str, Any]:
    return {
        task: class_names(inputs.base if expert.is_adapter and inputs.base else expert)
        for task, expert in inputs.experts.items()
    }
