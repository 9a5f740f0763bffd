"""Class indices of a dataset's labels."""

import logging
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import nearest_hint

log = logging.getLogger(__name__)

_RULES = ("name", "order", "either")  # `either` is for FusionBench's class names only


def check_classnames_by(value: Any, name: str) -> None:
    """Refuse anything but `name` and `order`.

    Raises:
        ValueError: If it is another value.
    """
    if value not in _RULES:
        raise ValueError(f"{name}: classnames_by must be name or order, got {value!r}")


def sort_names(names: Iterable[str]) -> list[str]:
    """Sort class names: as numbers if all are numbers, else as texts."""
    names = sorted(names)
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else names


def match_names(
    names: Sequence[str], classnames: Sequence[str], data: str, by: str = "name"
) -> list[int]:
    """Return the position in `classnames` of each of the data's class names.

    If all names are in `classnames`, they are matched by name, in any order. Numbers from 0 (`0`,
    `1`, ...) are positions. If there are equally many names and the common ones have equal
    positions, the order is the same. Anything else could swap classes and is refused.

    Args:
        names: The data's class names, by label.
        classnames: The configured class names.
        data: Name of the dataset in messages.
        by: With `name`, classes are matched by name. With `order`, they are in the order of
            `classnames`. With `either`, by name if possible, else in order, as in FusionBench.

    Raises:
        ValueError: If the two lists do not match.
    """
    names, classnames = list(names), list(classnames)
    same_length, common = len(names) == len(classnames), set(names) & set(classnames)
    if names == classnames or (by == "order" and same_length):
        return list(range(len(names)))
    if by != "order":
        if common == set(names) and len(set(classnames)) == len(classnames):
            return [classnames.index(name) for name in names]
        numbers = [int(name) if name.isdecimal() else -1 for name in names]
        is_numbered = min(numbers) == 0 and len(set(numbers)) == len(numbers)
        if is_numbered and not common and max(numbers) < len(classnames):
            return numbers
    moved = [n for n in names if n in common and names.index(n) != classnames.index(n)]
    if same_length and (by == "either" or (common and not moved)):
        if moved:
            log.warning(
                "%s: %r is another label in FusionBench's list of class names, which is used",
                data,
                moved[0],
            )
        return list(range(len(names)))
    strangers = [f"{n!r}{nearest_hint(n, classnames)}" for n in names if n not in common]
    unknown = f" No class name: {strangers[0]}." if strangers else ""
    raise ValueError(
        f"{data}: the data's {len(names)} classes ({_short(names)}) and {len(classnames)} "
        f"classnames ({_short(classnames)}) do not match.{unknown} "
        "Check label_column, or use the data's names in any order, or other names in that order "
        "and classnames_by: order."
    )


def encode_labels(
    values: Sequence[Any],
    names: Sequence[str] | None,
    classnames: Sequence[str] | None,
    data: str,
    by: str = "name",
) -> tuple[list[int], list[str] | None]:
    """Return the class indices of a column of labels, and the class names if there are any.

    Args:
        values: The labels.
        names: The data's names of its integers.
        classnames: The configured names, to which `names` are matched (`match_names`). Without
            both, the names are the distinct texts, sorted.
        data: Name of the dataset in messages.
        by: Rule of `match_names`.

    Raises:
        ValueError: If the data's names and the configured ones do not match.
        CalibrationError: If a label is not a class, with the item's number.
    """
    if names is None and values and all(isinstance(value, str) for value in values):
        texts = sort_names(set(values))
        are_positions = all(t.isdecimal() for t in texts) and not set(texts) & {*(classnames or ())}
        names = texts if not classnames or are_positions or by == "order" else classnames
    all_names = names or classnames
    labels = [label_index(v, all_names, f"{data}, item {i}") for i, v in enumerate(values)]
    if names is None or classnames is None:
        return labels, None if all_names is None else list(all_names)
    positions = match_names(names, classnames, data, by)
    return [positions[label] for label in labels], list(classnames)


def label_index(value: Any, names: Sequence[str] | None, item: str) -> int:
    """Return the class of a label: an integer of any kind, or a class name.

    Raises:
        CalibrationError: If there is no such class.
    """
    if isinstance(value, str) and value in (names or ()):
        return list(names or ()).index(value)
    index = _as_integer(value)
    if index is not None and index >= 0 and (names is None or index < len(names)):
        return index
    count = f"{len(names or ())} class names"
    if isinstance(value, str):
        problem = f"{value!r} is none of the {count}{nearest_hint(value, names or ())}"
    elif index is None:
        problem = f"{value!r} is neither an integer nor a class name"
    else:
        limit = f"0..{len(names) - 1}, the {count}" if names else "0 and above"
        problem = f"{index} is out of range ({limit})"
    raise CalibrationError(f"{item}: label {problem}. Check classnames and label_column.")


def _as_integer(value: Any) -> int | None:
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if getattr(value, "ndim", None) == 0:  # a tensor or array of one number
        return _as_integer(value.item())
    return None


def _short(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(map(repr, names[:most])) + (", ..." if len(names) > most else "")
