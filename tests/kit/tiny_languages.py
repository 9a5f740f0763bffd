"""Tiny tokenizers of NLLB and mBART."""

from typing import Any

import pytest
from transformers import MBartTokenizer, NllbTokenizer, __version__

NEEDS_RELEASE_5 = pytest.mark.skipif(
    __version__[0] == "4", reason="release 4 makes its tokenizer, or its tensors, in another way"
)
TOWERS_OF_RELEASE_5 = ("smolvlm", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
"""Types of models with towers that release 4 lacks, or has in part."""
LANGUAGES = ("aa_Latn", "bb_Latn")  # of prompts and targets
PIECES = ("<pad>", "<s>", "</s>", "<unk>", "▁", "a", "b", "▁a", "▁b")


def nllb_tokenizer(tgt_lang: str | None = LANGUAGES[1]) -> Any:
    """It writes the language in front of a text."""
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    options: Any = {"src_lang": LANGUAGES[0], "tgt_lang": tgt_lang}
    merges: Any = [("▁", "a"), ("▁", "b")]
    return NllbTokenizer(vocabulary, merges, extra_special_tokens=[*LANGUAGES], **options)


def mbart_tokenizer() -> Any:
    """It writes the language behind a text's end."""
    pieces: Any = [(piece, -float(len(PIECES) - n)) for n, piece in enumerate(PIECES)]
    return MBartTokenizer(pieces, src_lang="en_XX", tgt_lang="ro_RO")
