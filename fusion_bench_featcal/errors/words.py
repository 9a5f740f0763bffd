"""Words of messages that differ between the doors of the package: names of options and models."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class Words(NamedTuple):
    """The words of a door.

    Attributes:
        prefix: Text before the name of a setting.
        names: Other names that settings have here, and words of `word`.
    """

    prefix: str
    names: dict[str, str]


PYTHON = Words("", {
    "base": "base", "expert": "experts[{!r}]",
    "batches": "batches[{!r}]",
    "image_column": "image_column", "label_column": "classnames and label_column",
    "split": "split", "template": "a tokenizer that has one", "processes": "",
    "float32": "models that are stored or loaded in it, without autocast",
})  # fmt: skip
_words: ContextVar[Words] = ContextVar("words")


def speak(words: Words) -> None:
    """Let messages of this process have the words of a door. Without one they are Python's."""
    _words.set(words)


@contextmanager
def speaking(words: Words) -> Iterator[None]:
    """Context in which messages have the words of a door."""
    token = _words.set(words)
    try:
        yield
    finally:
        _words.reset(token)


def option(name: str, value: object = None) -> str:
    """Return a setting, with its value if there is one, as the user's door takes it."""
    words, text = _words.get(PYTHON), name if value is None else f"{name}={value}"
    renamed = words.names.get(text) or words.names.get(name)
    return renamed or f"{words.prefix}{text}"


def word(key: str, *values: object) -> str:
    """Return what a thing of a run is called at the user's door.

    Args:
        key: Its name here, such as `expert`.
        *values: What the words have a place for, such as the task.
    """
    return (PYTHON.names | _words.get(PYTHON).names)[key].format(*values)
