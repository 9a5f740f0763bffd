"""Class numbers of a dataset's labels: by name where there are names, else by number."""

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import nearest_hint

log = logging.getLogger(__name__)


def sort_names(names: Iterable[str]) -> list[str]:
    """Sort class names: as numbers if all are numbers, else as texts."""
    names = sorted(names)
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else names


def encode_labels(
    values: Sequence[Any], names: Sequence[str] | None, classnames: Sequence[str] | None, data: str
) -> tuple[list[int], list[str] | None]:
    """Return the class numbers of a column of labels, and the class names if there are any.

    Texts are names, which are found among the class names. If none is there and all are numbers
    from 0, such as `00`, they are class numbers. Integers are numbers of the data's own names. They
    are found by name if the class names contain all of these, else they are class numbers.

    Args:
        values: The labels.
        names: The data's names of its integers, as a `ClassLabel` has.
        classnames: The configured names. By default `names`, or the distinct texts, sorted.
        data: Name of the dataset in messages.

    Raises:
        CalibrationError: If a label is not a class, with the item's number.
    """
    texts = {value for value in values if isinstance(value, str)}
    if names is None and texts and all(isinstance(value, str | None) for value in values):
        if classnames is None:
            classnames = sort_names(texts)
        elif _are_numbers(texts) and not texts & set(classnames):
            values = [None if value is None else int(value) for value in values]
    chosen = list(classnames if classnames is not None else names or ())
    if names is None or not _contains(chosen, names):
        _warn_of_other_numbers(names or (), chosen, data)
        names = chosen
    labels = [class_number(v, names, f"{data}, item {n}") for n, v in enumerate(values)]
    if names is not chosen:
        labels = [chosen.index(names[label]) for label in labels]
    return labels, chosen or None


def class_number(value: Any, classnames: Sequence[str] | None, item: str) -> int:
    """Return the class of a label: a number of any kind, or a class name.

    Raises:
        CalibrationError: If there is no such class.
    """
    if isinstance(value, str) and value in (classnames or ()):
        return list(classnames or ()).index(value)
    number: Any = value
    if getattr(value, "ndim", None) == 0:  # a tensor or array
        number = number.item()
    limit = len(classnames) if classnames else math.inf
    if isinstance(number, int | float) and number % 1 == 0 and 0 <= number < limit:
        return int(number)
    hint = nearest_hint(value, classnames or ()) if isinstance(value, str) else ""
    names = f"one of {limit} class names" if classnames else "a class name"
    numbers = f"a number from 0 to {limit - 1}" if classnames else "a number from 0"
    raise CalibrationError(
        f"{item}: label {value!r} is neither {names}{hint} nor {numbers}. Check classnames and "
        "label_column"
    )


def _are_numbers(texts: set[str]) -> bool:
    """Return whether texts are different numbers from 0."""
    numbers = {int(text) if text.isdecimal() else -1 for text in texts}
    return min(numbers) == 0 and len(numbers) == len(texts)


def _contains(classnames: Sequence[str], names: Sequence[str]) -> bool:
    return set(names) <= set(classnames) and len(set(classnames)) == len(classnames)


def _warn_of_other_numbers(names: Sequence[str], classnames: Sequence[str], data: str) -> None:
    """Warn if a class name has another number in the data."""
    for number, name in enumerate(names):
        if name in classnames and classnames[number : number + 1] != [name]:
            log.warning(
                "%s: class %r has number %d there and %d in the class names, which is used",
                data, name, number, classnames.index(name),
            )  # fmt: skip
            return
