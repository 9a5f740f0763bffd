"""Types of everything that a report file holds, so that its readers need not doubt them."""

from collections.abc import Mapping
from typing import Any

from .files import ReportError

NUMBER = (int, float)
_SCALAR = (str, int, float, bool, None)
_ROWS = {"*": {"*": NUMBER}}

RUN = {
    "suite": (str,),
    "upstream": (str, None),
    "rows": _ROWS,
    "loss": _ROWS,
    "settings": {"*": {}},
    "cost": {"*": {"*": _SCALAR}},
    "samples": {"*": {"*": {"!": ("samples", "split"), "samples": NUMBER, "split": (str,)}}},
    "seeds": {"*": (int, None)},
    "test_sets": {"*": {}},
    "versions": {"*": (str,)},
    "device": {},
    "notes": [(str,)],
}
"""Layout of a run's report."""

_INTERVAL = ({"!": ("low", "high"), "low": NUMBER, "high": NUMBER}, None)
COMPARISON = {
    "suite": (str,),
    "runs": [(str,)],
    "failed": [{"upstream": (str, None), "name": (str,), "reason": (str,), "seed": (int, None)}],
    "rows": [
        {
            "!": ("upstream", "name", "accuracy"),
            "upstream": (str, None),
            "name": (str,),
            "accuracy": {"*": NUMBER},
            "gain": (*NUMBER, None),
            "gain_interval": _INTERVAL,
            "cost": {"*": _SCALAR},
        }
    ],
}
"""Layout of a comparison's report, as far as it is read again."""


def check_types(value: Any, layout: Any, place: str) -> None:
    """Check what was read from JSON; keys that the layout does not name may hold anything.

    Args:
        value: The value.
        layout: Types, of which it must be one (None for null); a list with the layout of all
            entries; or a mapping from keys, `*` for all, to layouts. Keys may be absent but for
            those listed under `!`.
        place: Where it stands, for the message.

    Raises:
        ReportError: Naming the first place that holds something else.
    """
    if isinstance(layout, tuple):
        _check_one_of(value, layout, place)
    elif isinstance(layout, list):
        if not isinstance(value, list):
            raise _wrong(value, "a list", place)
        for number, entry in enumerate(value):
            check_types(entry, layout[0], f"{place}[{number}]")
    else:
        if not isinstance(value, Mapping):
            raise _wrong(value, "a mapping", place)
        for key in layout.get("!", ()):
            if key not in value:
                raise ReportError(f"{place}: no {key}")
        for key, entry in value.items():
            expected = layout.get("*", layout.get(key))
            if expected is not None:
                check_types(entry, expected, f"{place}: {key}")


def _check_one_of(value: Any, kinds: tuple[Any, ...], place: str) -> None:
    nested = [kind for kind in kinds if isinstance(kind, dict)]
    if value is None and None in kinds:
        return
    if nested and isinstance(value, Mapping):
        check_types(value, nested[0], place)
        return
    types = tuple(kind for kind in kinds if isinstance(kind, type))
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        names = [kind.__name__ for kind in types] + (["null"] if None in kinds else [])
        raise _wrong(value, " or ".join(names or ["a mapping"]), place)


def _wrong(value: Any, expected: str, place: str) -> ReportError:
    shown = f"{type(value).__name__} {str(value)[:40]!r}"
    return ReportError(f"{place} must be {expected}, got {shown}")
