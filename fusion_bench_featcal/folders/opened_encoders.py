"""Models and data of sentence-transformers for `featcal calibrate`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from fusion_bench_featcal.encoders.library import st
from fusion_bench_featcal.encoders.models import transformer_of
from fusion_bench_featcal.encoders.scorer import EncoderScorer
from fusion_bench_featcal.encoders.scores import class_name_scorer, encoder_scorer
from fusion_bench_featcal.encoders.texts import calls_of
from fusion_bench_featcal.experts.similarity import notes_on_experts
from fusion_bench_featcal.folders.encoder_models import EncoderModels, as_lazy
from fusion_bench_featcal.folders.input_models import InputModels
from fusion_bench_featcal.folders.opened import Opened, notes_on_inputs, require_base
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.sentence_rows import open_sentences
from fusion_bench_featcal.folders.tasks import Task, TaskData
from fusion_bench_featcal.folders.tokenizers import warnings_on_tokens
from fusion_bench_featcal.models.bases import without_base
from fusion_bench_featcal.results.notes import Note, notes_of

_UNSUPPORTED = {
    "text_tower": "--text-tower is for CLIP",
    "tokenizer": "--tokenizer: sentence-transformers models have their own",
    "chat_template": "--chat-template: sentence-transformers models have their own prompts",
}
_TEXT_OPTIONS = ("max_length", "calibration_targets", "generated_tokens")

_SINGLE_TEXT_OPTIONS = (
    "A classifier of single texts with one output must have no modules.json, and "
    '"problem_type": "regression" in its config.json'
)
_READING_ATTRIBUTES = ("prompts", "default_prompt_name", "max_seq_length", "do_lower_case")


def open_encoders(inputs: InputModels, class_name: str) -> Opened:
    """Open models and data with sentence-transformers.

    Args:
        inputs: The models' folders.
        class_name: The class of the library that opens all models.

    Raises:
        ValueError: If they do not fit each other, or an option has no part in such models.
        CalibrationError: If a model or an example cannot be used.
    """
    request = inputs.request
    for name, reason in _UNSUPPORTED.items():
        if getattr(request, name) is not None:
            raise ValueError(f"{reason}: leave it out")
    for name in (name for name in _TEXT_OPTIONS if name in request.set):
        raise ValueError(
            f"--set {name} has no effect, because sentence-transformers reads the texts: leave it "
            "out"
        )
    require_base(request)
    models = EncoderModels(inputs, class_name)
    # The model itself limits the length of texts.
    settings = request.settings.complete(max_length=None)
    tasks = {task: _open_task(task, request, models) for task in request.tasks}
    further = {task: _open_task(task, request, models) for task in request.further}
    notes = notes_of([*_notes(models), *settings.extremes])
    warnings = _warnings(models, tasks) + models.merger_warnings
    return Opened(models, settings, tasks, notes + warnings, further)


def _warnings(models: EncoderModels, tasks: Mapping[str, Task]) -> list[Note]:
    """Warn about experts whose tokenizers split texts differently."""
    tokenizer, folders = models.merged.tokenizer, models.inputs.experts
    experts = {folders[task].label: expert.tokenizer for task, expert in models.experts.items()}
    samples = {folders[name].label: task.batches for name, task in tasks.items()}
    tokenizers = {"the merged model": tokenizer} | experts
    if not all(isinstance(one, PreTrainedTokenizerBase) for one in tokenizers.values()):
        return []
    return warnings_on_tokens(tokenizers, samples)


def _notes(models: EncoderModels) -> list[str]:
    """Return sentences on the models, and on models that may be unrelated to the base."""
    inputs, donor, merged = models.inputs, models.module_donor, models.merged
    notes = notes_on_inputs(inputs)
    if donor.encoder_class is None:
        manner = "as a reranker" if isinstance(merged, st.CrossEncoder) else "with mean pooling"
        notes.append(f"no modules.json: sentence-transformers reads {donor.label} {manner}")
    elif inputs.merged not in (None, donor):
        location = inputs.request.merged
        notes.append(f"{location} has no modules.json: its modules are taken from {donor.label}")
    expected = {name: _reading_attribute(merged, name) for name in _READING_ATTRIBUTES}
    for task, expert in models.experts.items():
        if differing := [n for n in expected if _reading_attribute(expert, n) != expected[n]]:
            text = f"expert {task} and the merged model differ in {', '.join(differing)}"
            notes.append(text)
    if models.base is None:
        return [*notes, without_base([*inputs.request.expert.values()], "--base {}")]
    labelled = {f"expert {task}": as_lazy(task, model) for task, model in models.experts.items()}
    if inputs.merged is not None:
        labelled["the merged model"] = as_lazy("merged", merged)
    return notes + notes_on_experts(labelled, as_lazy("base", models.base))


def _open_task(task: str, request: Request, models: EncoderModels) -> Task:
    """Open a task's texts."""
    data = TaskData.open(task, request, partial(open_sentences, task, request))
    subsets = data.samples, data.tests
    data, _ = data.without_repeats(*([s.dataset.texts(n) for n in s.indices] for s in subsets))
    sentences, first = data.samples.dataset, [*data.samples.indices, *data.tests.indices][0]
    try:
        calls_of(models.merged, sentences.row_name(first), sentences[first])
    except TypeError as error:
        raise ValueError(f"{error}. {_SINGLE_TEXT_OPTIONS}") from error
    scorer = _make_scorer(data, models) if data.tests.indices else None
    if isinstance(scorer, str):
        data, scorer = data.unscored(scorer), None
    notes = list[str]()
    if unread := sentences.unread:
        advice = "to read one, give --columns NAME=COLUMN"
        notes.append(f"columns that are not read: {', '.join(unread)} ({advice})")
    return data.opened(
        [sentences[index] for index in data.samples.indices],
        scorer,
        sentences.columns.values(),
        notes,
        measure=scorer.measure if scorer else "",
    )


def _make_scorer(data: TaskData, models: EncoderModels) -> EncoderScorer | str:
    """Return what scores models on the test examples, or why they are not scored."""
    test = data.tests
    examples = [test.dataset[index] for index in test.indices]

    def row_name(n: int) -> str:
        return test.dataset.row_name(test.indices[n])

    if prompt := data.request.prompt_of(data.task, ""):
        embedder = models.merged if models.base is None else models.base
        return class_name_scorer(examples, row_name, embedder, prompt)
    return encoder_scorer(models.merged, examples, row_name)


def _reading_attribute(model: Any, name: str) -> Any:
    """Return an attribute that changes how a model reads texts. Empty prompts are left out."""
    owner = transformer_of("", model) if name == "do_lower_case" else model
    value: Any = getattr(owner, name)
    return {k: v for k, v in value.items() if v} if name == "prompts" else value
