"""Models of transformers for `featcal calibrate`: language models, classifiers, CLIP, images."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fusion_bench_featcal.data.image_texts import ImageTextBatches
from fusion_bench_featcal.data.text_limits import NO_LIMIT, longest_text, positions_of
from fusion_bench_featcal.data.text_samples import (
    CausalTextEncoder,
    ClassifierTextEncoder,
    Seq2SeqTextEncoder,
)
from fusion_bench_featcal.families import text_tower
from fusion_bench_featcal.folders.calibrated_transformers import calibrate_transformers
from fusion_bench_featcal.folders.images import ZeroShot, open_image_task
from fusion_bench_featcal.folders.input_models import InputModels
from fusion_bench_featcal.folders.model_folder import (
    IMAGE_ENCODER,
    LANGUAGE_MODELS,
    SPEECH,
    TEXT_MODELS,
    class_names,
)
from fusion_bench_featcal.folders.opened import Models, Opened
from fusion_bench_featcal.folders.request import MAX_LENGTH, Request
from fusion_bench_featcal.folders.speech import open_speech_task
from fusion_bench_featcal.folders.texts import open_class_task, open_language_task
from fusion_bench_featcal.folders.tokenizers import (
    refuse_languages,
    warnings_on_chats,
    warnings_on_tokens,
)
from fusion_bench_featcal.folders.transformers_models import TransformersModels
from fusion_bench_featcal.results.notes import Note, notes_of
from fusion_bench_featcal.run.log import AsMerged
from fusion_bench_featcal.settings import FeatCalSettings


def open_transformers(inputs: InputModels) -> Opened:
    """Open models and rows.

    Raises:
        ValueError: If they do not fit each other, or an option has no part in the kind of models.
        CalibrationError: If a model or a row cannot be used.
    """
    request, models = inputs.request, TransformersModels(inputs)
    kind, processor = models.like.kind, models.processor.loaded
    positions = positions_of(models.like.empty) if kind in TEXT_MODELS else NO_LIMIT
    settings, note = _settings(request, kind, processor, positions)
    length = settings.max_length
    if kind in LANGUAGE_MODELS:
        encoder_class = {"causal": CausalTextEncoder, "seq2seq": Seq2SeqTextEncoder}[kind]
        encoder = encoder_class(processor, length, positions, models.ends, models.start)
        loads = {task: partial(models.load_expert, task) for task in request.expert}
        reads_images = text_tower(models.empty_body) is not None
        image_processor = models.processor.image_processor if reads_images else None
        tasks = {
            task: open_language_task(task, request, encoder, load, image_processor)
            for task, load in loads.items()
        }
    elif kind == SPEECH:
        encoder = Seq2SeqTextEncoder(processor, length, positions, models.ends, models.start)
        config: Any = models.like.empty.config
        speech_options = (
            encoder,
            models.processor.feature_extractor(),
            config.decoder_start_token_id,
        )
        tasks = {task: open_speech_task(task, request, *speech_options) for task in request.expert}
    elif kind in TEXT_MODELS:
        encoder = ClassifierTextEncoder(processor, length, positions)
        heads = {} if request.no_eval else _class_names(models)
        configs = [model.config for model in (models.like, *models.experts.values())]
        pads = all(config.get("pad_token_id") is not None for config in configs if config)
        tasks = {
            task: open_class_task(task, request, encoder, heads.get(task, ()), pads=pads)
            for task in request.expert
        }
    else:
        heads = {} if request.no_eval else _image_heads(models, inputs)
        tasks = {t: open_image_task(t, request, processor, heads.get(t)) for t in request.expert}
    if kind in ("seq2seq", SPEECH):
        refuse_languages(models.processor.tokenizers, [models.like, *models.experts.values()])
    notes = notes_of([*models.notes, *note, *settings.extremes])
    title = f"{kind}: {models.like.calibrated_class.__name__}"
    loads_whole = models.load_merged, models.load_expert
    # Only a run shows which parts of towers the images of rows need.
    has_images = any(isinstance(task.batches, ImageTextBatches) for task in tasks.values())
    as_merged = AsMerged if has_images else models.left_as_merged
    if has_images:
        models.refuse_text_parts()
    return Opened(
        Models(title, models.like.size, models.read, *loads_whole, as_merged),
        models.heads,
        settings,
        partial(calibrate_transformers, models, settings),
        tasks,
        notes + (_warnings_on_texts(models, request, tasks) if kind in TEXT_MODELS else []),
    )


def _settings(
    request: Request, kind: str, tokenizer: object, positions: int
) -> tuple[FeatCalSettings, list[str]]:
    """Return settings with the longest text, None for images, and a sentence if texts are cut."""
    unread = () if kind in LANGUAGE_MODELS else ("calibration_targets", "generated_tokens")
    unread += () if kind in TEXT_MODELS else ("max_length",)
    for name in (name for name in unread if name in request.set):
        raise ValueError(f"--set {name} has no part in a model of kind {kind}: leave it out")
    settings = request.settings
    if kind not in TEXT_MODELS:
        return settings.replace(max_length=None).with_rule_defaults, []
    if request.text_tower or request.prompt:
        raise ValueError(
            f"--text-tower is for CLIP, --prompt for CLIP and encoders, and these are {kind} models"
        )
    if "max_length" in request.set:
        return settings.with_rule_defaults, []
    most, limit = longest_text(tokenizer, positions)
    is_cut = kind != SPEECH and most <= MAX_LENGTH and most == positions
    note = [f"texts are cut at {most} tokens: {limit}"] if is_cut else []
    return settings.replace(max_length=min(MAX_LENGTH, most)).with_rule_defaults, note


def _warnings_on_texts(
    models: TransformersModels, request: Request, tasks: Mapping[str, Any]
) -> list[Note]:
    """Warn of experts whose tokenizers, or templates of chats, read texts otherwise."""
    rows = {models.experts[name].label: task.batches.texts for name, task in tasks.items()}
    texts = {
        label: [(row.prompt, row.target, row.pair) for row in task_rows]
        for label, task_rows in rows.items()
    }
    warnings = warnings_on_tokens(models.processor.tokenizers, texts)
    has_chats = any(text.form == "chat" for task_rows in rows.values() for text in task_rows)
    if request.chat_template is None and has_chats:
        warnings += warnings_on_chats(models.processor.tokenizers)
    return warnings


def _image_heads(models: TransformersModels, inputs: InputModels) -> dict[str, Any]:
    """Return each task's class names, or zero-shot heads of a whole CLIP, None without one."""
    if models.like.kind == IMAGE_ENCODER:
        raise ValueError(f"{models.like.label} has no head to be scored with: give --no-eval")
    if models.like.kind != "clip":
        return _class_names(models)
    named = filter(None, (inputs.merged, inputs.base))
    whole = (model for model in named if model.architecture.__name__ == "CLIPModel")
    source = inputs.text_tower or next(whole, None)
    return dict.fromkeys(models.experts, source and ZeroShot(source))


def _class_names(models: TransformersModels) -> dict[str, Any]:
    return {
        task: class_names(models.base if expert.is_adapter and models.base else expert)
        for task, expert in models.experts.items()
    }
