"""Passwords, tokens and signatures, masked in everything that is printed or written about a run."""

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
# Ends of the names of secret settings, options of storage, query parameters and headers.
_ENDS = (
    r"(?:(?:secret|private|account|access|api)[_-]?key(?:[_-]?id)?|secret|passw(?:or)?d|passphrase"
    r"|credentials?|signature|authorization|cookie|storage_options|(?<![a-z])(?:sig|pwd|auth)"
    r"|(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)(?<!image_)(?<!boi_)"
    r"(?<!eoi_)(?<!video_)(?<!audio_)(?<!newline_)(?<!per_)(?<!first_)(?<!last_)(?<!next_)"
    r"(?<!start_)(?<!end_)(?<!stop_)token)"
    r"(?:\.(?!(?:jsonl?|csv|parquet|ya?ml|txt|py)\b)[\w.-]+)?"  # such as storage_options.key
)
_OF_TASKS = (
    "expert", "data", "eval", "prompt", "columns", "task_weights", "models", "tasks",
    "train_datasets", "val_datasets", "test_datasets", "calibration_data", "samples",
)  # fmt: skip
"""Mappings by task."""
_NAME = re.compile(rf"{_ENDS}$", re.IGNORECASE)
_SETTING = re.compile(r"[\w.+@~/-]+")
_PAIR = re.compile(
    rf"({_ENDS}(?:\\*[\"'])?[ \t]*(?:=[ \t]*"
    # Behind a colon prose may follow, as in "no token: log in".
    r"|:[ \t]*(?=\S{6}|\\*[\"']|[{\[][^}\]]|(?:bearer|basic|digest|token)\s)))"
    r"(?:(\\*[\"'])(?:(?!\2)(?:[^\\]|\\.))*\2"  # in quotes, which may be escaped
    r"|\{[^{}]*\}|\[[^][]*\]|(?:(?:bearer|basic|digest|token)\s+)?[^\s,;&\"'<>(){}[\]\\]+)",
    re.IGNORECASE,
)
# Up to the last @ before a slash. A key of S3 may have slashes, but after a colon no port.
_USER = re.compile(r"(?<=\w:)(/+)(?:[^\s/\"]+|[^\s/:@\"]+:(?!\d+/)[^\s\"]+)@")
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:hf_|api_org_|gh[opsru]_|sk-(?:\w+-)*)[A-Za-z0-9]{16,}"
    r"|(?:github_pat_|glpat-)[\w-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|eyJ[\w-]{8,}\.[\w-]+\.[\w-]*)"
)
"""Tokens of the hub and of other services, by their first letters."""


def masked(text: str) -> str:
    """Return a text without secrets.

    These are values of names such as `token`, `api_key` and `X-Amz-Signature`, the user in
    `https://user:password@host`, and tokens that are recognised by their first letters.
    """
    text = _USER.sub(rf"\1{MASK}@", text)
    return _TOKEN.sub(MASK, _PAIR.sub(rf"\1{MASK}", text))


def masked_values(value: Any, name: str = "") -> Any:
    """Return a nested value, such as settings or the words of a command, without secrets.

    Args:
        value: The value. Keys and texts are masked as by `masked`, and texts such as
            `+a.token=VALUE` up to their end.
        name: Its name. Values with the name of a secret are masked whole.
    """
    is_secret = _NAME.search(name) is not None
    if isinstance(value, Mapping):
        names = dict.fromkeys(value, name) if is_secret else {key: str(key) for key in value}
        if name in _OF_TASKS:  # a task may be called signature
            names = dict.fromkeys(value, "")
        return {masked_values(key): masked_values(item, names[key]) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked_values(item, name) for item in value]
    if is_secret and value is not None and not isinstance(value, bool):
        return MASK
    return _masked_word(value) if isinstance(value, str) else value


def _masked_word(word: str) -> str:
    name, _, value = word.partition("=")
    if not (value and _SETTING.fullmatch(name) and _NAME.search(name)):
        return masked(word)
    # The name may be that of a task, and the value its model or data.
    return word if os.path.exists(value) else f"{name}={MASK}"
