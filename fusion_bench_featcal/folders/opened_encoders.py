"""Models of sentence-transformers for `featcal calibrate`, which the library opens and saves."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from fusion_bench_featcal.encoders.library import st
from fusion_bench_featcal.encoders.models import transformer_of
from fusion_bench_featcal.encoders.naming import module_folders
from fusion_bench_featcal.encoders.row_scores import EncoderTests
from fusion_bench_featcal.encoders.scores import encoder_tests, name_tests
from fusion_bench_featcal.encoders.texts import calls_of
from fusion_bench_featcal.experts import InMemoryExpert, LazyModel
from fusion_bench_featcal.experts.similarity import notes_on_experts
from fusion_bench_featcal.folders.encoder_models import EncoderModels
from fusion_bench_featcal.folders.input_models import InputModels
from fusion_bench_featcal.folders.model_folder import ModelFolder
from fusion_bench_featcal.folders.opened import (
    CalibratedModel,
    CardHead,
    Opened,
    notes_on_inputs,
    require_base,
)
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.sentence_rows import open_sentences
from fusion_bench_featcal.folders.tasks import Part, Task, TaskRows
from fusion_bench_featcal.folders.tokenizers import warnings_on_tokens
from fusion_bench_featcal.models.bases import read_local, without_base
from fusion_bench_featcal.models.cards import CARD, card_tags
from fusion_bench_featcal.results.notes import Note, notes_of
from fusion_bench_featcal.sentence_transformers import calibrate_encoder, write_encoder
from fusion_bench_featcal.settings import FeatCalSettings

_UNSUPPORTED = {
    "text_tower": "--text-tower is for CLIP",
    "tokenizer": "--tokenizer: models of sentence-transformers have their own",
    "chat_template": "--chat-template: models of sentence-transformers have their own prompts",
}
_TEXT_OPTIONS = ("max_length", "calibration_targets", "generated_tokens")

_SINGLE_TEXT_OPTIONS = (
    "A classifier of single texts with one output has no modules.json, and in its config.json "
    '"problem_type": "regression"'
)
_READING = ("prompts", "default_prompt_name", "max_seq_length", "do_lower_case")


def open_encoders(inputs: InputModels) -> Opened:
    """Open models and rows by sentence-transformers.

    Raises:
        ValueError: If they do not fit each other, or an option has no part in such models.
        CalibrationError: If a model or a row cannot be used.
    """
    request = inputs.request
    for name, reason in _UNSUPPORTED.items():
        if getattr(request, name) is not None:
            raise ValueError(f"{reason}: leave it out")
    for name in (name for name in _TEXT_OPTIONS if name in request.set):
        raise ValueError(f"--set {name}: sentence-transformers reads the texts: leave it out")
    require_base(request)
    models = EncoderModels(inputs)
    # The model itself limits the length of texts.
    settings = request.settings.replace(max_length=None).with_rule_defaults
    tasks = {task: _open_task(task, request, models) for task in request.expert}
    return Opened(
        models.loaders(),
        None,
        settings,
        partial(calibrate_encoders, models, settings),
        tasks,
        notes_of([*_notes(models), *settings.extremes]) + _warnings(models, tasks),
    )


def calibrate_encoders(
    models: EncoderModels, settings: FeatCalSettings, batches: Mapping[str, Any]
) -> CalibratedModel:
    """Calibrate the merged model with each task's rows. It is whole in memory."""
    # Options count texts, of which a row has several. The rows are drawn already.
    options = replace(settings.options, samples_per_task=None)
    result = calibrate_encoder(
        models.merged,
        models.base,
        models.experts,
        batches,
        settings.rule_object,
        options,
        settings.batch_size,
    )
    write = partial(_write, result.model, models.inputs.merged)
    return CalibratedModel(result, lambda: result.model, write)


def _write(model: nn.Module, merged: ModelFolder | None, folder: Path, heads: Any) -> CardHead:
    """Save by the library, with small files of the merged model that it does not write."""
    del heads  # all tasks share the model's
    write_encoder(model, folder)
    written, tags = read_local(str(folder), CARD), list[str]()
    if merged is not None:
        skipped = module_folders(merged.folder)
        merged.folder_files.copy_small_files(folder, skipped_folders=skipped)
        tags = card_tags(merged.folder)
    library = {key: written[key] for key in ("library_name", "pipeline_tag") if key in written}
    return CardHead(library, [*tags, *written.get("tags", ())])


def _warnings(models: EncoderModels, tasks: Mapping[str, Task]) -> list[Note]:
    """Warn of experts whose tokenizers read texts otherwise."""
    tokenizer, folders = models.merged.tokenizer, models.inputs.experts
    experts = {folders[task].label: expert.tokenizer for task, expert in models.experts.items()}
    samples = {folders[name].label: task.batches for name, task in tasks.items()}
    tokenizers = {"the merged model": tokenizer} | experts
    if not all(isinstance(one, PreTrainedTokenizerBase) for one in tokenizers.values()):
        return []
    return warnings_on_tokens(tokenizers, samples)


def _notes(models: EncoderModels) -> list[str]:
    """Return sentences on the models, and on experts that may not belong together."""
    inputs, home, merged = models.inputs, models.module_donor, models.merged
    notes = notes_on_inputs(inputs)
    if not home.encoder_class:
        manner = "as a reranker" if isinstance(merged, st.CrossEncoder) else "by its mean"
        notes.append(f"no modules.json: sentence-transformers reads {home.label} {manner}")
    elif inputs.merged not in (None, home):
        location = inputs.request.merged
        notes.append(f"{location} has no modules.json: modules are those of {home.label}")
    for task, expert in models.experts.items():
        if differing := [n for n in _READING if _reading(expert, n) != _reading(merged, n)]:
            notes.append(f"expert {task} has other {', '.join(differing)} than the merged model")
    if models.base is None:
        return [*notes, without_base([*inputs.request.expert.values()], "--base {}")]
    labelled = {f"expert {task}": _lazy(task, expert) for task, expert in models.experts.items()}
    if inputs.merged is not None:
        labelled["the merged model"] = _lazy("merged", merged)
    return notes + notes_on_experts(labelled, _lazy("base", models.base))


def _open_task(task: str, request: Request, models: EncoderModels) -> Task:
    """Open a task's texts."""
    rows = TaskRows.open(task, request, partial(open_sentences, task, request))
    parts = rows.samples, rows.tests
    rows, _ = rows.without_repeats(*([p.rows.texts(n) for n in p.indices] for p in parts))
    sentences, first = rows.samples.rows, rows.samples.indices[0]
    try:
        calls_of(models.merged, sentences.row_name(first), sentences[first])
    except TypeError as error:
        raise ValueError(f"{error}. {_SINGLE_TEXT_OPTIONS}") from error
    tests = _tests(task, request, models, rows.tests) if rows.tests.indices else None
    if isinstance(tests, str):
        rows, tests = rows.unscored(tests), None
    notes = list[str]()
    if unread := sentences.unread:
        advice = "--columns NAME=COLUMN reads one"
        notes.append(f"columns that are not read: {', '.join(unread)} ({advice})")
    return rows.opened(
        [sentences[number] for number in rows.samples.indices],
        tests,
        sentences.columns.values(),
        notes,
        measure=tests.measure if tests else "",
        title=tests.columns if tests else Task.title,
    )


def _tests(task: str, request: Request, models: EncoderModels, part: Part) -> EncoderTests | str:
    """Return tests of test rows, or why there are none."""
    rows = [part.rows[number] for number in part.indices]

    def label(number: int) -> str:
        return part.rows.row_name(part.indices[number])

    if prompt := request.prompt_of(task, ""):
        embedder = models.merged if models.base is None else models.base
        return name_tests(rows, label, embedder, prompt)
    return encoder_tests(models.merged, rows, label)


def _reading(model: Any, name: str) -> Any:
    """Return a value by which a model reads texts, without prompts that are empty."""
    owner = transformer_of("", model) if name == "do_lower_case" else model
    value: Any = getattr(owner, name)
    return {k: v for k, v in value.items() if v} if name == "prompts" else value


def _lazy(label: str, model: Any) -> LazyModel:
    return LazyModel(label, InMemoryExpert(model.transformers_model), model.transformers_model)
