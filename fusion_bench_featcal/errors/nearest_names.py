"""Checks of names that users type, with the nearest valid name in the message."""

import difflib
import re
from collections.abc import Iterable
from functools import partial

Forms = Iterable[tuple[str, str]]
"""Pairs of a name, or a part of one, and the text to show for it."""


def nearest_hint(name: object, valid: Iterable[object], forms: Forms = ()) -> str:
    """Return `" (nearest: 'x')"` with the valid name nearest to `name`, or "" without one.

    Case and separators do not count, and of `featcal/plus` the last part is enough.

    Args:
        name: What a user typed.
        valid: The valid names.
        forms: Further names. Valid ones have priority.
    """
    names, bare = [*map(str, valid)], partial(re.sub, r"[\W_]", "")
    pairs = [*forms, *((n.rpartition("/")[2], n) for n in names), *((n, n) for n in names)]
    texts = {bare(form.casefold()): text for form, text in pairs}
    near = difflib.get_close_matches(bare(str(name).casefold().replace("+", "plus")), texts, n=1)
    return f" (nearest: {texts[near[0]]!r})" if near else ""


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
    if unknown := [name for name in names if name not in valid]:
        choices = f". Known: {', '.join(valid) or 'none'}"
        hints = (f"{name} is unknown{nearest_hint(name, valid) or choices}" for name in unknown)
        raise ValueError("; ".join(f"{prefix}{hint}" for hint in hints))
