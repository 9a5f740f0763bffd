"""Masks for private texts of a run: values of unknown settings, users and queries in URLs."""

import re
from collections.abc import Callable, Mapping
from typing import Any

MASK = "***"
_BY_TASK = {
    "models", "tasks", "heads", "metrics", "train_datasets", "val_datasets", "test_datasets",
}  # fmt: skip
"""Mappings from tasks, whose texts are locations and names."""
_WRITTEN = _BY_TASK | {
    "_target_", "_args_", "name", "type", "task", "path", "split", "revision", "subfolder",
    "data", "data_dir", "data_files", "file", "dataset_name", "pretrained_model_name_or_path",
    "base_model", "base_model_path", "peft_model_path", "clip_model", "tokenizer", "processor",
    "vocabulary", "device", "device_map", "dtype", "torch_dtype", "accelerator", "devices",
    "precision", "strategy", "style", "rule", "corruption", "pooling", "template", "templates",
    "prompt", "answer", "classnames", "class_names", "image_column", "label_column", "batch_size",
}  # fmt: skip
"""Names in a config of models and data whose texts may be written."""
_LONG = re.compile(r"(?![a-z _-]*$).{6,}", re.DOTALL)
"""Texts that are masked in messages. Short texts and plain words are in messages anyway."""
_ADDRESS = re.compile(
    r"(?<=\w:)(?P<slashes>/+)"
    # Up to the last @ before a slash. A key of S3 may have slashes, but after a colon no port.
    r"(?P<user>[^\s/\"]+@|[^\s/:@\"]+:(?!\d+/)[^\s\"]+@)?"
    r"(?P<path>[^\s\"'?#]*)(?P<query>[?#][^\s\"']*)?"
)
_private: set[str] = set()


def public(value: object, name: str = "", hidden: Callable[[str], Any] = lambda _: MASK) -> Any:
    """Return a config of models or data in which texts under unknown names are masked.

    Numbers stay, and so do the pool's own settings (`featcal`).

    Args:
        value: The config, or a value in it.
        name: The value's name.
        hidden: Returns the replacement of a masked text.
    """
    if isinstance(value, Mapping) and name != "featcal":
        names: dict[Any, str] = {key: str(key) for key in value}
        if name in _BY_TASK:  # a task may have any name
            names = {k: "" if isinstance(v, Mapping) else name for k, v in value.items()}
        return {key: public(entry, names[key], hidden) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [public(entry, name, hidden) for entry in value]
    if not isinstance(value, str) or name in _WRITTEN:
        return value
    return hidden(value)


def hide(config: object) -> None:
    """Mask the texts of a config that `public` leaves out wherever `masked` finds them.

    Short texts, plain words and what the config has elsewhere, such as a task's name, stay.
    """
    private = set[str]()
    public(config, hidden=private.add)
    written = str(public(config))
    _private.clear()
    _private.update(text for text in private if _LONG.fullmatch(text) and text not in written)


def masked(text: str) -> str:
    """Return a text without users and queries of addresses, and without hidden texts."""

    def mask_parts(match: re.Match[str]) -> str:
        slashes, user, path, query = match.groups()
        return f"{slashes}{MASK + '@' if user else ''}{path}{query[0] + MASK if query else ''}"

    text = _ADDRESS.sub(mask_parts, text)
    for hidden in sorted(_private, key=len, reverse=True):
        text = text.replace(hidden, MASK)
    return text
