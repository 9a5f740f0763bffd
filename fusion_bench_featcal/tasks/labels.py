"""From the labels a data set holds to the index of a class name."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.tasks.names import nearest_hint


def match_names(found: Sequence[str], wanted: Sequence[str], place: str) -> list[int]:
    """For each class name of the data, the position of its class name in the configuration.

    Names that are all known are matched by name, in any order; names that are all unknown
    (`n01440764`, `0`) are taken in order. Anything between is refused: it would swap classes
    unnoticed.

    Args:
        found: The data's own names: folders, distinct text labels, or a data set's class list.
        wanted: The configured class names.
        place: Where the class names are set, for messages.

    Returns:
        Positions in `wanted`, one for each of `found`.

    Raises:
        ValueError: If the two lists neither match by name nor in order.
    """
    if list(found) == list(wanted):
        return list(range(len(found)))
    if set(found) <= set(wanted) and len(set(wanted)) == len(wanted):
        return [list(wanted).index(name) for name in found]
    if len(found) != len(wanted):
        stranger = next((name for name in found if name not in wanted), found[0])
        raise ValueError(
            f"{place}: {len(wanted)} class names for the {len(found)} classes of the data "
            f"({_short(found)}); {stranger!r} is none of them{nearest_hint(stranger, wanted)}. "
            "Check classnames and label_column."
        )
    for position, name in enumerate(found):
        if name in wanted and wanted[position] != name:
            raise ValueError(
                f"{place}: class name {name!r} is label {position} in the data, but stands at "
                f"{list(wanted).index(name)} in classnames. Use the data's names in any order "
                f"({_short(found)}), or other names in that order."
            )
    return list(range(len(found)))


def encode_labels(
    values: Sequence[Any], names: Sequence[str] | None, classnames: Sequence[str] | None, place: str
) -> tuple[list[int], list[str] | None]:
    """Class indices of a whole column of labels.

    Args:
        values: Integers, or names of classes.
        names: The data's own names for its integers, where it has any.
        classnames: The configured class names (None: `names`, or the distinct texts in alphabetical
            order).
        place: The data, for messages.

    Returns:
        The index of each item's class, and the class names where they are known.

    Raises:
        ValueError: If the data's names and the configured ones do not fit together.
        CalibrationError: If a label is no class, naming the item.
    """
    if names is None and values and all(isinstance(value, str) for value in values):
        names = list(classnames or sorted(set(values)))
    known = names or classnames
    labels = [label_index(v, known, f"{place}, item {i}") for i, v in enumerate(values)]
    if names is None or classnames is None:
        return labels, None if known is None else list(known)
    positions = match_names(names, classnames, place)
    return [positions[label] for label in labels], list(classnames)


def label_index(value: Any, names: Sequence[str] | None, place: str) -> int:
    """Index of the class that a data set's label stands for.

    Args:
        value: An integer (also a bool or a float without fraction), or the name of a class.
        names: The class names, or None where they are not known.
        place: The item, for messages.

    Returns:
        The index, at least 0 and below the number of names.

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
