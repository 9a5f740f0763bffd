"""Words of messages that differ between the package's entry points: options and models."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class Vocabulary(NamedTuple):
    """The words of an entry point: Python, `featcal calibrate` or `fusion_bench`.

    Attributes:
        prefix: Text before the name of a setting.
        names: Other names that settings have here, and words of `user_term`.
    """

    prefix: str
    names: dict[str, str]


PYTHON = Vocabulary("", {
    "base": "base", "expert": "experts[{!r}]",
    "batches": "batches[{!r}]",
    "image_column": "image_column", "label_column": "classnames and label_column",
    "split": "split", "template": "a tokenizer that has one", "processes": "",
    "swudi": "fusion_bench_featcal.lab.rivals.SWUDI",
    "float32": "models that are stored or loaded in it, without autocast",
})  # fmt: skip
_vocabulary: ContextVar[Vocabulary] = ContextVar("words")


def set_vocabulary(vocabulary: Vocabulary) -> None:
    """Set the words of this process's messages. The default are Python's."""
    _vocabulary.set(vocabulary)


@contextmanager
def using_vocabulary(vocabulary: Vocabulary) -> Iterator[None]:
    """Context in which messages have the words of an entry point."""
    token = _vocabulary.set(vocabulary)
    try:
        yield
    finally:
        _vocabulary.reset(token)


def option(name: str, value: object = None) -> str:
    """Return a setting, with its value if there is one, as the user writes it."""
    vocabulary, text = _vocabulary.get(PYTHON), name if value is None else f"{name}={value}"
    renamed = vocabulary.names.get(text) or vocabulary.names.get(name)
    return renamed or f"{vocabulary.prefix}{text}"


def install_advice(target: str) -> str:
    """Return the command that installs an extra, such as `'.[speech]'`, or the suites."""
    return f"pip install {target} in a checkout of fusion_bench_featcal"


def user_term(key: str, *values: object) -> str:
    """Return the user's word for a part of a run.

    Args:
        key: The part, such as `expert`.
        *values: Values that the word contains, such as the task.
    """
    return (PYTHON.names | _vocabulary.get(PYTHON).names)[key].format(*values)
