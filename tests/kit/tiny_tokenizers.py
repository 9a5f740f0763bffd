"""Tokenizers of the two common kinds of language models, trained on a few words."""

import json
from functools import cache
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]"]
COLOURS, NOUNS = ["red", "blue", "green", "amber"], ["lamp", "river", "stone", "cloud"]
WORDS = ["colour", "number", "of", *NOUNS, *COLOURS, "yes", "no", "1", "2", "10", "42"]
CORPUS = [f"{a} of {b} : {c}\n" for a in WORDS for b in NOUNS for c in WORDS]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}[INST] {{ m.role }} {{ m.content }} [/INST]{% endif %}{% endfor %}"
)


def _bpe() -> Any:
    """As in Llama 2: a blank before each text, words that are not split off beforehand."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(  # type: ignore[assignment]
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # type: ignore[assignment]
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(**_training(200)))
    return Tokenizer.from_str(json.dumps({**json.loads(tokenizer.to_str()), "pre_tokenizer": None}))


def _byte_level() -> Any:
    """As in Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(**_training(400), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _training(size: int) -> dict[str, Any]:
    return {"vocab_size": size, "special_tokens": SPECIAL, "show_progress": False}


KINDS = {"bpe": _bpe, "bytes": _byte_level}
_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


@cache
def trained_tokenizer(kind: str) -> Any:
    """Tokenizer of a kind, with `TEMPLATE` for chats. Every text begins with `<s>`."""
    options: Any = {**_TOKENS, "model_max_length": 256, "chat_template": TEMPLATE}
    tokenizer = KINDS[kind]()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
