"""An error as a short block of text: the message, and for a bug its location.

Imports nothing slow, because the command `featcal` uses it too.
"""

import traceback
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

_PACKAGE = Path(__file__).parents[1]
_MOST_LINES, _MOST_CHARACTERS = 7, 800


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


def loading_cause(error: BaseException) -> str:
    """Return why a model cannot be loaded, in one line."""
    if any(isinstance(link, UnpicklingError) for link in causes(error)):
        return (
            "its .bin file is damaged or has code, which is not run. If you trust it, load it in "
            "transformers and save it with save_pretrained"
        )
    return first_line(error).rstrip(".")


def error_block(error: BaseException, more: str = "", *, prefix: str = "error") -> str:
    """Describe an error in a few lines.

    Errors that this package raises already contain the advice. Others are bugs or of other code,
    and also show their type, the object being created, and the last line of this package that ran.

    Args:
        error: The error. If it only wraps another one, that is described.
        more: Last line, on how to see the details, or an empty text for none.
        prefix: First word.

    Returns:
        The lines, without a line break at the end.
    """
    wrapper, error = error, _wrapped(error)
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if _PACKAGE in Path(frame.filename).parents]
    is_last = bool(ours) and ours[-1] is frames[-1]
    is_raised_here = is_last and (ours[-1].line or "").startswith("raise ")
    message = str(error).strip() or type(error).__name__
    locations = []
    if not (is_raised_here or type(error).__module__.startswith(f"{_PACKAGE.name}.")):
        message = f"unexpected {type(error).__name__}: {message}"
        locations += _made_by(wrapper)
        for frame in ours[-1:]:
            path = Path(frame.filename).relative_to(_PACKAGE.parent)
            locations.append(f"in {path}:{frame.lineno} ({frame.name})")
    text = f"{prefix}: {message}"
    lines = text[:_MOST_CHARACTERS].splitlines()[:_MOST_LINES]
    if "\n".join(lines) != text:
        lines[-1] += " ..."
    return "\n".join([*lines, *(f"  {location}" for location in locations), *filter(None, [more])])


def _wrapped(error: BaseException) -> BaseException:
    """Return the cause of a failed instantiation by Hydra, or else the error itself."""
    links = (link for link in causes(error) if type(link).__name__ != "InstantiationException")
    return next(links, error)


def _made_by(error: BaseException) -> list[str]:
    """Return `making <key> <_target_>` if FusionBench was creating a pool, method or task pool."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "_instantiate_and_setup":
            config: Any = frame.f_locals["config"]
            key = config._get_full_key("") if hasattr(config, "_get_full_key") else ""
            return [" ".join(filter(None, ["making", key, str((config or {}).get("_target_"))]))]
    return []
