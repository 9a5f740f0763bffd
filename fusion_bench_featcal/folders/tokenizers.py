"""Warnings of experts whose tokenizers or chat templates read the data in another way."""

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
"""An option or expert in the words of messages -> its tokenizer. The first writes all inputs."""


def warnings_on_tokens(
    tokenizers: Tokenizers, samples: Mapping[str, Iterable[object]]
) -> list[Note]:
    """Warn of experts whose tokenizers split a text into other tokens of the same numbers.

    The texts are an expert's samples, tokens that only its tokenizer has, and tokens of all. Texts
    of samples are not shown: the sentences stand in the card of the result.

    Args:
        tokenizers: The tokenizer of all inputs, and those of experts.
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
        differing = next(filter(None, map(differs, probes)), "")
        if not differing and any(map(differs, _texts([*samples.get(label, ())]))):
            differing = "one of its samples becomes other tokens"
        if differing:
            texts.append(
                f"{label} has a tokenizer that splits texts otherwise than {option}: {differing}"
            )
    return notes_of(texts, WARNING)


def warnings_on_chats(tokenizers: Tokenizers) -> list[Note]:
    """Warn of experts whose chat template differs from that of all inputs."""
    rendered = {label: render_shortest_chat(tokenizer) for label, tokenizer in tokenizers.items()}
    option, expected = next(iter(rendered.items()))
    texts = [
        f"{label} has another chat template than {option}, which writes {expected!r:.60} where it "
        f"has {chat!r:.60}. Choose one by --chat-template FILE"
        for label, chat in rendered.items()
        if expected and chat and chat != expected
    ]
    return notes_of(texts, WARNING)


def refuse_languages(tokenizers: Tokenizers, models: Iterable[ModelFolder]) -> None:
    """Refuse encoder-decoders that answer in several languages, or for several tasks of Whisper.

    One tokenizer writes the targets of all tasks, so an expert's may not write other tokens around
    them. The models' configs may not begin answers otherwise. What is not declared fits everything.

    Args:
        tokenizers: The tokenizer of all inputs, and those of experts.
        models: The experts, and the model whose configs the result gets.

    Raises:
        CalibrationError: Naming two models and what they declare.
    """
    tokenizer, *_ = tokenizers.values()
    expected, marks = _target_marks(tokenizer), "tgt_lang or language of the tokenizer"
    said = [(marks, label, _target_marks(one) or expected) for label, one in tokenizers.items()]
    for model, key in product(models, ("forced_bos_token_id", "language", "task")):
        if (value := declared(key, model)) is not None:
            token = tokenizer.convert_ids_to_tokens(value) if type(value) is int else value
            name = str(token).strip("<|>")  # Whisper's may also be a code or the language's name
            said.append((key, model.label, TO_LANGUAGE_CODE.get(name.lower(), name)))
    first = dict[str, tuple[str, str]]()
    for key, label, value in said:
        other, expected = first.setdefault(key, (label, value))
        if value != expected:
            raise CalibrationError(
                f"{label} is for {value}, and {other} for {expected or 'no language'} ({key}), but "
                "one tokenizer writes the targets of all tasks: repair tasks of one target "
                "language together, and name a tokenizer of this language by --tokenizer"
            )


def _target_marks(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the tokens around targets that name a language or task, if they are set."""
    if None in (getattr(tokenizer, "tgt_lang", ""), getattr(tokenizer, "language", "")):
        return ""
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(text_target="")["input_ids"])
    return " ".join(token for token in tokens if token not in tokenizer.special_tokens_map.values())


def _difference(
    tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, text: str
) -> str:
    """Return what another tokenizer makes of a text, or an empty text if it makes the same."""
    pairs = zip_longest(_tokens(tokenizer, text), _tokens(other, text), fillvalue="")
    expected, token = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    return f"of {text!r} it makes {token!r} where {expected!r} is here" if expected != token else ""


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a row's value, such as those of a chat's turns."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """Return the tokens of a text without an end token, which not every training adds."""
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    end = tokenizer.eos_token_id
    return [*tokenizer.convert_ids_to_tokens(ids[:-1] if ids[-1:] == [end] else ids)]
