"""Class indices of a data set's labels."""

import logging
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from fusion_bench_featcal.nearest_names import nearest_hint
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

CLASSNAMES_BY = ("name", "order")
_EITHER = "either"  # for FusionBench's class names alone


def check_classnames_by(value: Any, place: str) -> None:
    """Refuse anything but `name` and `order`.

    Raises:
        ValueError: Naming the place.
    """
    if value not in (*CLASSNAMES_BY, _EITHER):
        raise ValueError(f"{place}: classnames_by must be name or order, got {value!r}")


def sort_names(names: Iterable[str]) -> list[str]:
    """Sort class names: as numbers where all are numbers, else as texts."""
    names = sorted(names)
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else names


def match_names(
    names: Sequence[str], classnames: Sequence[str], place: str, by: str = "name"
) -> list[int]:
    """For each class name of the data, the position of its class name in the configuration.

    Names that are all known are matched by name, in any order; numbers from 0 (`0`, `1`, ...) are
    positions. Names that are all unknown (`n01440764`) are refused, for nothing tells their order;
    so is anything between: it would swap classes unnoticed.

    `by` is `name`; `order` takes the data's classes in order, whatever their names; `either` takes
    them in order, as FusionBench does, where they are not the same names, with a warning where some
    are.

    Raises:
        ValueError: If the two lists do not match.
    """
    in_order = list(range(len(names)))
    if list(names) == list(classnames) or (by == "order" and len(names) == len(classnames)):
        return in_order
    if by != "order":
        if set(names) <= set(classnames) and len(set(classnames)) == len(classnames):
            return [list(classnames).index(name) for name in names]
        numbers = [int(name) if name.isdecimal() else -1 for name in names]
        is_position = not set(names) & set(classnames) and len(set(numbers)) == len(numbers)
        if is_position and min(numbers) == 0 and max(numbers) < len(classnames):
            return numbers
    if len(names) != len(classnames):
        stranger = next((name for name in names if name not in classnames), names[0])
        raise ValueError(
            f"{place}: {len(classnames)} class names for the {len(names)} classes of the data "
            f"({_short(names)}); {stranger!r} is none of them{nearest_hint(stranger, classnames)}. "
            "Check classnames and label_column."
        )
    for position, name in enumerate(names):
        if name in classnames and classnames[position] != name:
            if by == _EITHER:
                log.warning(
                    "%s: label %d is %r in the data and %r in FusionBench's list, which is used",
                    *(place, position, name, classnames[position]),
                )
                return in_order
            raise ValueError(
                f"{place}: class name {name!r} is label {position} in the data, but stands at "
                f"{list(classnames).index(name)} in classnames. Use the data's names in any order "
                f"({_short(names)}), or other names in that order and classnames_by: order."
            )
    if by == "name" and not set(names) & set(classnames):
        raise ValueError(
            f"{place}: the data's classes ({_short(names)}) and classnames ({_short(classnames)}) "
            "share no name. Use the data's names, or set classnames_by: order if they stand in the "
            "same order."
        )
    return in_order


def encode_labels(
    values: Sequence[Any],
    names: Sequence[str] | None,
    classnames: Sequence[str] | None,
    place: str,
    by: str = "name",
) -> tuple[list[int], list[str] | None]:
    """Class indices of a whole column of labels, and the class names where they are known.

    `names` are the data's own names for its integers, `classnames` the configured ones, matched to
    them by the rule `by` (`match_names`); without both, they are the distinct texts, sorted.

    Raises:
        ValueError: If the data's names and the configured ones do not fit together.
        CalibrationError: If a label is no class, naming the item.
    """
    if names is None and values and all(isinstance(value, str) for value in values):
        texts = sort_names(set(values))
        numbered = all(text.isdecimal() for text in texts) and not set(texts) & {
            *(classnames or ())
        }
        names = texts if not classnames or numbered or by == "order" else classnames
    all_names = names or classnames
    labels = [label_index(v, all_names, f"{place}, item {i}") for i, v in enumerate(values)]
    if names is None or classnames is None:
        return labels, None if all_names is None else list(all_names)
    positions = match_names(names, classnames, place, by)
    return [positions[label] for label in labels], list(classnames)


def label_index(value: Any, names: Sequence[str] | None, place: str) -> int:
    """Index of the class that a label stands for: a whole number of any kind, or a class's name.

    Raises:
        CalibrationError: If there is no such class.
    """
    if isinstance(value, str):
        if names is None:
            raise CalibrationError(
                f"{place}: label {value!r} is a text, and there are no classnames"
            )
        if value not in names:
            raise CalibrationError(
                f"{place}: label {value!r} is none of the {len(names)} class names"
                f"{nearest_hint(value, names)}. Check classnames and label_column."
            )
        return list(names).index(value)
    index = _as_integer(value)
    if index is None:
        raise CalibrationError(
            f"{place}: label {value!r} is neither an integer nor a class name. Check label_column."
        )
    if index < 0 or (names is not None and index >= len(names)):
        limit = f"0..{len(names) - 1}, the {len(names)} class names" if names else "0 and above"
        raise CalibrationError(
            f"{place}: label {index} is out of range ({limit}). Check classnames and label_column."
        )
    return index


def _as_integer(value: Any) -> int | None:
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if getattr(value, "ndim", None) == 0:  # a tensor or array of one number
        return _as_integer(value.item())
    return None


def _short(names: Sequence[str], most: int = 6) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return shown + (", ..." if len(names) > most else "")
