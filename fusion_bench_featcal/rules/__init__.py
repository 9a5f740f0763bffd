"""Rules: frozen dataclasses whose fields are their settings, one file each."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pkgutil import resolve_name
from typing import Any, cast

from fusion_bench_featcal.rules.rule import GroupSums, Linear, Rule
from fusion_bench_featcal.settings import OF_THE_PAPER, FeatCalSettings

__all__ = ["BY_NAME", "GroupSums", "Linear", "Rule", "rule_of"]

BY_NAME: Mapping[str, str] = {
    "paper": "fusion_bench_featcal.rules.paper.Paper",
    "plus": "fusion_bench_featcal.rules.plus.Plus",
}
"""`method.rule` -> its class, imported when it is needed."""


def rule_of(settings: FeatCalSettings) -> Rule:
    """Return the rule object for the settings.

    A class named by `_target_` receives the settings that are its fields, and the other keys of
    the mapping. An object is returned unchanged.

    Raises:
        ValueError: If a class cannot be imported, is not a rule, or rejects an argument.
    """
    if not isinstance(settings.rule, str | Mapping):
        return settings.rule
    options = {} if isinstance(settings.rule, str) else dict(settings.rule)
    target = options.pop("_target_", settings.rule)
    kind: Any
    try:
        kind = resolve_name(BY_NAME.get(target, target))
    except (AttributeError, ImportError, ValueError) as error:
        raise ValueError(
            f"method.rule: _target_ {target!r} cannot be imported ({error}). Give "
            "my_module.MyRule, with my_module.py in the folder of the run or installed"
        ) from error
    if not is_dataclass(kind) or not hasattr(kind, "turns"):
        raise ValueError(f"method.rule: {target} is no rule: a dataclass with turns and sums")
    shared = {field.name for field in fields(kind)} & set(FeatCalSettings.names())
    if settings.task_weights is not None and "task_weights" not in shared:
        raise ValueError(f"method.task_weights: {target} weighs all tasks equally. Set it to null")
    for name in set(OF_THE_PAPER) - shared:
        if (value := getattr(settings, name)) != (default := getattr(FeatCalSettings, name)):
            raise ValueError(
                f"method.{name}={value} has no part in {target}: leave it at its default, {default}"
            )
    values = {name: getattr(settings, name) for name in shared}
    if "task_weights" in shared:
        values["task_weights"] = settings.task_weights or {}
    try:
        rule: Any = cast(Any, kind)(**values | options)
    except TypeError as error:
        names = [field.name for field in fields(kind) if field.init]
        raise ValueError(f"method.rule: {target}: {error}. It has {', '.join(names)}") from error
    return rule
