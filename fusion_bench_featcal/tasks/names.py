"""Names that people type: the nearest valid one is offered when one is wrong."""

import difflib
from collections.abc import Iterable


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
