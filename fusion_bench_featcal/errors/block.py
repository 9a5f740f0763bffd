"""Errors as text, and the difference between mistakes and bugs."""

import traceback
from collections.abc import Iterator
from pathlib import Path

from .masking import masked

_PACKAGE = Path(__file__).parents[1]


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that led to it, each once.

    The chain has a cycle if an error is raised from one that was raised while handling it.
    """
    yielded: set[int] = set()
    while error is not None and id(error) not in yielded:
        yielded.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, else its class. Unwraps Hydra's errors."""
    error = _wrapped(error)
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def error_block(error: BaseException, *, prefix: str = "error") -> str:
    """Return an error as text: `prefix: message`, or `prefix: unexpected Type: message`."""
    cause = _wrapped(error)
    message = str(cause).strip() or type(cause).__name__
    kind = f"unexpected {type(cause).__name__}: " if is_bug(error) else ""
    return masked(f"{prefix}: {kind}{message}")


def is_bug(error: BaseException) -> bool:
    """Return whether an error's message does not explain it.

    Errors that this package defines or raises explain themselves, as do errors of the operating
    system.
    """
    error = _wrapped(error)
    if isinstance(error, OSError) or type(error).__module__.startswith(f"{_PACKAGE.name}."):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or _PACKAGE not in Path(frames[-1].filename).parents:
        return True
    return not (frames[-1].line or "").startswith("raise ")


def _wrapped(error: BaseException) -> BaseException:
    """Return the cause of a failed instantiation by Hydra, or else the error itself."""
    links = (link for link in causes(error) if type(link).__name__ != "InstantiationException")
    return next(links, error)
