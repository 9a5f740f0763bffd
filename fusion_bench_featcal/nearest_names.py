"""Names that people type: the nearest valid one is offered when one is wrong."""

import difflib
from collections.abc import Iterable

_TYPO = 0.8


def nearest_hint(name: object, valid: Iterable[object]) -> str:
    """Text that offers the valid name nearest to `name`.

    Args:
        name: What was typed.
        valid: The names that exist.

    Returns:
        `" (nearest: 'x')"`, or an empty text where nothing is near.
    """
    near = difflib.get_close_matches(str(name), [str(known) for known in valid], n=1)
    return f" (nearest: {near[0]!r})" if near else ""


def nearest_name(name: object, valid: Iterable[str]) -> str:
    """The valid name most like `name`.

    A name that differs by a typing error comes first, then one with all words of `name` or only
    words of it: `steps` means `training_steps`, although it shares more letters with `notes`.

    Args:
        name: The name that was typed.
        valid: The names that exist, at least one.
    """
    known, words = list(valid), set(str(name).split("_"))
    related = [n for n in known if words <= {*n.split("_")} or words >= {*n.split("_")}]
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=_TYPO)
    return (close or difflib.get_close_matches(str(name), related or known, n=1, cutoff=0.0))[0]


def refuse_unknown_settings(
    given: Iterable[object], valid: Iterable[str], place: str = "method", owner: str = "this method"
) -> None:
    """Refuse keys that are no settings of a method.

    Args:
        given: The keys found.
        valid: The keys that exist.
        place: Where they stand in the configuration.
        owner: Whose settings they would be, for the message.

    Raises:
        ValueError: Naming the first unknown key and the nearest valid one.
    """
    known = list(valid)
    for key in given:
        if key not in known:
            near = nearest_name(key, known)
            raise ValueError(f"{place}.{key} is no setting of {owner}; the nearest is {near!r}")


def refuse_unknown_keys(given: Iterable[object], valid: Iterable[str], place: str) -> None:
    """Refuse keys that mean nothing.

    Args:
        given: The keys found.
        valid: The keys that exist.
        place: Where they stand in the configuration, such as `taskpool.tasks.shapes`.

    Raises:
        ValueError: Naming every unknown key with the nearest valid one, and all valid keys.
    """
    known = list(valid)
    unknown = [key for key in given if key not in known]
    if unknown:
        listed = ", ".join(f"{key!r}{nearest_hint(key, known)}" for key in unknown)
        raise ValueError(f"{place}: unknown key {listed}. Valid keys: {', '.join(known)}.")
