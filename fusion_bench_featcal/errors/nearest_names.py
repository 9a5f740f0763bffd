"""Checks of names that users type, with the nearest valid name in the message."""

import difflib
import unicodedata
from collections.abc import Iterable

REPORT_COLUMNS = frozenset({
    "average", "gain over merger", "its gap", "model_info", "normalised",
    "recovered gap", "unseen (gain, tasks)", "worst task",
})  # fmt: skip
"""Columns of tables and keys of FusionBench's results that are not tasks."""
_NOT_IN_FILES = frozenset('/\\<>"|?*')
_LONGEST = 100  # bytes


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
    """Refuse names that cannot be file names on Linux and macOS, or columns of reports.

    Args:
        names: Names of tasks, mergers or presets.
        setting: The option or setting with the names, for the message.
        reserved: Names with another meaning.

    Raises:
        ValueError: If a name has path separators or control characters, is too long or reserved,
            or differs from another only in case.
    """
    taken = {*REPORT_COLUMNS, *reserved}
    for name in map(str, names):
        key = unicodedata.normalize("NFC", name).casefold()
        usable = name.isprintable() and not _NOT_IN_FILES & set(name) and name.strip(" .") == name
        if key in taken or not (name and usable and len(name.encode()) <= _LONGEST):
            problem = "is taken" if key in taken else "cannot name a file"
            raise ValueError(
                f"{setting}: {name[:_LONGEST]!r} {problem}. Choose another, of at most "
                f"{_LONGEST} bytes of letters, digits and signs such as _ and -"
            )
        taken.add(key)
