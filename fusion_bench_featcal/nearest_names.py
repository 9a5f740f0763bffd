"""Names that people type: the nearest valid one is offered, unusable ones are refused."""

import difflib
import unicodedata
from collections.abc import Iterable

REPORT_COLUMNS = frozenset({
    "average", "gain over merger", "its gap", "model_info", "normalised", "paper",
    "recovered gap", "unseen (gain, tasks)", "worst task",
})  # fmt: skip
"""Names beside those of tasks, in tables and in what FusionBench's task pools return."""
_TYPO = 0.8
_NOT_IN_FILES = frozenset('/\\<>"|?*')
_LONGEST = 100  # bytes


def nearest_hint(name: object, valid: Iterable[object]) -> str:
    """Text that offers the valid name nearest to `name`.

    Args:
        name: What was typed.
        valid: The names that exist.

    Returns:
        `" (nearest: 'x')"`, or an empty text where nothing is near.
    """
    near = difflib.get_close_matches(str(name), [str(candidate) for candidate in valid], n=1)
    return f" (nearest: {near[0]!r})" if near else ""


def nearest_name(name: object, valid: Iterable[str]) -> str:
    """The valid name most like `name`.

    A name that differs by a typing error comes first, then one with all words of `name` or only
    words of it: `samples` means `samples_per_task`.

    Args:
        name: The name that was typed.
        valid: The names that exist, at least one.
    """
    names, words = list(valid), set(str(name).split("_"))
    related = [n for n in names if words <= {*n.split("_")} or words >= {*n.split("_")}]
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=_TYPO)
    return (close or difflib.get_close_matches(str(name), related or names, n=1, cutoff=0.0))[0]


def refuse_unknown_settings(
    keys: Iterable[object], valid: Iterable[str], place: str = "method", owner: str = "this method"
) -> None:
    """Refuse keys that are no settings of a method.

    Args:
        keys: The keys found.
        valid: The keys that exist.
        place: Where they stand in the configuration.
        owner: Whose settings they would be, for the message.

    Raises:
        ValueError: Naming the first unknown key and the nearest valid one.
    """
    names = list(valid)
    for key in keys:
        if key not in names:
            near = nearest_name(key, names)
            raise ValueError(f"{place}.{key} is no setting of {owner}; the nearest is {near!r}")


def refuse_unknown_keys(keys: Iterable[object], valid: Iterable[str], place: str) -> None:
    """Refuse keys that mean nothing.

    Args:
        keys: The keys found.
        valid: The keys that exist.
        place: Where they stand in the configuration, such as `taskpool.tasks.shapes`.

    Raises:
        ValueError: Naming every unknown key with the nearest valid one, and all valid keys.
    """
    names = list(valid)
    unknown = [key for key in keys if key not in names]
    if unknown:
        listed = ", ".join(f"{key!r}{nearest_hint(key, names)}" for key in unknown)
        raise ValueError(f"{place}: unknown key {listed}. Valid keys: {', '.join(names)}.")


def refuse_unusable_names(
    names: Iterable[object], place: str, reserved: Iterable[str] = ()
) -> None:
    """Refuse names that cannot be file names on Linux and macOS, or columns of reports.

    Args:
        names: Names of tasks, mergers or presets.
        place: The option or setting that has them, for the message.
        reserved: Names that mean something else there.

    Raises:
        ValueError: If a name holds a path or control characters, is too long or reserved, or
            differs from another only in case.
    """
    earlier = dict.fromkeys([*REPORT_COLUMNS, *reserved])
    for name in map(str, names):
        key = unicodedata.normalize("NFC", name).casefold()
        usable = name.isprintable() and not _NOT_IN_FILES & set(name) and name.strip(" .") == name
        if not (name and usable and len(name.encode()) <= _LONGEST):
            raise ValueError(
                f"{place}: {name[:_LONGEST]!r} cannot name a file. Use at most {_LONGEST} bytes "
                "of letters, digits and signs such as _ and -"
            )
        if key in earlier:
            other = earlier[key]
            why = (
                "has a meaning already" if other is None else f"differs from {other!r} only in case"
            )
            raise ValueError(f"{place}: the name {name!r} {why}. Choose another")
        earlier[key] = name
