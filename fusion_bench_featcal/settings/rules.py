"""The rule that the settings name: `rule` and its numbers -> a rule object."""

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_type_hints

from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.files.classes import named_class
from fusion_bench_featcal.rules import Rule
from fusion_bench_featcal.settings import BY_RULE, OF_RULES, FeatCalSettings, remedy_of

BY_NAME: Mapping[str, str] = {
    "paper": "fusion_bench_featcal.rules.paper.Paper",
    "plus": "fusion_bench_featcal.rules.plus.Plus",
}
"""`rule` -> its class, imported when it is needed."""


def rule_of(settings: FeatCalSettings) -> Rule:
    """Return the rule object for the settings.

    A class named by `_target_` receives the settings that are its fields, and the other keys of
    the mapping. An object is returned unchanged.

    Raises:
        ValueError: If a class cannot be imported, is not a rule, or rejects an argument, or if a
            setting is changed that the rule does not have.
    """
    if not isinstance(settings.rule, str | Mapping):
        name = type(settings.rule).__name__
        _refuse_changes(settings, settings.rule, name, f"set it there, {name}(...)")
        return settings.rule
    options = {} if isinstance(settings.rule, str) else dict(settings.rule)
    target = options.pop("_target_", settings.rule)
    kind = named_class(BY_NAME.get(target, target), "rule", "MyRule")
    if not is_dataclass(kind) or not hasattr(kind, "turns"):
        raise ValueError(f"rule: {target} is no rule: a dataclass with turns and sums")
    shared = {field.name for field in fields(kind)} & {f.name for f in fields(FeatCalSettings)}
    _refuse_changes(settings, kind, target, "", shared)
    given = {name: getattr(settings, name) for name in shared}
    values = {name: value for name, value in given.items() if value is not None}
    names = [field.name for field in fields(kind) if field.init]
    if options:
        refuse_unknown(options, names, f"rule: {target}: option ")
        _check_types(options, kind, target)
    try:
        return cast(Any, kind)(**values | options)
    except Exception as error:  # a user's class may raise anything
        typed = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ValueError(f"rule: {target}({typed}): {error}") from error


def value_of(settings: FeatCalSettings, name: str) -> Any:
    """Return a setting of `BY_RULE`, which is the rule's attribute if it is null.

    Raises as `rule_of`.
    """
    value = getattr(settings, name)
    return getattr(rule_of(settings), name) if value is None else value


def completed(settings: FeatCalSettings) -> FeatCalSettings:
    """Return the settings with the values of their rule, equal for equal methods.

    Raises as `rule_of`.
    """
    return settings.replace(**{name: value_of(settings, name) for name in BY_RULE})


def _check_types(options: Mapping[str, Any], kind: Any, target: str) -> None:
    """Refuse options of another type than annotated. Only bool, int, float, str and None count."""
    hints = get_type_hints(kind)
    for name, value in options.items():
        kinds = get_args(hints[name]) if isinstance(hints[name], UnionType) else (hints[name],)
        accepted = {*kinds, int} if float in kinds else {*kinds}
        if accepted <= {bool, int, float, str, NoneType} and type(value) not in accepted:
            words = " or ".join(part.__name__ for part in kinds)
            raise ValueError(f"rule: {target}: option {name} must be {words}, got {value!r}")


def _refuse_changes(
    settings: FeatCalSettings, rule: Any, name: str, remedy: str, shared: Collection[str] = ()
) -> None:
    """Refuse changed settings of rules that this rule neither takes nor has with that value."""
    for setting in (name for name in OF_RULES if name not in shared):
        value = getattr(settings, setting)
        if value not in (getattr(FeatCalSettings, setting), getattr(rule, setting, None)):
            text = remedy or remedy_of(setting)
            raise ValueError(f"{option(setting, value)} has no part in the rule {name}: {text}")
