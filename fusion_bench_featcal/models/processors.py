"""Tokenizers and image processors of models, and the comparison of experts' tokenizers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.experts.config_files import IS_RELEASE_4, RELEASE, read_config
from fusion_bench_featcal.files.untrusted import read_json

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_CONFIGS = ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json")


def load_processor(folder: Path, kind: Any, option: str) -> Any:
    """Load a tokenizer, image processor or both in one object, without running code beside it.

    Args:
        folder: Its folder.
        kind: A class of transformers, such as `AutoTokenizer`.
        option: The option to change, for messages.

    Raises:
        CalibrationError: If there is none or it cannot be loaded, naming the folder.
    """
    read_config(folder)  # raises for code that transformers 4 would run
    name = "tokenizer" if "Tokenizer" in kind.__name__ else "image processor"
    try:
        return kind.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # any error of the processor's library
        if not has_processor(folder):
            raise CalibrationError(f"no {name} in {folder}: name its folder by {option}") from error
        raise CalibrationError(
            f"the {name} in {folder} cannot be loaded: {_cause(folder, error)}. Check {option}"
        ) from error


def has_processor(folder: Path) -> bool:
    """Return whether a folder has files of a tokenizer or image processor."""
    return any((folder / name).is_file() for name in (*_TOKENIZERS, *_CONFIGS))


def check_tokenizers(tokenizer: Any, option: str, experts: Mapping[str, Path]) -> None:
    """Refuse experts whose tokenizers number tokens in another way. They may have more tokens.

    Args:
        tokenizer: The tokenizer of all inputs.
        option: The option that names it.
        experts: An expert in the words of messages -> its folder, which may have a tokenizer.

    Raises:
        CalibrationError: If tokens differ, naming the expert and a token.
    """
    numbers = tokenizer.get_vocab()
    for label, folder in experts.items():
        if not any((folder / file).is_file() for file in _TOKENIZERS):
            continue
        expert_numbers = load_processor(folder, AutoTokenizer, label).get_vocab()
        differing = sorted(t for t, number in numbers.items() if expert_numbers.get(t) != number)
        if expert_numbers and differing:
            token = differing[0]
            raise CalibrationError(
                f"{label} has another tokenizer than {option}: {len(differing)} of {len(numbers)} "
                f"tokens differ, such as {token!r} ({numbers[token]} here, "
                f"{expert_numbers.get(token)} there). Experts must share one; check {option}"
            )


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
        f"its {_CONFIGS[0]} was written by transformers 5, and {RELEASE} reads it. Install "
        'transformers 5, or write "tokenizer_class": "PreTrainedTokenizerFast" there and leave out '
        "extra_special_tokens"
    )
