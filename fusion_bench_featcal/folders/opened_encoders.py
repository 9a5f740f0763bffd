"""Models of sentence-transformers for `featcal calibrate`, which the library opens and saves."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from fusion_bench_featcal.calibration import rule_and_options
from fusion_bench_featcal.encoders.library import st
from fusion_bench_featcal.encoders.models import text_on_merged, transformer_of
from fusion_bench_featcal.encoders.naming import class_of, module_folders
from fusion_bench_featcal.encoders.scores import encoder_tests, name_tests
from fusion_bench_featcal.encoders.texts import calls_of
from fusion_bench_featcal.experts import InMemoryExpert, LazyModel
from fusion_bench_featcal.experts.likeness import notes_on_experts
from fusion_bench_featcal.files.tensors import stored_bytes
from fusion_bench_featcal.folders.encoder_models import EncoderModels
from fusion_bench_featcal.folders.opened import notes_on_inputs, require_base
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.sentence_rows import open_sentences
from fusion_bench_featcal.folders.tasks import Part, Task, open_parts, sentence
from fusion_bench_featcal.folders.tokenizers import doubts_on_tokens
from fusion_bench_featcal.models.bases import read_local, without_base
from fusion_bench_featcal.models.other_files import copy_other_files, note_on_weights
from fusion_bench_featcal.models.saving import CARD, card_tags
from fusion_bench_featcal.run.result import CalibrationResult
from fusion_bench_featcal.sentence_transformers import calibrate_encoder, write_encoder
from fusion_bench_featcal.settings.options import Options
from fusion_bench_featcal.settings.rules import completed, rule_of

_ELSEWHERE = {
    "text_tower": "--text-tower is for CLIP",
    "tokenizer": "--tokenizer: models of sentence-transformers have their own",
    "chat_template": "--chat-template: models of sentence-transformers have their own prompts",
}
_OF_TEXTS = ("max_length", "calibration_targets", "generated_tokens")

_OF_SINGLE_TEXTS = (
    "A classifier of single texts with one output has no modules.json, and in its config.json "
    '"problem_type": "regression"'
)
_READING = ("prompts", "default_prompt_name", "max_seq_length", "do_lower_case")


class OpenedEncoders:
    """See `Opened`. Weights are whole models in memory."""

    has_heads, own_head = False, ""

    def __init__(self, request: Request, class_name: str) -> None:
        """Open all models, and compare their modules and vocabularies.

        Args:
            request: The request.
            class_name: The library's class of the models.
        """
        self.request = request
        _refuse_unused(request)
        require_base(request, is_needed=rule_of(request.settings).needs_base)
        self.models = EncoderModels(request, class_name)
        self.experts = self.models.experts.keys()
        # The model itself limits the length of texts.
        self.settings = completed(request.settings.replace(max_length=None))
        self.notes, self.doubts = self._notes(), self._doubts()

    @property
    def title(self) -> str:
        """The library's class, and that of the transformer."""
        merged = self.models.merged
        return f"{type(merged).__name__}: {type(merged.transformers_model).__name__}"

    @property
    def size(self) -> int:
        """Bytes of the model."""
        return stored_bytes(self.models.merged.state_dict().values())

    @property
    def read(self) -> int:
        """Bytes of all experts."""
        experts = self.models.experts.values()
        return sum(stored_bytes(expert.state_dict().values()) for expert in experts)

    @property
    def merged_weights(self) -> Any:
        """The merged model."""
        return self.models.merged

    def _doubts(self) -> list[str]:
        """Describe experts whose tokenizers read texts otherwise."""
        tokenizer, files = self.models.merged.tokenizer, self.models.files
        experts = {files[t].label: one.tokenizer for t, one in self.models.experts.items()}
        tokenizers = tokenizer, *experts.values()
        if not all(isinstance(one, PreTrainedTokenizerBase) for one in tokenizers):
            return []
        return doubts_on_tokens(tokenizer, "the merged model", experts)

    def _notes(self) -> list[str]:
        """Return sentences on the models, and on experts that may not belong together."""
        request, models = self.request, self.models
        home, merged, experts = models.home, models.merged, models.experts
        notes = notes_on_inputs(request, [t for t in experts if models.files[t].is_adapter])
        if not class_of(home.folder):
            way = "as a reranker" if isinstance(merged, st.CrossEncoder) else "by its mean"
            notes.append(f"no modules.json: sentence-transformers reads {home.label} {way}")
        elif request.merged is not None and home is not models.files["merged"]:
            notes.append(f"{request.merged} has no modules.json: modules are those of {home.label}")
        if "merged" in models.files:
            notes += note_on_weights(models.files["merged"].folder)
        for task, expert in experts.items():
            if other := [n for n in _READING if _reading(expert, n) != _reading(merged, n)]:
                notes.append(f"expert {task} has other {', '.join(other)} than the merged model")
        if models.base is None:
            return [*notes, without_base([*request.expert.values()], "--base {}")]
        named = {f"expert {task}": _lazy(task, expert) for task, expert in experts.items()}
        if request.merged is not None:
            named["the merged model"] = _lazy("merged", merged)
        return notes + notes_on_experts(named, _lazy("base", models.base))

    def open_tasks(self) -> dict[str, Task]:
        """Open every task's texts."""
        return {task: self._open_task(task) for task in self.request.expert}

    def _open_task(self, task: str) -> Task:
        request, open_rows = self.request, cache(partial(open_sentences, task, self.request))
        calibration, held = open_parts(task, request, open_rows)
        held, distinct = held.distinct_from(calibration, task, request, lambda r, n: repr(r[n]))
        first = calibration.indices[0]
        try:
            calls_of(self.models.merged, calibration.rows.at(first), calibration.rows[first])
        except TypeError as error:
            raise ValueError(f"{error}. {_OF_SINGLE_TEXTS}") from error
        tests: Any = self._tests(task, held) if held.indices else None
        notes = []
        if isinstance(tests, str):
            notes, tests = [f"{task}: not scored, as {tests}"], None
            request = replace(request, no_eval=True)
            calibration, held = open_parts(task, request, open_rows)
        rows = [calibration.rows[number] for number in calibration.indices]
        columns, measure = calibration.rows.columns.values(), tests.measure if tests else ""
        if unread := calibration.rows.unread:
            advice = " (--columns NAME=COLUMN reads one)"
            notes.append(f"{task}: columns that are not read: {', '.join(unread)}{advice}")
        first_note = sentence(task, request, calibration, held, columns, measure)
        notes = [first_note, *distinct.notes, *notes]
        title = tests.columns if tests else Task.title
        return Task(rows, len(rows), tests, notes, title, distinct.has_repeats)

    def _tests(self, task: str, part: Part) -> Any:
        """Return tests of held-back rows, or why there are none."""
        rows = [part.rows[number] for number in part.indices]

        def label(number: int) -> str:
            return part.rows.at(part.indices[number])

        if prompt := self.request.prompt_of(task, ""):
            embedder = self.models.merged if self.models.base is None else self.models.base
            return name_tests(rows, label, embedder, prompt)
        return encoder_tests(self.models.merged, rows, label)

    def load(self, weights: Any) -> Any:
        """Return a model, which is its weights."""
        return weights

    def load_expert(self, task: str) -> Any:
        """Return an expert."""
        return self.models.experts[task]

    def head_of(self, expert: Any) -> Any:
        """Return the expert, which has no head of its own."""
        return expert

    def with_head(self, task: str, model: Any, head: Any) -> Any:
        """Return the model, whose head all tasks share."""
        return model

    def calibrate(self, tasks: Mapping[str, Task]) -> tuple[CalibrationResult, Any, list[str]]:
        """Calibrate the merged model. Returns the result, the calibrated model, and notes."""
        rule, options = rule_and_options(self.settings, Options())
        result = calibrate_encoder(
            self.models.merged,
            self.models.base,
            self.models.experts,
            {name: task.batches for name, task in tasks.items()},
            rule,
            batch_size=self.settings.batch_size,
            **(vars(options) | {"samples_per_task": None}),
        )
        (record,) = result.log.of_kind("as_merged")
        modules = record["modules"]
        return result, result.model, [text_on_merged(modules)] if modules else []

    def write(self, weights: Any, heads: Mapping[str, Any], folder: Path) -> None:
        """Save by the library, with small files of the merged model that it does not write."""
        merged = self.models.files.get("merged")
        write_encoder(weights, folder)
        if merged is not None:
            modules = module_folders(merged.folder)
            copy_other_files(merged.folder, folder, skipped_folders=modules)

    def card_head(self, folder: Path) -> tuple[Mapping[str, str], Sequence[str]]:
        """Return library and task of the card that the library wrote, and tags of both cards."""
        written, merged = read_local(str(folder), CARD), self.models.files.get("merged")
        tags = [] if merged is None else card_tags(merged.folder)
        head = {key: written[key] for key in ("library_name", "pipeline_tag") if key in written}
        return head, [*tags, *written.get("tags", ())]


def _refuse_unused(request: Request) -> None:
    """Refuse options and settings that models of sentence-transformers do not read."""
    for name, reason in _ELSEWHERE.items():
        if getattr(request, name) is not None:
            raise ValueError(f"{reason}: leave it out")
    for name in (name for name in _OF_TEXTS if name in request.set):
        raise ValueError(f"--set {name}: sentence-transformers reads the texts: leave it out")


def _reading(model: Any, name: str) -> Any:
    """Return a value by which a model reads texts, without prompts that are empty."""
    owner = transformer_of("", model) if name == "do_lower_case" else model
    value: Any = getattr(owner, name)
    return {k: v for k, v in value.items() if v} if name == "prompts" else value


def _lazy(label: str, model: Any) -> LazyModel:
    return LazyModel(label, InMemoryExpert(model.transformers_model), model.transformers_model)
