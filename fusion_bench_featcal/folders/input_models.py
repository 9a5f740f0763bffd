"""Folders of the models of one `featcal calibrate`. Each is looked up and opened once."""

from functools import cached_property
from pathlib import Path

from fusion_bench_featcal.encoders.naming import DEFAULT, RERANKER
from fusion_bench_featcal.folders.model_folder import ENCODER, ModelFolder
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.models.hub import fetch_all


class InputModels:
    """Merged model, experts and base of a request.

    Attributes:
        request: The request.
        by_name: Name (`merged`, a task, `base`) -> its folder. Names of absent models are missing.
        merged: The merged model, or None if it is merged during the run.
        base: The base, or None.
        experts: Task -> expert.
    """

    def __init__(self, request: Request) -> None:
        """Find all models. Models of the hub are downloaded.

        Raises:
            CalibrationError: If a model is missing or damaged.
            ValueError: If one is not a folder.
        """
        self.request = request
        models = (ModelFolder(*pair) for pair in request.model_options.items())
        self.by_name = by_name = {model.name: model for model in models}
        self.merged, self.base = by_name.get("merged"), by_name.get("base")
        self.experts = {task: by_name[task] for task in request.expert}

    @cached_property
    def text_tower(self) -> ModelFolder | None:
        """The whole CLIP for zero-shot heads that an option names, or None."""
        location = self.request.text_tower
        return None if location is None else ModelFolder("--text-tower", location)

    @cached_property
    def processor_folder(self) -> Path | None:
        """The folder of the tokenizer or image processor that an option names, or None."""
        return next(iter(fetch_all(self.request.processors, weights=False).values()), None)

    @property
    def whole(self) -> list[ModelFolder]:
        """All models that are no adapters."""
        return [model for model in self.by_name.values() if not model.is_adapter]

    @cached_property
    def encoder_class(self) -> str | None:
        """The class of sentence-transformers that opens all models, or None for transformers.

        1. The merged model decides, if it names a class.
        2. If it names none, as mergekit writes it, the other models decide. Their class opens it
           only if both are classifiers, or neither is one.
        3. If no model names a class, those without a head are embedding models, and classifiers
           with one output are rerankers.
        """
        if self.merged is not None and self.merged.encoder_class:
            return self.merged.encoder_class
        if not (whole := self.whole):
            return None
        classes = {model.encoder_class for model in self.by_name.values()} - {None}
        if len(classes) == 1 and all(model.encoder_class for model in whole):
            return classes.pop()
        first, is_classifier = whole[0], whole[0].is_text_classifier
        if len(classes) == 1:
            name = classes.pop()
            return name if is_classifier == (name == RERANKER) else None
        if classes or (not is_classifier and first.kind != ENCODER):
            return None
        if is_classifier:
            return RERANKER if first.has_one_score else None
        experts = (model for model in whole[1:] if model is not self.base)
        return None if any(model.is_text_classifier for model in experts) else DEFAULT
