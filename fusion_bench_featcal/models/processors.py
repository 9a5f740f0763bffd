"""Tokenizers and processors of models, and their comparison with those of experts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoTokenizer,
    BaseImageProcessor,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    SequenceFeatureExtractor,
)

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.experts.safetensors_files import IS_RELEASE_4, RELEASE
from fusion_bench_featcal.files.untrusted import read_json
from fusion_bench_featcal.models.folder_files import FolderFiles

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_IMAGE_CONFIGS = ("preprocessor_config.json", "processor_config.json")
_CONFIGS = ("tokenizer_config.json", *_IMAGE_CONFIGS)
_NAMES = {"Tokenizer": "tokenizer", "FeatureExtractor": "feature extractor"}
_TRANSFORMERS_TYPES = ProcessorMixin | BaseImageProcessor | SequenceFeatureExtractor
_BY_FLAG = {
    "do_resize": ("size", "resample", "size_divisor", "crop_pct"),
    "do_center_crop": ("crop_size",),
    "do_rescale": ("rescale_factor", "offset"),
    "do_normalize": ("image_mean", "image_std"),
    "do_pad": ("pad_size",),
}
"""Flags of image processors -> settings that are read if the flag is on."""


def read_processor(folder: Path, kind: Any, option: str) -> Any:
    """Load a tokenizer, a processor or both in one object, without running code beside it.

    Args:
        folder: Its folder.
        kind: A class of transformers, such as `AutoTokenizer`.
        option: The option to change, for messages.

    Raises:
        CalibrationError: If there is none or it cannot be loaded, naming the folder.
        ValueError: If a file of the folder is a link out of it.
    """
    FolderFiles(folder).small_files()
    name = _name_of(kind)
    try:
        return kind.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # any error of the processor's library
        if not has_processor(folder, is_image=name != "tokenizer"):
            raise CalibrationError(
                f"no {name} in {folder}: name its folder with {option}"
            ) from error
        raise CalibrationError(
            f"the {name} in {folder} cannot be loaded: {_cause(folder, error)}. Check {option}"
        ) from error


def _name_of(kind: type) -> str:
    named = (name for part, name in _NAMES.items() if part in kind.__name__)
    return next(named, "image processor")


def has_processor(folder: Path, *, is_image: bool) -> bool:
    """Return whether a folder has files of a tokenizer, or of an image processor."""
    names = _IMAGE_CONFIGS if is_image else (*TOKENIZERS, *_CONFIGS)
    return any((folder / name).is_file() for name in names)


def load_tokenizers(
    tokenizer: PreTrainedTokenizerBase, option: str, experts: Mapping[str, Path]
) -> dict[str, PreTrainedTokenizerBase]:
    """Return the tokenizer of each expert that has one. Refuse other numbers of tokens.

    Experts may have more tokens.

    Args:
        tokenizer: The tokenizer of all inputs.
        option: The option that names it.
        experts: Name of an expert in messages -> its folder, which may have a tokenizer.

    Raises:
        CalibrationError: If one cannot be loaded, or tokens differ, naming the expert and a token.
    """
    tokenizers = {
        label: read_processor(folder, AutoTokenizer, label)
        for label, folder in experts.items()
        if any((folder / file).is_file() for file in TOKENIZERS)
    }
    numbers = tokenizer.get_vocab()
    for label, other in tokenizers.items():
        expert_numbers = other.get_vocab()
        differing = sorted(t for t, number in numbers.items() if expert_numbers.get(t) != number)
        if expert_numbers and differing:
            token = differing[0]
            raise CalibrationError(
                f"{label} has a different tokenizer from {option}: {len(differing)} of "
                f"{len(numbers)} tokens differ, such as {token!r} "
                f"({expert_numbers.get(token, 'missing')} instead of {numbers[token]}). Experts "
                f"must share one: check {option}"
            )
    return tokenizers


def check_processors(processor: object, option: str, experts: Mapping[str, Path]) -> None:
    """Refuse experts whose processors give other pixels, image tokens, or features of sounds.

    Args:
        processor: The image processor of all inputs, alone or with a tokenizer, or their feature
            extractor.
        option: The option that names it.
        experts: Name of an expert in messages -> its folder, which may have a processor.

    Raises:
        CalibrationError: If a setting differs, naming expert, setting and values.
    """
    if not isinstance(processor, _TRANSFORMERS_TYPES):  # a function of the user's
        return
    is_of_sounds = isinstance(processor, SequenceFeatureExtractor)
    kind = AutoFeatureExtractor if is_of_sounds else AutoImageProcessor
    settings = _input_settings(processor)
    own = vars(processor) if isinstance(processor, ProcessorMixin) else {}
    own = {n: v for n, v in own.items() if isinstance(v, int | str) and n != "chat_template"}
    for label, folder in experts.items():
        if not (files := [name for name in _IMAGE_CONFIGS if (folder / name).is_file()]):
            continue
        actual = _input_settings(read_processor(folder, kind, label))
        stored = read_json(folder / files[-1]) if _IMAGE_CONFIGS[1] in files else {}
        # What files of older releases lack, or have as null, is not compared.
        stored = {name: stored[name] for name in own if stored.get(name) is not None}
        actual, expected = actual | stored, settings | {name: own[name] for name in stored}
        for name in sorted({*expected, *actual}, key=lambda n: (not n.startswith("do_"), n)):
            if expected.get(name) != actual.get(name):
                raise CalibrationError(
                    f"{label} has a different {_name_of(kind)} from {option} ({name}: "
                    f"{_shown(actual.get(name))} instead of {_shown(expected.get(name))}). Experts "
                    f"must share one: check {option}, or if the second value is right for this "
                    f"expert, too, correct the {' or '.join(files)} in {folder}"
                )


def _input_settings(processor: Any) -> dict[str, object]:
    """Return the settings that change pixels, without those switched off, or sounds' features."""
    values = getattr(processor, "image_processor", processor).to_dict()
    if isinstance(processor, SequenceFeatureExtractor):
        return {name: value for name, value in values.items() if isinstance(value, int | float)}
    settings = {
        name: _plain(value)
        for name, value in values.items()
        # Pictures are always converted. A flag without a value is off.
        if name.startswith("do_") and value and name != "do_convert_rgb"
    }
    for flag, names in _BY_FLAG.items():
        if flag in settings:
            settings |= {n: _plain(values[n]) for n in names if values.get(n) is not None}
    return settings


def _plain(value: Any) -> Any:
    """Return a value in a form that equal settings of all processors have."""
    if hasattr(value, "items"):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, int | float):  # flags, sizes, filters and factors, which may be rounded
        return int(value) if value == int(value) else round(float(value), 6)
    return value


def _shown(value: object) -> str:
    return "not set" if value is None else f"{value!r:.60}"


def _cause(folder: Path, error: Exception) -> str:
    """Return why a tokenizer or processor cannot be loaded."""
    try:
        config = read_json(folder / _CONFIGS[0])
    except (OSError, ValueError):
        config = {}
    is_newer = "backend" in config or isinstance(config.get("extra_special_tokens"), list)
    if not (IS_RELEASE_4 and is_newer):
        return first_line(error).rstrip(".")
    return (
        f"its {_CONFIGS[0]} was written by transformers 5, but {RELEASE} is installed. Install "
        'transformers 5, or write "tokenizer_class": "PreTrainedTokenizerFast" there and leave out '
        "extra_special_tokens"
    )
