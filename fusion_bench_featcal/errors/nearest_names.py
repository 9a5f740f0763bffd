"""Checks of names that users type, with the nearest valid name in the message."""

import difflib
import re
from collections.abc import Iterable

_KEYS_OF_RESULTS = frozenset({"average", "model_info"})
"""Keys beside the tasks in results of FusionBench and in reports."""
_MOST_BYTES = 100
_USABLE = re.compile(r"\w([\w .,:;+=@&%()#~'-]{0,98}[\w+)=-])?")


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


def refuse_unusable_names(
    names: Iterable[object], setting: str, reserved: Iterable[str] = ()
) -> None:
    """Refuse names that cannot be file names on Linux and macOS, or have another meaning.

    Args:
        names: Names of tasks, mergers or presets.
        setting: The option or setting with the names, for the message.
        reserved: Names with another meaning.

    Raises:
        ValueError: If a name has other signs, is too long or reserved, or differs from another only
            in case.
    """
    taken = {*_KEYS_OF_RESULTS, *reserved}
    for name in map(str, names):
        is_usable = _USABLE.fullmatch(name) and len(name.encode()) <= _MOST_BYTES
        if not is_usable or name.casefold() in taken:
            raise ValueError(
                f"{setting}: {name[:100]!r} cannot name a file, or is taken. Choose a name of at "
                f"most {_MOST_BYTES} bytes of letters, digits and signs such as _ and -"
            )
        taken.add(name.casefold())
