"""Warnings about experts whose tokenizers or chat templates read the data differently."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, product, zip_longest

from transformers import PreTrainedTokenizerBase
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from fusion_bench_featcal.data.templates import render_shortest_chat
from fusion_bench_featcal.data.text_limits import declared
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.folders.model_folder import ModelFolder
from fusion_bench_featcal.results.notes import WARNING, Note, notes_of

_PROBES = ("Der Café in São Paulo: 3,50 €!", " two  blanks\n\tand 2026", "iPhone or IPHONE?")
_PROBED = 64
"""Largest number of tokens whose texts are split by all tokenizers."""


Tokenizers = Mapping[str, PreTrainedTokenizerBase]
"""Name of an option or expert in messages -> its tokenizer. The first one encodes all inputs."""


def warnings_on_tokens(
    tokenizers: Tokenizers, samples: Mapping[str, Iterable[object]]
) -> list[Note]:
    """Warn about experts whose tokenizers split a text into different tokens.

    The texts are an expert's samples, tokens that only its tokenizer has, and tokens that all
    tokenizers have. Samples are not quoted, because the warnings go into the model card.

    Args:
        tokenizers: The tokenizer of all inputs, and the experts' tokenizers.
        samples: An expert -> samples of its task: texts, or lists or dictionaries with texts.
    """
    (option, tokenizer), *experts = tokenizers.items()
    vocabulary = {*tokenizer.get_vocab()}
    ordinary = sorted(vocabulary - {*tokenizer.all_special_tokens})
    tokens = ordinary[:: max(1, len(ordinary) // _PROBED)]
    words = [tokenizer.convert_tokens_to_string([token]) for token in tokens]
    texts = list[str]()
    for label, other in experts:
        added = {*other.get_vocab()} - vocabulary - {*other.all_special_tokens}
        probes = chain(_PROBES, sorted(added)[:_PROBED], words, map(str.upper, words))
        differs = partial(_difference, tokenizer, other)
        differing = next(filter(None, map(differs, probes)), None)
        if differing is None and any(map(differs, _texts([*samples.get(label, ())]))):
            differing = "one of its samples gets different tokens"
        if differing is not None:
            texts.append(
                f"{label} has a tokenizer that splits texts differently from {option}: {differing}"
            )
    return notes_of(texts, WARNING)


def warnings_on_chats(tokenizers: Tokenizers) -> list[Note]:
    """Warn about experts whose chat template differs from the one that writes all inputs."""
    rendered = {label: render_shortest_chat(tokenizer) for label, tokenizer in tokenizers.items()}
    option, expected = next(iter(rendered.items()))
    texts = [
        f"{label} has a different chat template from {option}: it renders {chat!r:.60} instead of "
        f"{expected!r:.60}. Choose one with --chat-template FILE"
        for label, chat in rendered.items()
        if expected and chat and chat != expected
    ]
    return notes_of(texts, WARNING)


def refuse_languages(tokenizers: Tokenizers, models: Iterable[ModelFolder]) -> None:
    """Refuse encoder-decoders that answer in several languages, or for several tasks of Whisper.

    One tokenizer encodes the targets of all tasks, so every expert's tokenizer must put the same
    tokens around a target, and every model's config must begin answers with the same token. A model
    that declares neither fits all others.

    Args:
        tokenizers: The tokenizer of all inputs, and the experts' tokenizers.
        models: The experts, and the model whose configs the result gets.

    Raises:
        CalibrationError: If two models declare different languages or tasks.
    """
    tokenizer, *_ = tokenizers.values()
    expected, marks = _target_marks(tokenizer), "tgt_lang or language of the tokenizer"
    texts = {label: _target_marks(one) or expected for label, one in tokenizers.items()}
    declared_values = [(marks, label, text) for label, text in texts.items()]
    for model, key in product(models, ("forced_bos_token_id", "language", "task")):
        if (value := declared(key, model)) is not None:
            token = tokenizer.convert_ids_to_tokens(value) if type(value) is int else value
            name = str(token).strip("<|>")  # Whisper's may also be a code or the language's name
            declared_values.append((key, model.label, TO_LANGUAGE_CODE.get(name.lower(), name)))
    first = dict[str, tuple[str, str | None]]()
    for key, label, value in declared_values:
        other, expected = first.setdefault(key, (label, value))
        if value != expected:
            raise CalibrationError(
                f"{label} is for {value}, but {other} is for {expected or 'no language'} ({key}), "
                "and one tokenizer encodes the targets of all tasks. Repair tasks of one target "
                "language together, and name a tokenizer of this language with --tokenizer"
            )


def _target_marks(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the tokens around targets that name a language or task, or None if none is set."""
    if None in (getattr(tokenizer, "tgt_lang", ""), getattr(tokenizer, "language", "")):
        return None
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(text_target="")["input_ids"])
    return " ".join(token for token in tokens if token not in tokenizer.special_tokens_map.values())


def _difference(
    tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, text: str
) -> str | None:
    """Return the first token of a text that another tokenizer splits differently, or None."""
    pairs = zip_longest(_tokens(tokenizer, text), _tokens(other, text), fillvalue="")
    for expected, token in pairs:
        if expected != token:
            return f"in {text!r} it has {token!r} instead of {expected!r}"
    return None


def _texts(value: object) -> Iterator[str]:
    """Yield all texts inside a value of an example, such as a chat's turns."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """Return the tokens of a text without the end token, because some trainings add none."""
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    end = tokenizer.eos_token_id
    return [*tokenizer.convert_ids_to_tokens(ids[:-1] if ids[-1:] == [end] else ids)]
