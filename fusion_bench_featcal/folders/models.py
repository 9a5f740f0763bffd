"""All models of one `featcal calibrate`, compared with each other before any is loaded."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.data.tokenizers import differing_tokens
from fusion_bench_featcal.error_block import first_line
from fusion_bench_featcal.experts import ExpertModel, ExpertSource
from fusion_bench_featcal.experts.far_experts import base_sample, experts_alike, task_vectors
from fusion_bench_featcal.experts.model_config import check_same_function, read_config
from fusion_bench_featcal.experts.vocabulary import CommonRows
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.folders.completed import Completed
from fusion_bench_featcal.folders.model_folder import ModelFolder, body_of
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.hub_files import fetch
from fusion_bench_featcal.modules.sites import find_all_modules
from fusion_bench_featcal.rules import rule_of

UNRELATED = 1.0
"""Distance from the base, in norms of the base, that models tuned from it do not have: two models
of separate trainings lie about 1.4 apart."""


@dataclass(frozen=True)
class Models:
    """Base, experts and, if there is one, the merged model.

    Attributes:
        request: The request.
        base: The base; None: there is none.
        experts: Task -> expert.
        merged: The merged model; None: it is merged on the way.
        notes: Sentences on models that hardly belong together.
    """

    request: Request
    base: ModelFolder | None
    experts: dict[str, ModelFolder]
    merged: ModelFolder | None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request) -> "Models":
        """Find all models, and compare configs, shapes, tokenizers and a sample of the weights.

        Raises:
            ValueError: If a model is missing, or cannot be one of these.
            CalibrationError: If a model differs from the others, or cannot be calibrated.
        """
        merged = None
        if request.merged is not None:
            merged = ModelFolder("merged", request.merged, "the merged model")
        base = None if request.base is None else ModelFolder("base", request.base, "--base")
        if base is None and (merged is None or request.settings.needs_base):
            instead = "" if merged is None else ", or give --set anchor_rho=1"
            raise ValueError(
                f"--base is missing: name the model that the experts were tuned from{instead}"
            )
        if base is not None and base.is_adapter:
            raise ValueError(f"{base.option} is a LoRA adapter: name the model that it changes")
        experts = {
            task: ModelFolder(task, location, "--expert")
            for task, location in request.expert.items()
        }
        models = cls(request, base, experts, merged)
        models._note_names()
        models._check()
        return models

    @cached_property
    def home(self) -> ModelFolder:
        """The model whose class and structure the calibrated one has.

        The merged one; else the base; or an expert, where the base has another head than all of
        them (a masked language model, from which classifiers were tuned). A whole CLIP stays the
        home of vision towers, which are merged into it.
        """
        if self.merged is not None:
            return self.merged
        assert self.base is not None
        whole = [expert for expert in self.experts.values() if not expert.is_adapter]
        named = {expert.architecture for expert in whole if expert.kind != "clip"}
        return whole[0] if len(named) == 1 and self.base.architecture not in named else self.base

    @cached_property
    def empty_body(self) -> nn.Module:
        """The calibrated part without weights, on the meta device."""
        return body_of(self.home.empty, self.home.kind)

    @cached_property
    def sources(self) -> dict[str, ExpertSource]:
        """Task -> its expert's weights, with no more tokens than the merged model knows."""
        return {task: self._source(expert) for task, expert in self.experts.items()}

    @cached_property
    def base_source(self) -> ExpertSource | None:
        """The base's weights; what it lacks (a classifier's pooler) is the first expert's."""
        if self.base is None:
            return None
        own, other = self._source(self.base), next(iter(self.sources.values()))
        return own if other.names() <= own.names() else Completed(own, other)

    def _source(self, model: ModelFolder) -> ExpertSource:
        source, rows = model.source(self.base), (self.home.config or {}).get("vocab_size")
        own = (model.config or {}).get("vocab_size")
        return CommonRows(source, rows) if own and rows and own > rows else source

    def load(self) -> nn.Module:
        """Load the merged model, or merge base and experts tensor by tensor."""
        model = self.home.load()
        if self.merged is None:
            self._merge(body_of(model, self.home.kind))
        return model

    @torch.no_grad()
    def _merge(self, body: nn.Module) -> None:
        experts = [ExpertModel(task, source, body) for task, source in self.sources.items()]
        base = ExpertModel("base", self.base_source, body, role="model")  # type: ignore[arg-type]
        merged: set[int] = set()
        for name, own in body.state_dict(keep_vars=True).items():
            if id(own) not in merged and own.is_floating_point():
                merged.add(id(own))  # a tied matrix is merged once
                tensors = [expert.tensor(name).float() for expert in experts]
                own.copy_(self._merged(base.tensor(name).float(), tensors))

    def _merged(self, base: Tensor, experts: list[Tensor]) -> Tensor:
        if self.request.merger[0] == "simple_average":
            return torch.stack(experts).mean(dim=0)
        return base + self.request.merger[1] * sum(expert - base for expert in experts)

    def load_expert(self, task: str) -> nn.Module:
        """Load an expert whole."""
        return self.experts[task].loaded_with(self.base)

    def _note_names(self) -> None:
        for name, value in (("merge", self.request.merge), ("base", self.request.base)):
            self.notes.extend([f"{name}: {value}"] if value else [])
        listed = (
            f"{task}={self.request.expert[task]}{' (LoRA adapter)' if expert.is_adapter else ''}"
            for task, expert in self.experts.items()
        )
        self.notes.append(f"experts: {', '.join(listed)}")

    def _check(self) -> None:
        home, settings = self.home, self.request.settings
        kind = home.kind
        body = self.empty_body
        stages = resolve_family(settings.family, body).stages(body)
        find_all_modules(body, stages, settings, calibrate_norm=rule_of(settings).calibrate_norm)
        whole = [m for m in (self.base, *self.experts.values()) if m and not m.is_adapter]
        for model in whole:
            role = "expert" if model.name in self.experts else "model"
            check_same_function(
                model.name,
                model.config,
                home.config,
                settings.ignore_config,
                role=role,
                other=f"the {home.name} model",
            )
            if model.name in self.experts and model.kind != kind:
                raise ValueError(f"{model.option} is a {model.kind}, {home.option} a {kind}")
        pairs: dict[str, Any] = {
            task: ExpertModel(task, source, body) for task, source in self.sources.items()
        }
        if self.base_source is not None:
            pairs["base"] = ExpertModel("base", self.base_source, body, role="model")
        if not self.request.any_base:
            self._check_distances(pairs, body)

    def _check_distances(self, pairs: dict[str, Any], body: nn.Module) -> None:
        """Refuse models that are no relatives of the base, by a sample of their weights."""
        if self.base is None:
            return
        sample, related = base_sample(pairs.pop("base")), dict(pairs)
        if self.merged is not None:
            own = ExpertModel("merged", self._source(self.merged), body, role="model")
            related = {"merged": own, **pairs}
        vectors = task_vectors(related, sample)
        norm = math.sqrt(sum(float(rows.square().sum()) for rows in sample.values()))
        for name, vector in vectors.items():
            distance = float(vector.norm()) / norm if norm else 0.0
            if distance > UNRELATED or math.isnan(distance):
                option = self.experts[name].option if name in pairs else self.home.option
                raise ValueError(
                    f"{option} was not tuned from {self.base.option}: on a sample of weights it "
                    f"lies {distance:.2f} times the base's own norm away (relatives: below 0.5). "
                    "Check --base, or give --any-base"
                )
        vectors.pop("merged", None)
        self.notes.extend(experts_alike(vectors, self.base.option))

    def tokenizer(self) -> Any:
        """The tokenizer of the first model that has one, with texts padded at their end.

        Raises:
            ValueError: If there is none, or an expert has another.
        """
        from transformers import AutoTokenizer

        place = self.processor_folder
        try:
            read_config(Path(place))
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        except Exception as error:  # whatever the tokenizer's own library raises
            # without its files the library's own words say nothing
            cause = f" ({first_line(error)})" if any(Path(place).glob("*token*")) else ""
            raise ValueError(f"no tokenizer in {place}{cause}: name one by --tokenizer") from error
        for expert in self.experts.values():
            differing = differing_tokens(tokenizer, expert.folder)
            if differing:
                raise ValueError(
                    f"{expert.option} has another tokenizer than {place}: {differing}. Experts "
                    "must share one; check --tokenizer"
                )
        tokenizer.padding_side = "right"
        if self.request.chat_template is not None:
            template = Path(self.request.chat_template).expanduser()
            tokenizer.chat_template = template.read_text("utf-8")
        return tokenizer

    def image_processor(self) -> Any:
        """The image processor of the merged model, or of the base; a whole CLIP's with tokenizer.

        Raises:
            ValueError: If there is none.
        """
        from transformers import AutoImageProcessor, AutoProcessor

        place = self.processor_folder
        is_whole = self.home.architecture.__name__ == "CLIPModel"
        try:
            kind: Any = AutoProcessor if is_whole else AutoImageProcessor
            return kind.from_pretrained(place, trust_remote_code=False)
        except Exception as error:  # whatever its class raises
            raise ValueError(
                f"no image processor in {place} ({first_line(error)}): name a folder "
                "with preprocessor_config.json by --tokenizer"
            ) from error

    @cached_property
    def processor_folder(self) -> str:
        """Folder of the tokenizer or image processor."""
        named = self.request.tokenizer
        if named is not None:
            return str(fetch(named, f"--tokenizer {named}", weights=False))
        names = ("tokenizer_config.json", "tokenizer.json", "preprocessor_config.json")
        names += ("processor_config.json",)  # transformers 5
        for model in (self.home, self.base, *self.experts.values()):
            if model is not None and any((model.folder / name).is_file() for name in names):
                return str(model.folder)
        return str(self.home.folder)
