"""Checks of names that users type, with the nearest valid name in the message."""

import difflib
from collections.abc import Iterable


def nearest_hint(name: object, valid: Iterable[object]) -> str:
    """Return `" (nearest: 'x')"` with the valid name nearest to `name`, or "" without one."""
    near = difflib.get_close_matches(str(name), [str(candidate) for candidate in valid], n=1)
    return f" (nearest: {near[0]!r})" if near else ""


def refuse_unknown(names: Iterable[object], valid: Iterable[str], prefix: str) -> None:
    """Refuse unknown names of settings, options or columns.

    Args:
        names: The names to check.
        valid: The valid names.
        prefix: Text before a name in the message, such as `method.` or `taskpool.tasks.shapes.`.

    Raises:
        ValueError: Naming every unknown name with the nearest valid one, or else all valid names.
    """
    valid = list(valid)
    problems = []
    for name in names:
        if name not in valid:
            hint = nearest_hint(name, valid) or f". Known: {', '.join(valid) or 'none'}"
            problems.append(f"{prefix}{name} is unknown{hint}")
    if problems:
        raise ValueError("; ".join(problems))
