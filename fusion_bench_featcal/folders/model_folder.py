"""One model of `featcal calibrate`: the option that names it, and its kind."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

from torch import nn

from fusion_bench_featcal.data.labels import are_unnamed
from fusion_bench_featcal.encoders.naming import class_of
from fusion_bench_featcal.experts.model_config import complete_config
from fusion_bench_featcal.families import EveryPosition, Family, Stack, find_stack, resolve_family
from fusion_bench_featcal.families.base import SOUNDS
from fusion_bench_featcal.folders.request import option_label
from fusion_bench_featcal.models.hub import fetch
from fusion_bench_featcal.models.model_files import CLIP_CLASSES, ModelFiles, base_models

Kind = Literal[
    "causal", "seq2seq", "speech", "text classifier", "image classifier", "clip", "encoder",
    "image encoder",
]  # fmt: skip
"""Kind of a model. It determines inputs and evaluation."""
SPEECH: Kind = "speech"
TEXT_CLASSIFIER: Kind = "text classifier"
IMAGE_CLASSIFIER: Kind = "image classifier"
ENCODER: Kind = "encoder"
IMAGE_ENCODER: Kind = "image encoder"
LANGUAGE_MODELS = ("causal", "seq2seq")
TEXT_MODELS = (*LANGUAGE_MODELS, SPEECH, TEXT_CLASSIFIER)
CLASSIFIERS = (TEXT_CLASSIFIER, IMAGE_CLASSIFIER)
_INPUTS: dict[str, Kind] = {"input_ids": ENCODER, "pixel_values": IMAGE_ENCODER}


class ModelFolder(ModelFiles):
    """A model's folder, whole or with an adapter. A hub id is downloaded.

    Attributes:
        option: The option that names it: `MERGED`, `--base`, `--expert TASK` or `--text-tower`.
        name: The task of an expert, else `base` or `merged`.
        encoder_class: The class of sentence-transformers that its files name, or None.
    """

    def __init__(self, option: str, location: str) -> None:
        """Find the folder, and check config and headers of files.

        Files of encoders are not checked, because sentence-transformers opens them.

        Args:
            option: As the attribute.
            location: Folder or hub id.
        """
        self.option, label = option, option_label(option, location)
        self.name = option.partition(" ")[2] or option.removeprefix("--").lower()
        super().__init__(fetch(location, label), label)
        if not self.folder.is_dir():
            raise ValueError(f"{label} is a file: name the folder that the model is in")
        self.encoder_class = class_of(self.folder, self.config)
        if not self.encoder_class:
            self.check()

    @property
    def is_text_classifier(self) -> bool:
        """True for a class with a head for whole texts."""
        return self.architecture.__name__.endswith("ForSequenceClassification")

    @property
    def is_language_model(self) -> bool:
        """True for a class that writes texts, and reads texts with or without images."""
        architecture: Any = self.architecture
        return architecture.can_generate() and architecture.main_input_name == "input_ids"

    @property
    def has_one_score(self) -> bool:
        """True for a classifier with one output, unless it was trained as a regression."""
        config = self.config or {}
        outputs = config.get("num_labels"), len(config.get("id2label") or ())
        return 1 in outputs and config.get("problem_type") != "regression"

    @cached_property
    def kind(self) -> Kind:
        """The kind of the model."""
        architecture: Any = self.architecture
        name, inputs = architecture.__name__, architecture.main_input_name
        has_decoder = (complete_config(self.config) or {}).get("is_encoder_decoder")
        if name in CLIP_CLASSES:
            return "clip"
        for kind, names in _classifiers().items():
            classes = ((one,) if isinstance(one, str) else one for one in names.values())
            if any(name in several for several in classes):
                if kind == TEXT_CLASSIFIER and has_decoder:
                    raise ValueError(
                        f"{self.label} is a {name}, an encoder-decoder with a classifier. featcal "
                        "calibrate takes encoder-decoders only as language models"
                    )
                return kind
        if self.is_language_model:
            return "seq2seq" if has_decoder else "causal"
        if inputs in SOUNDS and has_decoder and architecture.can_generate():
            return SPEECH
        if name in base_models().values() and inputs in _INPUTS and not has_decoder:
            return _INPUTS[inputs]
        raise ValueError(
            f"{self.label} is a {name}; featcal calibrate takes language models, speech models, "
            "text and image classifiers and encoders, and CLIP models. Calibrate others with "
            "fusion_bench method=featcal"
        )


def refuse_adapter(base: ModelFiles) -> None:
    """Refuse an adapter as the base."""
    if base.is_adapter:
        raise ValueError(f"{base.label} is an adapter: name the model that it changes")


def body_of(model: nn.Module, kind: Kind) -> nn.Module:
    """Return the part of a model that is calibrated, which all experts share.

    This is a classifier's body, CLIP's vision tower, or the whole of a language model.
    """
    return model.get_submodule(body_name(model)) if kind in CLASSIFIERS else model


def body_name(classifier: Any) -> str:
    """Return the name of the part of a classifier in front of its head.

    Raises:
        ValueError: If it has no such part.
    """
    prefix = classifier.base_model_prefix
    if hasattr(classifier, prefix):
        return prefix
    # The prefix of SigLIP's and CLIP's image classifiers is that of both towers.
    for name, child in classifier.named_children():
        if hasattr(child, "config") and find_stack(child):
            return name
    raise ValueError(
        f"{type(classifier).__name__} has no model before its head that experts can share "
        f"({prefix}, or one with a list of blocks). Calibrate it with fusion_bench method=featcal"
    )


def family_of(setting: Any, body: Any, kind: Kind) -> Family:
    """Return the family of the calibrated part.

    A classifier's body does not show which positions its head reads. The heads of DINOv2 and CLIP
    average all positions, while the pooled output of their bodies is the class token.
    """
    family = resolve_family(setting, body)
    if kind == IMAGE_CLASSIFIER and isinstance(family, Stack):
        return EveryPosition(family.pattern, name=family.name, compared=family.compared)
    return family


def class_names(model: ModelFolder) -> list[str]:
    """Return the class names of a model's head in the order of `id2label` in its config.

    If `id2label` has no real names, those of `label2id` are used.

    Raises:
        ValueError: If `id2label` and `label2id` give a class different indices.
    """
    config: Any = model.empty.config
    names = [str(name) for _, name in sorted(config.id2label.items())]
    indices = (model.config or {}).get("label2id")
    if not isinstance(indices, Mapping):
        return names
    if are_unnamed(names):
        ordered = sorted(indices, key=lambda name: str(indices[name]).zfill(9))
        are_numbered = [str(indices[name]) for name in ordered] == [*map(str, range(len(names)))]
        return ordered if are_numbered else names
    for index, name in enumerate(names):
        if str(indices.get(name, index)) != str(index):
            raise ValueError(
                f"{model.label}: in its config.json, {name!r} is class {index} in id2label but "
                f"{indices[name]} in label2id. Correct one of them"
            )
    return names


def _classifiers() -> dict[Kind, Any]:
    from transformers.models.auto import modeling_auto as auto

    return {
        TEXT_CLASSIFIER: auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        IMAGE_CLASSIFIER: auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    }
