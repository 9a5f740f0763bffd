"""The longest text that a tokenizer and a model's positions allow."""

from collections.abc import Mapping, Sequence
from typing import Any

NO_LIMIT = 10**9  # tokenizers without a limit report a huge one
_TABLES = ("position_embeddings", "embed_positions")


def longest_text(tokenizer: Any, positions: int = NO_LIMIT) -> tuple[int, str]:
    """Return the maximum number of tokens of a text, and the name of the limit in messages.

    Args:
        tokenizer: The tokenizer.
        positions: Result of `positions_of` for the model.
    """
    allowed = int(tokenizer.model_max_length)
    if positions < allowed:
        return positions, "the model's positions (max_position_embeddings)"
    return allowed, "the tokenizer's limit (model_max_length)"


def end_tokens(*models: object) -> frozenset[int]:
    """Return the end tokens that models declare. Each may declare one, several, or none.

    Args:
        models: Models, or their files, whose `config` and `generation_config` are objects of
            transformers, mappings, None or missing.
    """
    values = _declared("eos_token_id", models)
    several = (value if isinstance(value, list) else [value] for value in values)
    return frozenset(token for tokens in several for token in tokens if type(token) is int)


def declared(key: str, *models: object) -> Any:
    """Return the first value of a key in the models' configs, or None.

    A model's `generation_config` has priority over its `config`.

    Args:
        key: For example `forced_bos_token_id`, the first token of answers (NLLB's language).
        models: As for `end_tokens`.
    """
    return next((value for value in _declared(key, models) if value is not None), None)


def _declared(key: str, models: Sequence[object]) -> list[Any]:
    """Return a key's values in all configs of models, None where it is missing."""
    names = ("generation_config", "config")
    configs: list[Any] = [getattr(model, name, None) for model in models for name in names]
    contents = [c if isinstance(c, Mapping) else c.to_dict() for c in configs if c is not None]
    contents += [c["text_config"] for c in contents if isinstance(c.get("text_config"), Mapping)]
    return [content.get(key) for content in contents]


def positions_of(model: Any) -> int:
    """Return the number of positions of a transformers model, its longest input in tokens.

    The result is `NO_LIMIT` for models with relative positions, such as T5. Positions of RoBERTa
    and others begin after the index of padding, so fewer are usable than the config says. If the
    encoder reads no texts, as in Whisper, the decoder's positions count.

    Args:
        model: The model, with or without weights.
    """
    config = model.config.get_text_config(decoder=True)  # beside that of images
    is_biased = getattr(config, "position_biased_input", True)  # DeBERTa
    if getattr(config, "alibi", False) or not is_biased:
        return NO_LIMIT
    most = getattr(config, "max_position_embeddings", None)  # also under other names
    limits = [most] if isinstance(most, int) and most > 0 else []
    reads_texts = getattr(model, "main_input_name", "input_ids") == "input_ids"
    for name, table in (model if reads_texts else model.get_decoder()).named_modules():
        rows = getattr(table, "num_embeddings", None)
        if name.rpartition(".")[2] in _TABLES and rows is not None:
            padding = getattr(table, "padding_idx", None)
            limits.append(rows if padding is None else rows - padding - 1)
    return min(limits, default=NO_LIMIT)
