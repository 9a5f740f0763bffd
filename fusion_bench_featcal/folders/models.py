"""All models of one `featcal calibrate`, compared with each other before they are loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.data.pictures import check_channels
from fusion_bench_featcal.data.text_limits import end_tokens
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts import ExpertSource, InMemoryExpert, LazyModel
from fusion_bench_featcal.experts.likeness import notes_on_experts
from fusion_bench_featcal.experts.model_config import check_same_function
from fusion_bench_featcal.experts.working_model import offloaded
from fusion_bench_featcal.families import Family, stages_of
from fusion_bench_featcal.files.memory import free_bytes
from fusion_bench_featcal.folders.model_folder import (
    CLASSIFIERS,
    IMAGE_ENCODER,
    LANGUAGE_MODELS,
    TEXT_MODELS,
    ModelFolder,
    body_name,
    body_of,
    family_of,
    refuse_adapter,
)
from fusion_bench_featcal.folders.opened import notes_on_inputs, require_base
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.models.hub import fetch
from fusion_bench_featcal.models.merging import MergedOnRead
from fusion_bench_featcal.models.other_files import note_on_weights, refuse_links
from fusion_bench_featcal.models.processors import (
    check_processors,
    check_tokenizers,
    has_processor,
    load_tokenizers,
    read_processor,
)
from fusion_bench_featcal.models.structure import fill
from fusion_bench_featcal.models.vocabulary import VocabularyRows
from fusion_bench_featcal.modules.models import tail_of
from fusion_bench_featcal.modules.sites import find_all_modules
from fusion_bench_featcal.settings.rules import rule_of


@dataclass(frozen=True)
class Models:
    """Base, experts and, if there is one, the merged model.

    Attributes:
        request: The request.
        base: The base, or None if there is none.
        experts: Task -> expert.
        merged: The merged model, or None if it is merged during the run.
    """

    request: Request
    base: ModelFolder | None
    experts: dict[str, ModelFolder]
    merged: ModelFolder | None

    @classmethod
    def of(cls, request: Request) -> "Models":
        """Find all models, and compare configs, shapes and a sample of the weights."""
        merged = base = None
        # raises if the rule cannot be made
        require_base(request, is_needed=rule_of(request.settings).needs_base)
        if request.merged is not None:
            merged = ModelFolder("merged", request.merged, "the merged model")
        if request.base is not None:
            base = ModelFolder("base", request.base, "--base")
            refuse_adapter(base)
        experts = {t: ModelFolder(t, path, "--expert") for t, path in request.expert.items()}
        models = cls(request, base, experts, merged)
        models._check()
        return models

    @cached_property
    def like(self) -> ModelFolder:
        """The model that defines class and structure of the calibrated one.

        This is the merged model, else the base, or an expert if the base has another head than all
        experts (a masked language model that classifiers were tuned from). For vision towers merged
        into a whole CLIP it is that CLIP.
        """
        if self.merged is not None:
            return self.merged
        assert self.base is not None
        whole = [expert for expert in self.experts.values() if not expert.is_adapter]
        named = {expert.architecture for expert in whole if expert.kind != "clip"}
        return whole[0] if len(named) == 1 and self.base.architecture not in named else self.base

    @property
    def has_heads(self) -> bool:
        """Return whether every expert has a separate head."""
        return self.like.kind in CLASSIFIERS

    def body(self, model: nn.Module) -> nn.Module:
        """Return the part of a model that experts share."""
        return body_of(model, self.like.kind)

    def without_body(self, classifier: Any) -> nn.Module:
        """Return an expert's classifier with an empty body, which frees its own."""
        setattr(classifier, body_name(classifier), self.empty_body)
        return classifier

    def with_body(self, task: str, classifier: Any, body: nn.Module) -> nn.Module:
        """Return an expert's classifier with another body, which gets the expert's tail."""
        body.load_state_dict(self.tail(task), strict=False)
        setattr(classifier, body_name(classifier), body)
        return classifier

    def tail(self, task: str) -> dict[str, Tensor]:
        """Return an expert's tensors of the body that belong to its head, such as a pooler."""
        return {name: self._runnable[task].stored(name) for name in self._tail}

    @cached_property
    def _tail(self) -> list[str]:
        """Names of the body's tensors behind the blocks that differ between experts."""
        first, *more = self._runnable.values()
        return [
            name
            for name in tail_of(self.empty_body, self._stages[-1][-1])
            if not all(torch.equal(first.stored(name), expert.stored(name)) for expert in more)
        ]

    @cached_property
    def _stages(self) -> list[list[str]]:
        """The blocks of the calibrated part."""
        return stages_of(self.family, self.empty_body)

    @cached_property
    def family(self) -> Family:
        """The family of the calibrated part."""
        return family_of(self.request.settings.family, self.empty_body, self.like.kind)

    @cached_property
    def empty_body(self) -> nn.Module:
        """The calibrated part without weights, on the meta device."""
        return self.body(self.like.empty)

    @cached_property
    def sources(self) -> dict[str, ExpertSource]:
        """Task -> its expert's weights, cut to the merged model's vocabulary."""
        return {task: self._source(expert) for task, expert in self.experts.items()}

    @cached_property
    def base_source(self) -> ExpertSource | None:
        """The base's weights. A tail that it lacks (a pooler) is the experts' average."""
        if self.base is None:
            return None
        source, body = self._source(self.base), self.empty_body
        try:
            LazyModel(self.base.label, source, body)
        except CalibrationError:
            if self.like.kind not in (*CLASSIFIERS, IMAGE_ENCODER):
                raise
            experts = self._runnable.values()
            spare = {
                name: torch.stack([expert.stored(name).double() for expert in experts]).mean(0)
                for name in tail_of(body, self._stages[-1][-1])
            }
            return InMemoryExpert(self.base.load(type(body), spare))
        return source

    @cached_property
    def _like_source(self) -> ExpertSource:
        return self.like.source(self.base)

    def _source(self, model: ModelFolder) -> ExpertSource:
        """Return a model's weights, with as many rows per token as the calibrated model has."""
        if model is self.like:
            return self._like_source
        whole = self.base if model.is_adapter and self.base is not None else model
        before, after = ((m.config or {}).get("vocab_size") for m in (whole, self.like))
        if before is None or after is None or before == after:
            return model.source(self.base, self.empty_body)
        source = model.source(self.base)
        return VocabularyRows(source, after, self._like_source)

    @cached_property
    def _runnable(self) -> dict[str, LazyModel]:
        """Task -> expert, with all names and shapes checked."""
        body, sources = self.empty_body, self.sources.items()
        try:
            return {task: LazyModel(f"expert {task!r}", source, body) for task, source in sources}
        except CalibrationError as error:  # without MERGED the structure is the base's
            words = "the merged model" if self.merged is not None else self.like.label
            raise CalibrationError(str(error).replace("the merged model", words)) from error

    @cached_property
    def merged_source(self) -> ExpertSource:
        """Weights of the merged model's body. Without MERGED they are merged on reading."""
        source = self._source(self.like)
        if self.merged is not None:
            return source
        assert self.base_source is not None
        name, scale = self.request.merger
        like = LazyModel(self.like.label, source, self.empty_body)
        base = self._opened_base(self.base_source)
        experts = list(self._runnable.values())
        return MergedOnRead(like, base, experts, None if name == "simple_average" else scale)

    def load(self, body: ExpertSource) -> nn.Module:
        """Return the merged model with the given weights of its body, on the device."""

        def load() -> nn.Module:
            model = self.like.load()
            if self.merged is None or body is not self.merged_source:  # else already loaded
                fill(self.body(model), body)
            return model

        return self._on_device(body, load)

    def load_expert(self, task: str) -> nn.Module:
        """Return an expert on the device, as `load` does."""
        expert = self.experts[task]
        return self._on_device(self.sources[task], lambda: expert.loaded_with(self.base))

    def _on_device(self, body: ExpertSource, load: Callable[[], nn.Module]) -> nn.Module:
        """Return a model in memory, or offloaded if it is a language model too large for that."""
        device = torch.device(self.request.device)
        free = free_bytes(device)
        is_large = free is not None and 2 * self.like.size >= free
        if is_large and self.like.kind in LANGUAGE_MODELS:
            return offloaded(LazyModel("the model", body, self.empty_body, device=device), device)
        return load().to(device)

    @property
    def ends(self) -> frozenset[int]:
        """End tokens that any of the models declares."""
        models = filter(None, (self.like, self.base, *self.experts.values()))
        return end_tokens(*(c for m in models for c in (m.config, m.generation_config)))

    @property
    def notes(self) -> list[str]:
        """Sentences on the models, and on experts that may not belong together."""
        adapters = [task for task, expert in self.experts.items() if expert.is_adapter]
        notes = notes_on_inputs(self.request, adapters)
        notes += [] if self.merged is None else note_on_weights(self.merged.folder)
        owner = next(
            (e for e in self.experts.values() if str(e.folder) == self.processor_folder), None
        )
        if owner is not None and owner is not self.like and self.request.tokenizer is None:
            kind = "tokenizer" if self.like.kind in TEXT_MODELS else "image processor"
            notes.append(f"the {kind} is that of {owner.label}, as MERGED and --base have none")
        if self.base_source is None:
            return notes
        named = {f"expert {task}": expert for task, expert in self._runnable.items()}
        if self.merged is not None:
            merged = self._source(self.merged)
            named["the merged model"] = LazyModel(self.merged.label, merged, self.empty_body)
        return notes + notes_on_experts(named, self._opened_base(self.base_source))

    def _opened_base(self, source: ExpertSource) -> LazyModel:
        assert self.base is not None
        return LazyModel(self.base.label, source, self.empty_body)

    def _check(self) -> None:
        like, settings = self.like, self.request.settings
        norm = rule_of(settings).calibrate_norm
        find_all_modules(self.empty_body, self._stages, settings.modules, calibrate_norm=norm)
        refuse_links(like.folder)
        whole = {task: expert for task, expert in self.experts.items() if not expert.is_adapter}
        models = [like, *filter(None, [self.base]), *whole.values()]
        for model in models:
            name = f"expert {model.name!r}" if model.name in whole else model.label
            check_same_function(name, model.config, like.config, other=like.label)
        for expert in whole.values():
            if expert.kind != like.kind:
                raise ValueError(
                    f"{expert.label} is of kind {expert.kind}, and {like.label} of kind "
                    f"{like.kind}: experts must share it. Check its folder"
                )
        _ = self._runnable, self.base_source
        if self.has_heads or not self.request.no_eval:  # they are loaded after the calibration
            for model in (like, *whole.values()):
                model.check_loading()

    def processor(self) -> Any:
        """The tokenizer or image processor. For a whole CLIP, both in one object."""
        from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

        kind: Any = AutoTokenizer
        if self.like.kind not in TEXT_MODELS:
            is_whole_clip = self.like.architecture.__name__ == "CLIPModel"
            kind = AutoProcessor if is_whole_clip else AutoImageProcessor
        loaded = read_processor(Path(self.processor_folder), kind, "--tokenizer")
        option = self.processor_option
        if kind is not AutoTokenizer:
            check_processors(loaded, option, self._folders_of_experts)
            channels = getattr(self.like.empty.config, "num_channels", None)
            check_channels(loaded, channels, self.like.label)
        else:
            check_tokenizers(loaded, option, self.expert_tokenizers)
            loaded.padding_side = "right"
            if self.request.chat_template is not None:
                file = Path(self.request.chat_template).expanduser()
                loaded.chat_template = file.read_text("utf-8")
        return loaded

    @property
    def processor_option(self) -> str:
        """The tokenizer or image processor in the words of messages."""
        return f"--tokenizer {self.processor_folder}"

    @property
    def _folders_of_experts(self) -> dict[str, Path]:
        return {expert.label: expert.folder for expert in self.experts.values()}

    @cached_property
    def expert_tokenizers(self) -> Mapping[str, Any]:
        """An expert in the words of messages -> its tokenizer, if it has one."""
        return load_tokenizers(self._folders_of_experts)

    @cached_property
    def processor_folder(self) -> str:
        """Folder of the tokenizer or image processor, of the first model that has one."""
        named, is_image = self.request.tokenizer, self.like.kind not in TEXT_MODELS
        if named is not None:
            return str(fetch(named, f"--tokenizer {named}", weights=False))
        for model in (self.like, self.base, *self.experts.values()):
            if model is not None and has_processor(model.folder, is_image=is_image):
                return str(model.folder)
        return str(self.like.folder)
