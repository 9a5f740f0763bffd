"""Context managers that add to an error where it happened."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from . import CalibrationError
from .block import first_line

Cause = Callable[[Exception], str | None]
"""Returns what an error of another library means here, or None if it is not known."""


@contextmanager
def error_context(
    *places: object,
    task: str | None = None,
    block: str | None = None,
    module: str | None = None,
    cause: Cause = lambda _: None,
    remedy: str = "",
) -> Iterator[None]:
    """Context that adds a place to every `CalibrationError` that leaves it.

    Args:
        *places: An option, a setting or a file, as the user writes it.
        task: The task.
        block: The block.
        module: The module.
        cause: Explains errors of other libraries, in addition to torch's for ids outside a table.
        remedy: Sentence after the message.

    Raises:
        CalibrationError: In place of an error of another library whose cause is known, or of a
            panic of tokenizers.
    """
    named = {"task": task, "block": block, "module": module}
    texts = [*map(str, places), *(f"{kind} {name}" for kind, name in named.items() if name)]
    try:
        yield
    except CalibrationError as error:
        error.passes(texts, remedy)
        raise
    except BaseException as error:  # a panic of tokenizers is no Exception
        text = (cause(error) if isinstance(error, Exception) else None) or _known(error)
        if text is None:
            raise
        translated = CalibrationError(text)
        translated.passes(texts, remedy)
        raise translated from error


def message_of(*kinds: type[Exception]) -> Cause:
    """Return a cause that knows some kinds of errors by their own messages."""
    return lambda error: str(error) if isinstance(error, kinds) else None


def _known(error: BaseException) -> str | None:
    """Return what torch's error for ids outside a look-up table means, or that a library panics."""
    if isinstance(error, IndexError) and "out of range in self" in str(error):
        return (
            f"an input is outside one of the model's embedding tables ({error}). Check that token "
            "ids come from the model's own tokenizer"
        )
    if type(error).__name__ == "PanicException":  # of libraries in Rust, such as tokenizers
        return f"a library has failed (PanicException: {first_line(error)})"
    return None  # an error of the model's or family's code, or the end of a program or task
