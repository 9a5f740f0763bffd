"""Numbers of classes for labels: one reading for every head, in task pools and commands."""

import logging
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import nearest_hint

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
    values: Sequence[Any],
    classes: Sequence[str] | None,
    item: Callable[[int], str],
    owner: str = "",
    advice: str = ". Check classnames and label_column",
    more_labels: Sequence[Any] | None = (),
) -> list[int]:
    """Return the number of each label's class.

    A text is the name of a class or, if no name equals it, of the only one that does in Unicode's
    form NFC without regard to case. So are true and false. A number counts classes from 0 but, if
    all names are numbers, is a name. If names differ by a number alone (`1 star`, `2 stars`), it
    counts classes or is that number, whichever all labels fit. Texts of whole numbers are numbers
    too.

    Args:
        values: Texts, numbers, or tensors of one number.
        classes: The names of the classes by number, or None if there are none.
        item: Returns the name of an item in messages, by its position.
        owner: Of what they are the classes, for the message.
        advice: End of the message.
        more_labels: Further labels of the same data, which tell how numbers are meant. None if the
            names are those of the data: then numbers count, unless all names are numbers.

    Raises:
        CalibrationError: If a label is no class, or may be two.
    """
    names = _names(tuple(classes or ()))
    readings = names.readings(None if more_labels is None else [*values, *more_labels])
    numbers, *more = ([names.number(value, how) for value in values] for how in readings)
    for position, pair in enumerate(zip(numbers, *more, strict=True)):
        if len({*pair}) > 1:
            inside, counted = (str(classes[number]) for number in pair)  # type: ignore[index]
            raise CalibrationError(
                f"{item(position)}: label {values[position]!r:.60} may be {inside!r} or, counted "
                f"from 0, {counted!r}{owner}. Write the names of the classes in place of numbers"
            )
    if None not in numbers:
        return numbers  # type: ignore[return-value]
    position = numbers.index(None)
    value = values[position]
    hint = nearest_hint(value, classes or ()) if isinstance(value, str) else ""
    reason = "is no class number"
    if classes:
        reason = f"is none of the {len(classes)} classes{owner}{hint}: {', '.join(classes):.200}"
    raise CalibrationError(f"{item(position)}: label {value!r:.60} {reason}{advice}")


class _Names:
    """Class names, found as `class_numbers` says."""

    def __init__(self, names: Sequence[str]) -> None:
        self._exact = {name: number for number, name in reversed([*enumerate(names)])}
        self._folded = _unique({n: _folded(name) for n, name in enumerate(names)})
        values = {n: _whole(name) for n, name in enumerate(names)}
        self._counted = {number: number for number in range(len(names))} if names else None
        self._by_value = _unique(values) if names and None not in values.values() else None
        self._inside = _numbers_inside(names)

    def readings(self, values: Iterable[Any] | None) -> list[Mapping[int, int] | None]:
        """Return what numbers among labels may mean: number -> class, or None if all are classes.

        There are two if names have other numbers inside, and all labels fit both. Without labels
        numbers count from 0.
        """
        if self._by_value is not None:
            return [self._by_value]
        if self._inside is None or values is None:
            return [self._counted]
        numbers = {_whole(_plain(value)) for value in values if self._named(_plain(value)) is None}
        both = [self._inside, self._counted or {}]
        return [how for how in both if numbers - {None} <= how.keys()] or [self._counted]

    def number(self, value: Any, reading: Mapping[int, int] | None) -> int | None:
        """Return the class of a label, or None if there is none."""
        value = _plain(value)
        if (number := self._named(value)) is not None:
            return number
        if (whole := _whole(value)) is None:
            return None
        if reading is not None:
            return reading.get(whole)
        return whole if whole >= 0 else None

    def _named(self, value: Any) -> int | None:
        if not isinstance(value, str | bool):
            return None
        return self._exact.get(str(value), self._folded.get(_folded(str(value))))


# Datasets are read item by item, and a head may have a thousand classes.
_names = lru_cache(maxsize=16)(_Names)


def _plain(value: Any) -> Any:
    """Return the number of a tensor or array of one number, and other values as they are."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _folded(text: str) -> str:
    return unicodedata.normalize("NFC", text).casefold()


def _whole(value: Any) -> int | None:
    """Return a whole number, also of a text such as `1`, `01` or `1.0`, as pandas writes."""
    if isinstance(value, str):
        if value in _TRUTH:
            return _TRUTH.index(value)
        digits = value.removesuffix(".0")
        return int(digits) if digits.isdecimal() else None
    return int(value) if isinstance(value, int | float) and value % 1 == 0 else None


def _numbers_inside(names: Sequence[str]) -> dict[int, int] | None:
    """Return number -> class if names differ by one number alone, up to a plural's s."""
    numbers = [_NUMBER.findall(name) for name in names]
    rests = {_NUMBER.sub("", _folded(name)).strip().removesuffix("s") for name in names}
    if len(rests) != 1 or any(len(inside) != 1 for inside in numbers):
        return None
    classes = {int(inside[0]): number for number, inside in enumerate(numbers)}
    return classes if len(classes) == len(names) else None


def _unique(values: Mapping[int, Any]) -> dict[Any, int]:
    """Return value -> number, of values that a single number has."""
    counts = dict[Any, list[int]]()
    for number, value in values.items():
        counts.setdefault(value, []).append(number)
    return {value: numbers[0] for value, numbers in counts.items() if len(numbers) == 1}


def encode_labels(
    values: Sequence[Any], names: Sequence[str] | None, classnames: Sequence[str] | None, data: str
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
            values = [names[v] if _is_position(v, names) else v for v in values]
        else:
            _warn_of_other_numbers(names, chosen, data)
    numbers = class_numbers(values, chosen or None, lambda n: f"{data}, item {n}", more_labels=None)
    return numbers, chosen or None


def _is_position(value: Any, names: Sequence[str]) -> bool:
    return isinstance(value, int) and 0 <= value < len(names)


def _warn_of_other_numbers(names: Sequence[str], classnames: Sequence[str], data: str) -> None:
    """Warn if a class name has another number in the data."""
    for number, name in enumerate(names):
        if name in classnames and classnames[number : number + 1] != [name]:
            log.warning(
                "%s: class %r has number %d there and %d in the class names, which is used",
                data, name, number, classnames.index(name),
            )  # fmt: skip
            return
