"""Models of transformers in one `featcal calibrate`, compared before they are loaded."""

from collections.abc import Callable, Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.data.text_limits import declared, end_tokens
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts import ExpertSource, InMemoryExpert, LazyModel
from fusion_bench_featcal.experts.model_config import text_config
from fusion_bench_featcal.experts.similarity import notes_on_experts
from fusion_bench_featcal.experts.source import LazyTensorDict, total_bytes
from fusion_bench_featcal.experts.working_model import offloaded
from fusion_bench_featcal.families import Family, head_of, stages_of, text_tower
from fusion_bench_featcal.folders.heads import ClassifierHeads
from fusion_bench_featcal.folders.input_models import InputModels
from fusion_bench_featcal.folders.model_folder import (
    CLASSIFIERS,
    IMAGE_ENCODER,
    LANGUAGE_MODELS,
    SPEECH,
    ModelFolder,
    body_of,
    family_of,
    refuse_adapter,
)
from fusion_bench_featcal.folders.opened import notes_on_inputs, require_base
from fusion_bench_featcal.folders.shared_processor import SharedProcessor
from fusion_bench_featcal.models.configs import compare_configs
from fusion_bench_featcal.models.merging import MergedOnRead
from fusion_bench_featcal.models.structure import fill
from fusion_bench_featcal.models.vocabulary import VocabularyRows
from fusion_bench_featcal.modules.block_modules import find_all_modules
from fusion_bench_featcal.modules.models import tail_of
from fusion_bench_featcal.run.as_merged import left_as_merged, left_by_names
from fusion_bench_featcal.run.devices import free_bytes
from fusion_bench_featcal.run.log import AsMerged
from fusion_bench_featcal.run.result import CalibrationResult
from fusion_bench_featcal.settings import FeatCalSettings


class TransformersModels:
    """The models of one request. Tensors are read when they are needed.

    Attributes:
        merged: The merged model, or None if it is merged during the run.
        base: The base, or None.
        experts: Task -> expert.
    """

    def __init__(self, inputs: InputModels) -> None:
        """Compare configs, names and shapes of all models.

        Raises:
            CalibrationError: If they do not fit, or one cannot be loaded.
            ValueError: If the base is missing or an adapter, experts are of another kind, or a
                setting does not fit.
        """
        self._inputs, self._request = inputs, inputs.request
        self.merged, self.base, self.experts = inputs.merged, inputs.base, inputs.experts
        rule = self._request.settings.rule_object
        require_base(self._request)
        if self.base is not None:
            refuse_adapter(self.base)
        for model in inputs.by_name.values():
            if model.encoder_class:  # others are checked already
                model.check()
        patterns = self._request.settings.modules
        norm = rule.calibrate_norm
        self._modules = find_all_modules(
            self.empty_body, self._stages, patterns, calibrate_norm=norm
        )
        self._compare()

    def _compare(self) -> None:
        """Refuse models that do not fit each other, or that cannot be loaded."""
        reference = self.like
        reference.folder_files.small_files()
        whole = {task: expert for task, expert in self.experts.items() if not expert.is_adapter}
        configs = {m.label: m.config for m in filter(None, (reference, self.base))}
        compare_configs(configs | {f"expert {task!r}": e.config for task, e in whole.items()})
        for expert in whole.values():
            if expert.kind != reference.kind:
                raise ValueError(
                    f"{expert.label} is of kind {expert.kind}, and {reference.label} of kind "
                    f"{reference.kind}: experts must share it. Check its folder"
                )
        _ = self._opened_experts, self._opened_base
        if (
            self.heads is not None or not self._request.no_eval
        ):  # they are loaded after the calibration
            for model in (reference, *whole.values()):
                model.check_loading(() if model is reference else self._idle)

    # --- structure ---

    @cached_property
    def like(self) -> ModelFolder:
        """The model that defines class and structure of the calibrated one.

        This is the merged model, else the base, or an expert if the base has another head than all
        experts (a masked language model that classifiers were tuned from). For vision towers merged
        into a whole CLIP it is that CLIP, and for text models of one with other towers that one.
        """
        if self.merged is not None:
            return self.merged
        assert self.base is not None
        whole = [expert for expert in self.experts.values() if not expert.is_adapter]
        named = {expert.architecture for expert in whole if expert.kind != "clip"}
        if len(named) != 1 or self.base.architecture in named:
            return self.base
        are_language_models = all(model.is_language_model for model in (self.base, whole[0]))
        return self.base if are_language_models else whole[0]

    @cached_property
    def empty_body(self) -> nn.Module:
        """The part that experts share, which is calibrated, without weights."""
        return self.body(self.like.empty)

    def body(self, model: nn.Module) -> nn.Module:
        """Return the part of a model that experts share."""
        return body_of(model, self.like.kind)

    @cached_property
    def family(self) -> Family:
        """The family of the calibrated part."""
        return family_of(self._request.settings.family, self.empty_body, self.like.kind)

    @cached_property
    def _stages(self) -> list[list[str]]:
        """The blocks of the calibrated part."""
        return stages_of(self.family, self.empty_body)

    @cached_property
    def heads(self) -> ClassifierHeads | None:
        """The experts' heads, or None if all tasks share one."""
        if self.like.kind not in CLASSIFIERS:
            return None
        return ClassifierHeads(self.like.name, self.empty_body, self.tail)

    def tail(self, task: str) -> dict[str, Tensor]:
        """Return an expert's tensors of the body that belong to its head, such as a pooler."""
        return {name: self._opened_experts[task].stored(name) for name in self._tail}

    @cached_property
    def _tail(self) -> list[str]:
        """Names of the body's tensors behind the blocks that differ between experts."""
        first, *more = self._opened_experts.values()
        return [
            name
            for name in tail_of(self.empty_body, self._stages)
            if not all(torch.equal(first.stored(name), expert.stored(name)) for expert in more)
        ]

    # --- weights ---

    @cached_property
    def stored(self) -> ExpertSource:
        """Weights of `like`, by the names of its files if these can be read tensor by tensor."""
        return self.like.source(self.base)

    @cached_property
    def _sources(self) -> dict[str, ExpertSource]:
        """Name -> a model's weights, with as many rows per token as the calibrated model has."""
        sources = {self.like.name: self.stored}
        for name, model in self._inputs.by_name.items():
            whole = self.base if model.is_adapter and self.base is not None else model
            configs = (text_config(m.config) for m in (whole, self.like))
            before, after = (config.get("vocab_size") for config in configs)
            if model is self.like:
                continue
            if before is None or after is None or before == after:
                sources[name] = model.source(self.base, self.empty_body, self._idle)
            else:
                sources[name] = VocabularyRows(model.source(self.base), after, self.stored)
        return sources

    @cached_property
    def _opened_experts(self) -> dict[str, LazyModel]:
        """Task -> expert, with all names and shapes checked."""
        owner = "the merged model" if self.merged is not None else self.like.label
        return {
            task: LazyModel(
                f"expert {task!r}",
                self._sources[task],
                self.empty_body,
                optional=self._idle,
                owner=owner,
            )
            for task in self.experts
        }

    @cached_property
    def _idle(self) -> LazyTensorDict:
        """The merged model's tensors of towers that texts do not run, which others may lack."""
        body, head = self.empty_body, head_of(self.empty_body)
        names = tail_of(body, self._stages) if text_tower(body) else []
        tensors = body.state_dict(keep_vars=True)
        idle = [n for n in names if head is None or tensors[n] is not head.weight]
        merged = LazyModel(self.like.label, self.stored, body)
        return LazyTensorDict(merged.stored, {name: name for name in idle})

    @cached_property
    def _opened_base(self) -> LazyModel | None:
        """The base. A tail that it lacks (a pooler) is the experts' average."""
        if self.base is None:
            return None
        body, source = self.empty_body, self._sources["base"]
        try:
            return LazyModel(self.base.label, source, body, optional=self._idle)
        except CalibrationError:
            if self.like.kind not in (*CLASSIFIERS, IMAGE_ENCODER):
                raise
        experts = self._opened_experts.values()
        spare = {
            name: torch.stack([expert.stored(name).double() for expert in experts]).mean(0)
            for name in tail_of(body, self._stages)
        }
        loaded = InMemoryExpert(self.base.load(type(body), spare))
        return LazyModel(self.base.label, loaded, body)

    @cached_property
    def _merged_source(self) -> ExpertSource:
        """Weights of the merged model's body. Without MERGED they are merged on reading."""
        if self.merged is not None:
            return self.stored
        assert self._opened_base is not None
        name, scale = self._request.merger
        reference = LazyModel(self.like.label, self.stored, self.empty_body)
        experts = [*self._opened_experts.values()]
        scale = None if name == "simple_average" else scale
        return MergedOnRead(reference, self._opened_base, experts, scale)

    # --- what a run does with them ---

    @property
    def read(self) -> int:
        """Bytes of all experts."""
        return sum(total_bytes(self._sources[task]) for task in self.experts)

    def load_merged(self) -> nn.Module:
        """Return the merged model on the device."""
        return self.load(self._merged_source)

    def load(self, body: ExpertSource) -> nn.Module:
        """Return the merged model with the given weights of its body, on the device."""

        def load() -> nn.Module:
            model = self.like.load()
            if self.merged is None or body is not self._merged_source:  # else already loaded
                fill(self.body(model), body)
            return model

        return self._on_device(body, load)

    def load_expert(self, task: str) -> nn.Module:
        """Return an expert on the device."""
        expert = self.experts[task]
        return self._on_device(
            self._sources[task], lambda: expert.loaded_with(self.base, self._idle)
        )

    def _on_device(self, body: ExpertSource, load: Callable[[], nn.Module]) -> nn.Module:
        """Return a model in memory, or offloaded if it is a language model too large for that."""
        device = torch.device(self._request.device)
        free = free_bytes(device)
        is_large = free is not None and 2 * self.like.size >= free
        if is_large and self.like.kind in LANGUAGE_MODELS:
            parts: Any = {"device": device, "optional": self._idle}
            return offloaded(LazyModel("the model", body, self.empty_body, **parts), device)
        return load().to(device)

    def calibrate(self, settings: FeatCalSettings, batches: Mapping[str, Any]) -> CalibrationResult:
        """Calibrate the merged model with each task's batches."""
        base = self._opened_base
        return calibrate(
            self.empty_body,
            None if base is None else base.source,
            {task: self._sources[task] for task in self.experts},
            batches,
            settings,
            self.family,
            device=self._request.device,
            merged_weights=self._merged_source,
        )

    def refuse_text_parts(self) -> None:
        """Refuse experts and a base without the towers that images run.

        Raises:
            ValueError: Naming the model.
        """
        opened = {self._inputs.by_name[n].label: m for n, m in self._opened_experts.items()}
        if self.base is not None and self._opened_base is not None:
            opened[self.base.label] = self._opened_base
        for label, model in opened.items():
            if any(name not in model.keys for name in self._idle):
                raise ValueError(
                    f"{label} lacks the tower of {self.like.label}, which rows with images "
                    "calibrate: name a whole model, or leave images out of all tasks"
                )

    def left_as_merged(self) -> AsMerged:
        """Return the modules that stay as merged. A read budget forbids to compare experts."""
        body, blocks = self.empty_body, (self._stages, self._modules)
        if self._request.settings.expert_read_budget is not None:
            return left_by_names(body, *blocks)
        merged = LazyModel("the merged model", self._merged_source, body)
        as_merged = left_as_merged(merged, self._opened_experts.values(), *blocks)
        return as_merged if self.heads is None else as_merged.without(self._tail)

    # --- what is known of them ---

    @cached_property
    def processor(self) -> SharedProcessor:
        """The tokenizer or image processor of all inputs."""
        return SharedProcessor(self._inputs, self.like)

    @property
    def ends(self) -> frozenset[int]:
        """End tokens that any of the models declares."""
        return end_tokens(*self._inputs.by_name.values())

    @property
    def unshared_ends(self) -> str:
        """A sentence on end tokens that the saved model gets from other models, if there are any.

        transformers reads those of config.json only where there is no generation_config.json.
        """
        generation, like = self.like.generation_config, self.like
        own = end_tokens(like if generation is None else SimpleNamespace(config=generation))
        if like.kind not in (*LANGUAGE_MODELS, SPEECH) or self.ends <= own:
            return ""
        every, alone = (", ".join(map(str, sorted(ends))) for ends in (self.ends, own))
        return (
            f"the saved model stops at the end tokens of all models ({every}), as in this run; "
            f"{like.label} declares {alone or 'none'}"
        )

    @property
    def start(self) -> int | None:
        """First token of answers that any of the models declares."""
        return declared("forced_bos_token_id", *self._inputs.by_name.values())

    @property
    def notes(self) -> list[str]:
        """Sentences on the models, and on experts that may not belong together."""
        parts = filter(None, [self.processor.note, self.unshared_ends])
        notes = [*notes_on_inputs(self._inputs), *parts]
        if self._opened_base is None:
            return notes
        labelled = {f"expert {task}": expert for task, expert in self._opened_experts.items()}
        if self.merged is not None:
            merged = LazyModel(self.merged.label, self.stored, self.empty_body)
            labelled["the merged model"] = merged
        return notes + notes_on_experts(labelled, self._opened_base)
