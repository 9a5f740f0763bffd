"""The tokenizer or processor of a pool's inputs."""

from collections.abc import Mapping
from typing import Any

from fusion_bench import instantiate
from omegaconf import OmegaConf
from torch import nn
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, CLIPProcessor

from fusion_bench_featcal.data.loading import unloadable
from fusion_bench_featcal.data.pictures import check_channels
from fusion_bench_featcal.data.text_samples import (
    CausalTextEncoder,
    ClassifierTextEncoder,
    Seq2SeqTextEncoder,
    TextEncoder,
)
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.fusionbench.pool_models import NAME, PoolModels
from fusion_bench_featcal.models.hub import fetch, note_data_set
from fusion_bench_featcal.models.processors import check_processors, load_tokenizers, read_processor

_SPEECH = "SpeechPool"
# By name, because importing FusionBench's pools of language models takes seconds.
_TEXT_ENCODERS: Mapping[str, type[TextEncoder]] = {
    "Seq2SeqLMPool": Seq2SeqTextEncoder,
    _SPEECH: Seq2SeqTextEncoder,
    "CausalLMPool": CausalTextEncoder,
    "SequenceClassificationModelPool": ClassifierTextEncoder,
    "GPT2ForSequenceClassificationPool": ClassifierTextEncoder,
}


def text_encoder_class(modelpool: object) -> type[TextEncoder] | None:
    """Return the class that converts texts for a pool's models, or None if they read no texts.

    The pool's class decides, or the nearest parent that is known.
    """
    names = (parent.__name__ for parent in type(modelpool).__mro__)
    return next((_TEXT_ENCODERS[name] for name in names if name in _TEXT_ENCODERS), None)


def generates_text(modelpool: object) -> bool:
    """Return whether a pool has models that generate text."""
    encoder_class = text_encoder_class(modelpool)
    return encoder_class is not None and encoder_class.generates_text


def is_of_speech(modelpool: object) -> bool:
    """Return whether a pool has speech models, whose texts are transcripts of audio data."""
    return any(parent.__name__ == _SPEECH for parent in type(modelpool).__mro__)


def load_input_processor(models: PoolModels) -> Any:
    """Load the tokenizer or processor that converts a pool's data to inputs of its models.

    If the config of a pool of image classifiers has no processor, that of the base is loaded.

    Raises:
        CalibrationError: If there is no processor, it cannot be loaded, or an expert's processor
            differs.
    """
    modelpool = models.pool
    stored = {name: expert.folders for name, expert in models.experts.items() if expert.folders}
    folders = {f"expert {n!r} (modelpool.models.{n})": f[-1].folder for n, f in stored.items()}
    is_of_sounds = is_of_speech(modelpool)
    if text_encoder_class(modelpool) is not None and not is_of_sounds:
        tokenizer = _load_entry(models, "tokenizer", AutoTokenizer)
        load_tokenizers(tokenizer, "modelpool.tokenizer", folders)  # raises
        return tokenizer
    is_clip = hasattr(modelpool, "load_clip_model")
    image_class = CLIPProcessor if is_clip else AutoImageProcessor
    processor = _load_entry(models, "processor", AutoProcessor if is_of_sounds else image_class)
    compared = processor.feature_extractor if is_of_sounds else processor
    check_processors(compared, "modelpool.processor", folders)
    if is_of_sounds:
        return processor
    first = models.first
    config = first.config or {}
    channels = (config.get("vision_config") or config).get("num_channels")
    check_channels(processor, channels, f"modelpool.models.{first.name}")
    return processor


def _load_entry(models: PoolModels, name: str, kind: object) -> Any:
    """Load the component `name` of a pool's config, or else the base's processor.

    Some pools do not store their config, so the program's config is searched too.
    """
    pool, setting = models.pool, f"modelpool.{name}"
    config = getattr(getattr(pool, "_program", None), "_modelpool", None) or {}
    entries = (getattr(pool, f"_{name}", None), getattr(pool, name, None), config.get(name))
    entry = next((entry for entry in entries if entry is not None), None)
    if entry is None and hasattr(pool, "load_processor") and not hasattr(pool, "load_clip_model"):
        entry = models.first.location
    if entry is None:
        raise CalibrationError(
            f"the model pool names no {name}, which converts samples to model inputs: set {setting}"
        )
    return load_part(setting, entry, kind)


def load_part(setting: str, entry: Any, kind: Any, **options: Any) -> Any:
    """Load a component of a pool: a folder, a hub id, a mapping with `_target_`, or the object.

    Args:
        setting: The setting that names the component, for messages.
        entry: The value of the setting.
        kind: Class of the component, used if the entry is a folder or hub id.
        **options: Arguments for loading a model.

    Raises:
        ValueError: If there is no entry.
        CalibrationError: If it cannot be loaded.
    """
    is_model = issubclass(kind, nn.Module)
    if entry is None:
        raise ValueError(f"{setting} is not set: set it or taskpool.base_model.")
    if isinstance(entry, str):
        folder = fetch(entry, f"{setting}={entry}", weights=is_model)
        if not is_model:
            return read_processor(folder, kind, setting)
        with error_context(f"{setting}={entry!r}", cause=unloadable):
            loader: Any = kind
            return loader.from_pretrained(folder, trust_remote_code=False, **options)
    location = entry.get(NAME) if isinstance(entry, Mapping) else None
    if isinstance(location, str) and not {"revision", "subfolder"} & set(entry):
        folder = fetch(location, f"{setting}={location}", weights=is_model)
        entry = OmegaConf.merge(entry, {NAME: str(folder)})
    return build_part(setting, entry)


def build_part(setting: str, entry: object) -> object:
    """Instantiate a configuration with `_target_`. Return anything else unchanged.

    Raises:
        CalibrationError: If it cannot be loaded.
    """
    if not (isinstance(entry, Mapping) and "_target_" in entry):
        return entry

    def cause(error: Exception) -> str:  # a loader may raise anything
        return unloadable(error) or f"it cannot be loaded: {first_line(error)}"

    with error_context(setting, cause=cause):
        part = instantiate(entry)
    note_data_set(part)
    return part
