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


def refuse_unknown_settings(
    keys: Iterable[object],
    valid: Iterable[str],
    setting: str = "method",
    owner: str = "this method",
) -> None:
    """Refuse keys that are not settings of a method.

    Args:
        keys: The keys to check.
        valid: The valid keys.
        setting: Path of the keys in the configuration.
        owner: The method's name, for the message.

    Raises:
        ValueError: Naming the first unknown key and the nearest valid one.
    """
    names = list(valid)
    for key in keys:
        if key not in names:
            hint = nearest_hint(key, names)
            raise ValueError(f"{setting}.{key} is no setting of {owner}{hint}")


def refuse_unknown_keys(keys: Iterable[object], valid: Iterable[str], setting: str) -> None:
    """Refuse unknown keys.

    Args:
        keys: The keys to check.
        valid: The valid keys.
        setting: Path of the keys in the configuration, such as `taskpool.tasks.shapes`.

    Raises:
        ValueError: Naming every unknown key with the nearest valid one, and all valid keys.
    """
    names = list(valid)
    unknown = [key for key in keys if key not in names]
    if unknown:
        listed = ", ".join(f"{key!r}{nearest_hint(key, names)}" for key in unknown)
        raise ValueError(f"{setting}: unknown key {listed}. Valid keys: {', '.join(names)}.")


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
    earlier = dict.fromkeys([*REPORT_COLUMNS, *reserved])
    for name in map(str, names):
        key = unicodedata.normalize("NFC", name).casefold()
        usable = name.isprintable() and not _NOT_IN_FILES & set(name) and name.strip(" .") == name
        if not (name and usable and len(name.encode()) <= _LONGEST):
            raise ValueError(
                f"{setting}: {name[:_LONGEST]!r} cannot name a file. Use at most {_LONGEST} bytes "
                "of letters, digits and signs such as _ and -"
            )
        if key in earlier:
            other = earlier[key]
            why = (
                "has a meaning already" if other is None else f"differs from {other!r} only in case"
            )
            raise ValueError(f"{setting}: the name {name!r} {why}. Choose another")
        earlier[key] = name
