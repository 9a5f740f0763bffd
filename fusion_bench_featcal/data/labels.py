"""Class indices of labels, read alike for every head, in task pools and commands."""

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
    """Return whether all classes have default names of transformers: LABEL_0, ...."""
    return all(name.startswith("LABEL_") for name in classes)


def class_indices(
    values: Sequence[object],
    classes: Sequence[str] | None,
    item: Callable[[int], str],
    owner: str = "",
    advice: str | None = None,
    *,
    are_own: bool = False,
) -> list[int]:
    """Return the index of each label's class.

    A text is the name of a class. If no name equals it, it is the only name that equals it in
    Unicode's form NFC and regardless of case. The same holds for true and false. A whole number,
    also as a text, is a class index from 0, unless all names are numbers: then it is a name. If
    names contain digits, such as `3 stars`, labels have to be names.

    Args:
        values: Texts, numbers, or tensors of one number.
        classes: Class names by index, or None without names.
        item: Returns the name of the example at an index, for messages.
        owner: Owner of the classes, for the message, such as ` of the model`.
        advice: End of the message. By default it names the column of labels.
        are_own: Whether the data define the names, so that numbers are indices in any case.

    Raises:
        CalibrationError: If a label is no class.
    """
    finder = _cached_finder(tuple(classes or ()))
    needs_names = finder.have_digits and not are_own
    find = finder.find_by_name if needs_names else finder.find
    indices = [find(value) for value in values]
    if None not in indices:
        return indices  # type: ignore[return-value]
    position = indices.index(None)
    value = values[position]
    hint = nearest_hint(value, classes or ()) if isinstance(value, str) else ""
    reason = "is not a class number"
    if needs_names:
        advice = f". Class names contain numbers here: write each label as its name{advice or ''}"
    if classes:
        reason = f"is not one of the {len(classes)} classes{owner}{hint}: {', '.join(classes):.200}"
    advice = f". Check {user_term('label_column')}" if advice is None else advice
    raise CalibrationError(f"{item(position)}: label {value!r:.60} {reason}{advice}")


class _ClassFinder:
    """Finds classes by their names or indices, as described in `class_indices`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._exact = {name: index for index, name in reversed([*enumerate(names)])}
        self._folded = _unique({n: _folded(name) for n, name in enumerate(names)})
        values = {n: _whole(name) for n, name in enumerate(names)}
        are_numbers = None not in values.values()
        self._numbers = _unique(values) if are_numbers else {n: n for n in values}
        are_texts = not are_numbers and not are_unnamed(names)
        self.have_digits = are_texts and any(map(_NUMBER.search, names))

    def find_by_name(self, value: object) -> int | None:
        """Return the index of the class that a text names, or None."""
        if not isinstance(value, str | bool):
            return None
        return self._exact.get(str(value), self._folded.get(_folded(str(value))))

    def find(self, value: Any) -> int | None:
        """Return the index of a label's class, or None if there is none."""
        value = value.item() if getattr(value, "ndim", None) == 0 else value
        if (index := self.find_by_name(value)) is not None:
            return index
        if (whole := _whole(value)) is None or self._exact:
            return None if whole is None else self._numbers.get(whole)
        return whole if whole >= 0 else None


# Cached, because datasets are read item by item, and a head may have a thousand classes.
_cached_finder = lru_cache(maxsize=16)(_ClassFinder)


def _folded(text: str) -> str:
    return unicodedata.normalize("NFC", text).casefold()


def _whole(value: object) -> int | None:
    """Return a whole number, also from a text such as `1`, `01` or `1.0`, which pandas writes."""
    if isinstance(value, str):
        if value in _TRUTH:
            return _TRUTH.index(value)
        digits = value.removesuffix(".0")
        return int(digits) if digits.isdecimal() else None
    return int(value) if isinstance(value, int | float) and value % 1 == 0 else None


def _unique(values: Mapping[int, object]) -> dict[object, int]:
    """Return value -> index, for values that occur once."""
    counts = Counter(values.values())
    return {value: index for index, value in values.items() if counts[value] == 1}


def encode_labels(
    values: Sequence[object],
    names: Sequence[str] | None,
    classnames: Sequence[str] | None,
    data: str,
) -> tuple[list[int], list[str] | None]:
    """Return the class indices of a column of labels, and the class names if there are any.

    If the class names include all of the data's own names, integers of the data stand for the
    data's names.

    Args:
        values: The labels, in the forms of `class_indices`.
        names: The data's own names of its integers, such as those of a `ClassLabel`.
        classnames: The configured names. By default `names`, or the distinct texts, sorted.
        data: Name of the dataset in messages.

    Raises:
        CalibrationError: If a label is not a class. The message has the item's index.
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
        moved = [n for n, name in enumerate(names) if name in chosen and chosen.index(name) != n]
        if set(names) <= set(chosen) and len(set(chosen)) == len(chosen):
            label_names = dict(enumerate(names))
            values = [label_names.get(v, v) if isinstance(v, int) else v for v in values]
        elif moved:
            name = names[moved[0]]
            log.warning(
                "%s: class %r is number %d in the data but %d in the class names. The class names "
                "are used",
                data, name, moved[0], chosen.index(name),
            )  # fmt: skip
    indices = class_indices(values, chosen or None, lambda n: f"{data}, example {n}", are_own=True)
    return indices, chosen or None
