"""The tokenizers of the text suites: byte pairs learned on the train split, capitals kept."""

import json
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from fusion_bench_featcal.suites.text import load_text_split

# label words come up often enough that each becomes one token
TARGET_REPEATS = 8
MAX_TOKENS = 512


@dataclass(frozen=True)
class TokenizerPlan:
    """The differences between the tokenizers.

    Attributes:
        vocab_size: Tokens in all.
        special: Role -> token of the first tokens of the vocabulary, in order.
        template: How a prompt is framed, in the notation of the tokenizers library.
        sentinels: How many `<extra_id_N>` end the vocabulary.
    """

    vocab_size: int
    special: dict[str, str]
    template: str
    sentinels: int = 0


PLANS = {
    # T5 starts to decode from its padding token. Sentinels keep its vocabulary's usual shape.
    "flan-t5-mini": TokenizerPlan(
        1200, {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}, "$A </s>", 8
    ),
    "llama-mini": TokenizerPlan(
        1400,
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
        "<s> $A",
    ),
}


def write_tokenizer(folder: Path, suite: str, tasks: Sequence[str]) -> None:
    """Learn a suite's tokenizer and save it as transformers' fast tokenizers are saved.

    Args:
        folder: Folder for `tokenizer.json` and `tokenizer_config.json`.
        suite: A name in `PLANS`.
        tasks: Tasks whose train split it learns from.

    Raises:
        ValueError: If a label word would not be one token, naming it.
    """
    plan = PLANS[suite]
    special = list(plan.special.values())
    sentinels = [f"<extra_id_{number}>" for number in range(plan.sentinels)]
    tokenizer = Tokenizer(models.BPE(unk_token=plan.special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=plan.vocab_size - len(sentinels),
        special_tokens=special,
        initial_alphabet=sorted(set(string.printable) - set(string.whitespace)),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(tasks), trainer)
    tokenizer.add_special_tokens(sentinels)
    framing = [(token, tokenizer.token_to_id(token)) for token in special if token in plan.template]
    tokenizer.post_processor = processors.TemplateProcessing(plan.template, None, framing)
    for word in sorted(label_words(tasks)):
        if len(tokenizer.encode(word, add_special_tokens=False).ids) != 1:
            raise ValueError(f"label word {word!r} is not one token of {plan.vocab_size}")
    tokenizer.save(str(folder / "tokenizer.json"))
    # Written by hand, because releases of transformers write different files.
    config = {
        **plan.special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_TOKENS,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    if sentinels:
        config["additional_special_tokens"] = sentinels
    text = json.dumps(config, indent=1, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def label_words(tasks: Sequence[str]) -> set[str]:
    """Return every word that a target of these tasks has."""
    return {
        word
        for task in tasks
        for target in load_text_split(task, "train")["target"]
        for word in target.split()
    }


def label_ids(tokenizer: Any, tasks: Sequence[str]) -> list[int]:
    """Return the token of each label word, in the words' order."""
    words = sorted(label_words(tasks))
    return [ids[0] for ids in tokenizer(words, add_special_tokens=False)["input_ids"]]


def _lines(tasks: Sequence[str]) -> Iterator[str]:
    for task in tasks:
        for row in load_text_split(task, "train"):
            yield row["prompt"]  # type: ignore[call-overload]
            yield from [row["target"]] * TARGET_REPEATS  # type: ignore[call-overload]
