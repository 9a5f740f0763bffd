"""Declaration of settings: dataclass fields with a help text and their accepted values."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args

T = TypeVar("T")


def setting(
    default: Any,
    help: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    choices: Sequence[Any] = (),
    accepts: str = "",
    check: Callable[[Any], bool] | None = None,
    group: str = "",
    **more: Any,
) -> Any:
    """Declare a setting: a field of a dataclass whose annotation gives the type of its values.

    The annotation is `bool`, `int`, `float` or `str`, a union of these and `None`, any type if
    there is a `check`, or `Any` for values that are checked elsewhere. `auto` in addition to
    numbers is a choice: `int | str` with `choices=("auto",)`.

    Args:
        default: The default value.
        help: One or two sentences for YAML comments, `featcal settings` and the documentation.
        ge: Smallest number.
        gt: Lower bound that values must exceed.
        le: Largest number.
        choices: Accepted values, in addition to numbers if the annotation allows these.
        accepts: Accepted values in words, if annotation, bounds and choices do not describe them.
        check: Test of a value, if annotation, bounds and choices are not enough.
        group: Heading of the section in YAML, by default the previous setting's.
        **more: Further metadata of the field, such as the command line name of its value.
    """
    bounds = {"ge": ge, "gt": gt, "le": le}
    values = {"choices": tuple(choices), "accepts": accepts, "check": check}
    metadata = {"help": help, **bounds, **values, "group": group, **more}
    if default == {}:
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def same_as(kind: type, name: str, **changes: Any) -> Any:
    """Declare a setting that another dataclass has too, with changes of the declaration."""
    declared = kind.__dataclass_fields__[name]  # type: ignore[attr-defined]
    metadata = {**declared.metadata, "group": "", "of": kind, **changes}
    return dataclasses.field(default=declared.default, metadata=metadata)


def is_shared(field: Field[Any], kind: type) -> bool:
    """Return True for a setting declared by `same_as` from a setting of `kind`."""
    return field.metadata.get("of") is kind


def shared_part(settings: Any, kind: type[T], **changes: Any) -> T:
    """Return a `kind` with the settings that it shares by `same_as`."""
    names = [field.name for field in settings_of(type(settings)) if is_shared(field, kind)]
    return kind(**{**{name: getattr(settings, name) for name in names}, **changes})


def settings_of(kind: type) -> list[Field[Any]]:
    """Return the settings of a dataclass, declared ones before inherited ones."""
    declared = {field.name: field for field in dataclasses.fields(kind) if "help" in field.metadata}
    order = dict.fromkeys(name for base in kind.__mro__ for name in inspect.get_annotations(base))
    return [declared[name] for name in order if name in declared]


def problems_of(settings: Any) -> list[str]:
    """Return a phrase for each setting whose value is not accepted."""
    values = {field: getattr(settings, field.name) for field in settings_of(type(settings))}
    return [
        f"{field.name} must be {accepted_values(field)}, got {value!r:.100}"
        for field, value in values.items()
        if not _accepts(field, value)
    ]


def check_settings(settings: Any) -> None:
    """Refuse settings with values that are not accepted.

    Raises:
        ValueError: If there are any, naming each.
    """
    if problems := problems_of(settings):
        raise ValueError("; ".join(f"method.{problem}" for problem in problems))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of dataclasses of settings, which are checked at construction."""

    def __post_init__(self) -> None:
        check_settings(self)


def accepted_values(field: Field[Any]) -> str:
    """Return the accepted values of a setting in words."""
    kinds, rules = _kinds(field), field.metadata
    words = ["null"] if NoneType in kinds else []
    choices = [yaml_word(choice) for choice in rules["choices"]]
    if rules["accepts"]:
        words.append(rules["accepts"])
    elif int in kinds or float in kinds:
        words += [*choices, ("an integer" if int in kinds else "a finite number") + _bounds(rules)]
    elif choices:
        words.append(f"one of {', '.join(choices)}")
    else:
        words.append("true or false" if bool in kinds else "a text")
    return " or ".join(words)


def yaml_word(value: Any) -> str:
    """Return a value in YAML's one-line form."""
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def is_number(value: Any) -> bool:
    """Return True for a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_integer(value: Any, least: int) -> bool:
    """Return True for an integer of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_text_list(value: Any, of: Sequence[str] | None = None) -> bool:
    """Return True for a list of texts that are not empty, and all in `of` if it is given."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(text, str) and text and (of is None or text in of) for text in value)
    )


def _kinds(field: Field[Any]) -> Sequence[Any]:
    return get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)


def _bounds(rules: Any) -> str:
    words = [f"{sign} {rules[key]:g}" for key, sign in _SIGNS.items() if rules[key] is not None]
    return (" " + " and ".join(words)).replace("e+", "e") if words else ""


_SIGNS = {"ge": ">=", "gt": ">", "le": "at most"}


def _accepts(field: Field[Any], value: Any) -> bool:
    kinds, rules = _kinds(field), field.metadata
    if value is None and NoneType in kinds:
        return True
    if rules["check"] is not None:
        return rules["check"](value)
    # `1 in (True,)` holds in Python, so the type is compared too.
    if any(type(value) is type(choice) and value == choice for choice in rules["choices"]):
        return True
    if int in kinds or float in kinds:
        return _is_within(value, rules) and (float in kinds or isinstance(value, int))
    if rules["choices"] or Any in kinds:
        return not rules["choices"]
    return isinstance(value, bool) if bool in kinds else isinstance(value, str) and value != ""


def _is_within(value: Any, rules: Any) -> bool:
    least, above, most = (rules[key] for key in _SIGNS)
    return (
        is_number(value)
        and (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
    )
