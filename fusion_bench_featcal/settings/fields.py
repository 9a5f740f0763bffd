"""Declaration of settings: dataclass fields with a help text and their accepted values."""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass
from types import NoneType, UnionType
from typing import Any, get_args

from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.errors.words import option

_BOUNDS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "ge": (">=", operator.ge),
    "gt": (">", operator.gt),
    "le": ("at most", operator.le),
}


def setting(
    default: object,
    help: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    choices: Sequence[object] = (),
    accepts: str = "",
    check: Callable[[Any], bool] | None = None,
    convert: Callable[[Any], Any] | None = None,
    **more: Any,
) -> Any:
    """Declare a setting: a field of a dataclass whose annotation gives the type of its values.

    The annotation is `bool`, `int`, `float` or `str`, a union of these and `None`, any type if
    there is a `check`, or `Any` for values that are checked elsewhere. `auto` in addition to
    numbers is a choice: `int | str` with `choices=("auto",)`.

    Args:
        default: The default value.
        help: One or two sentences for `featcal settings` and the documentation.
        ge: Smallest number.
        gt: Lower bound that values must exceed.
        le: Largest number.
        choices: Accepted values, in addition to numbers if the annotation allows these.
        accepts: Text that describes the values, if annotation, bounds and choices do not suffice.
        check: Test of a value, if annotation, bounds and choices are not enough.
        convert: Applied to an accepted value, unless it is None.
        **more: Further metadata of the field, such as the command line name of its value.
    """
    values = {"choices": tuple(choices), "accepts": accepts, "check": check, "convert": convert}
    metadata = {"help": help, "ge": ge, "gt": gt, "le": le, **values, **more}
    if default == {}:
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def settings_of(kind: type) -> list[Field[Any]]:
    """Return the settings of a dataclass."""
    return [field for field in dataclasses.fields(kind) if "help" in field.metadata]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of dataclasses of settings, which are checked at construction.

    Raises:
        ValueError: If a value is not accepted.
    """

    def __post_init__(self) -> None:
        values = self.by_name
        check_values(type(self), values)
        for field in settings_of(type(self)):
            convert, value = field.metadata["convert"], values[field.name]
            if convert is not None and value is not None:
                object.__setattr__(self, field.name, convert(value))

    @property
    def by_name(self) -> dict[str, Any]:
        """All settings by name."""
        return {name: getattr(self, name) for name in self.names()}

    def as_dict(self) -> dict[str, Any]:
        """Return plain values by name, fit for JSON and YAML."""
        return {name: _plain(value) for name, value in self.by_name.items()}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all settings."""
        return tuple(field.name for field in settings_of(cls))


def _plain(value: object) -> Any:
    """Return a setting's value for JSON. Families and rules that are objects become their repr."""
    if isinstance(value, Mapping):
        return {str(key): entry for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return list(value)
    return value if value is None or isinstance(value, str | int | float) else repr(value)


def check_values(kind: type, values: Mapping[str, object], prefix: str = "") -> None:
    """Refuse unknown names, and values that a dataclass of settings does not accept.

    Args:
        kind: The dataclass that declares the settings.
        values: Values by name.
        prefix: Text before a name in messages, such as `taskpool.heads.a.`.

    Raises:
        ValueError: Naming each setting with its value and the accepted ones.
    """
    fields = {field.name: field for field in settings_of(kind)}
    refuse_unknown(values, fields, prefix)
    problems = [
        f"{prefix + name if prefix else option(name)} must be {accepted_values(fields[name])}, "
        f"got {value!r:.100}"
        for name, value in values.items()
        if not _accepts(fields[name], value)
    ]
    if problems:
        raise ValueError("; ".join(problems))


def accepted_values(field: Field[object]) -> str:
    """Return the accepted values of a setting in words."""
    kinds, rules = _kinds(field), field.metadata
    choices = [yaml_word(choice) for choice in rules["choices"]]
    words = ["null"] if NoneType in kinds else []
    if rules["accepts"]:
        words.append(rules["accepts"])
    elif int in kinds or float in kinds:
        bounds = [
            f"{sign} {rules[b]:g}" for b, (sign, _) in _BOUNDS.items() if rules[b] is not None
        ]
        number = "an integer" if int in kinds else "a finite number"
        words += [*choices, f"{number} {' and '.join(bounds)}".strip().replace("e+", "e")]
    elif choices:
        words.append(f"one of {', '.join(choices)}")
    else:
        words.append("true or false" if bool in kinds else "a text")
    return " or ".join(words)


def yaml_word(value: object) -> str:
    """Return a value in YAML's one-line form."""
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def is_number(value: object) -> bool:
    """Return True for a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_integer(value: object, least: int) -> bool:
    """Return True for an integer of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_mapping(value: object) -> bool:
    """Return True for a mapping."""
    return isinstance(value, Mapping)


def is_mapping_to(is_value: Callable[[Any], bool], value: object) -> bool:
    """Return True for a mapping whose values all pass a test."""
    return isinstance(value, Mapping) and all(map(is_value, value.values()))


def is_text_list(value: object, allowed: Sequence[str] | None = None) -> bool:
    """Return True for a list of texts that are not empty, and all in `allowed` if it is given."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(t, str) and t and (allowed is None or t in allowed) for t in value)
    )


def _kinds(field: Field[object]) -> Sequence[Any]:
    return get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)


def _accepts(field: Field[object], value: object) -> bool:
    kinds, rules = _kinds(field), field.metadata
    if value is None and NoneType in kinds:
        return True
    if rules["check"] is not None:
        return rules["check"](value)
    # `1 in (True,)` holds in Python, so the type is compared too.
    if any(type(value) is type(choice) and value == choice for choice in rules["choices"]):
        return True
    if int in kinds or float in kinds:
        is_kind = is_number(value) and (float in kinds or isinstance(value, int))
        bounds = ((test, rules[b]) for b, (_, test) in _BOUNDS.items() if rules[b] is not None)
        return is_kind and all(test(value, bound) for test, bound in bounds)
    if rules["choices"] or Any in kinds:
        return not rules["choices"]
    return isinstance(value, bool) if bool in kinds else isinstance(value, str) and value != ""
