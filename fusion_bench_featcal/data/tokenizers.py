"""Comparison of experts' tokenizers with the tokenizer of their inputs."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line

_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def differing_tokens(tokenizer: Any, folder: Path) -> str:
    """Compare a tokenizer's tokens with the tokenizer in a model's folder, if it has one.

    Returns:
        The number of tokens with different ids, and an example. Empty if there are none.

    Raises:
        CalibrationError: If the tokenizer in the folder cannot be loaded.
    """
    if not any((folder / file).is_file() for file in _FILES):
        return ""
    vocabulary = tokenizer.get_vocab()
    try:
        folder_vocabulary = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False
        ).get_vocab()
    except Exception as error:  # any error of the tokenizer's library
        raise CalibrationError(
            f"the tokenizer in {folder} cannot be loaded: {first_line(error)}"
        ) from error
    differing = sorted(t for t, number in vocabulary.items() if folder_vocabulary.get(t) != number)
    if not (folder_vocabulary and differing):
        return ""
    token = differing[0]
    return (
        f"{len(differing)} of {len(vocabulary)} tokens differ, such as {token!r} "
        f"({vocabulary[token]} here, {folder_vocabulary.get(token)} there)"
    )
