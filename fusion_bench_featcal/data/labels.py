"""Numbers of classes for labels: one reading for every head, in task pools and commands."""

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import nearest_hint
from fusion_bench_featcal.errors.words import user_term

log = logging.getLogger(__name__)

LABEL = "label"
"""Usual column of labels."""

_TRUTH = ("False", "True")
_NUMBER = re.compile(r"\d+")


def sort_names(names: Iterable[str]) -> list[str]:
    """Sort class names: as numbers if all are numbers, else as texts."""
    names = sorted(names)
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else names


def are_unnamed(classes: Sequence[str]) -> bool:
    """Return whether classes have the names of transformers alone: LABEL_0, ...."""
    return all(name.startswith("LABEL_") for name in classes)


def class_numbers(
    values: Sequence[object],
    classes: Sequence[str] | None,
    item: Callable[[int], str],
    owner: str = "",
    advice: str | None = None,
    *,
    are_own: bool = False,
) -> list[int]:
    """Return the number of each label's class.

    A text is the name of a class or, if no name equals it, of the only one that does in Unicode's
    form NFC without regard to case. So are true and false. A whole number, also as a text, counts
    classes from 0 but, if all names are numbers, is a name. If other names have numbers inside,
    such as `3 stars`, labels have to be names.

    Args:
        values: Texts, numbers, or tensors of one number.
        classes: The names of the classes by number, or None if there are none.
        item: Returns the name of an item in messages, by its position.
        owner: Of what they are the classes, for the message.
        advice: End of the message. None names the column.
        are_own: Whether the names are those of the data, which numbers count in any case.

    Raises:
        CalibrationError: If a label is no class.
    """
    names = _names(tuple(classes or ()))
    find = names.number if are_own or not names.have_numbers_inside else names.named
    numbers = [find(value) for value in values]
    if None not in numbers:
        return numbers  # type: ignore[return-value]
    position = numbers.index(None)
    value = values[position]
    hint = nearest_hint(value, classes or ()) if isinstance(value, str) else ""
    reason = "is no class number"
    if names.have_numbers_inside:
        advice = f". Write labels as names of classes, which have numbers inside{advice}"
    if classes:
        reason = f"is none of the {len(classes)} classes{owner}{hint}: {', '.join(classes):.200}"
    advice = f". Check {user_term('label_column')}" if advice is None else advice
    raise CalibrationError(f"{item(position)}: label {value!r:.60} {reason}{advice}")


class _Names:
    """Class names, found as `class_numbers` says."""

    def __init__(self, names: Sequence[str]) -> None:
        self._exact = {name: number for number, name in reversed([*enumerate(names)])}
        self._folded = _unique({n: _folded(name) for n, name in enumerate(names)})
        values = {n: _whole(name) for n, name in enumerate(names)}
        are_numbers = None not in values.values()
        self._numbers = _unique(values) if are_numbers else {n: n for n in values}
        has_digits = not (are_numbers or are_unnamed(names)) and any(map(_NUMBER.search, names))
        self.have_numbers_inside = has_digits

    def named(self, value: object) -> int | None:
        """Return the class that a text names, or None."""
        if not isinstance(value, str | bool):
            return None
        return self._exact.get(str(value), self._folded.get(_folded(str(value))))

    def number(self, value: Any) -> int | None:
        """Return the class of a label, or None if there is none."""
        value = value.item() if getattr(value, "ndim", None) == 0 else value
        if (number := self.named(value)) is not None:
            return number
        if (whole := _whole(value)) is None or self._exact:
            return None if whole is None else self._numbers.get(whole)
        return whole if whole >= 0 else None


# Datasets are read item by item, and a head may have a thousand classes.
_names = lru_cache(maxsize=16)(_Names)


def _folded(text: str) -> str:
    return unicodedata.normalize("NFC", text).casefold()


def _whole(value: object) -> int | None:
    """Return a whole number, also of a text such as `1`, `01` or `1.0`, as pandas writes."""
    if isinstance(value, str):
        if value in _TRUTH:
            return _TRUTH.index(value)
        digits = value.removesuffix(".0")
        return int(digits) if digits.isdecimal() else None
    return int(value) if isinstance(value, int | float) and value % 1 == 0 else None


def _unique(values: Mapping[int, object]) -> dict[object, int]:
    """Return value -> number, of values that a single number has."""
    counts = Counter(values.values())
    return {value: number for number, value in values.items() if counts[value] == 1}


def encode_labels(
    values: Sequence[object],
    names: Sequence[str] | None,
    classnames: Sequence[str] | None,
    data: str,
) -> tuple[list[int], list[str] | None]:
    """Return the class numbers of a column of labels, and the class names if there are any.

    Integers of data with names of its own stand for these, if the class names have all of them.

    Args:
        values: The labels, read as `class_numbers` says.
        names: The data's names of its integers, as a `ClassLabel` has.
        classnames: The configured names. By default `names`, or the distinct texts, sorted.
        data: Name of the dataset in messages.

    Raises:
        CalibrationError: If a label is not a class, with the item's number.
    """
    if any(isinstance(value, bool) for value in values):
        values = [str(value) if isinstance(value, bool) else value for value in values]
        names = names or _TRUTH
    texts = {value for value in values if isinstance(value, str)}
    are_texts = texts and all(isinstance(value, str | None) for value in values)
    if classnames is None and names is None and are_texts:
        classnames = sort_names(texts)
    chosen = list(classnames if classnames is not None else names or ())
    if names is not None:
        if set(names) <= set(chosen) and len(set(chosen)) == len(chosen):
            label_names = dict(enumerate(names))
            values = [label_names.get(v, v) if isinstance(v, int) else v for v in values]
        else:
            _warn_of_other_numbers(names, chosen, data)
    numbers = class_numbers(values, chosen or None, lambda n: f"{data}, item {n}", are_own=True)
    return numbers, chosen or None


def _warn_of_other_numbers(names: Sequence[str], classnames: Sequence[str], data: str) -> None:
    """Warn if a class name has another number in the data."""
    for number, name in enumerate(names):
        if name in classnames and classnames[number : number + 1] != [name]:
            log.warning(
                "%s: class %r has number %d there and %d in the class names, which is used",
                data, name, number, classnames.index(name),
            )  # fmt: skip
            return
