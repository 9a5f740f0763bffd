"""The settings of every method, as its docstrings, signatures and checks describe them."""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fusion_bench_featcal.settings import FeatCalSettings

_WIDTH = 80
_WORDS = {
    r"(?:[a-z]+\.)*Mapping\[.*\]": "a mapping",
    r"(?:[a-z]+\.)*Sequence\[.*?\]": "a list of names",
    r"\bbool\b": "true or false",
    r"\bstr\b": "a text",
    r"\bint\b": "an integer",
    r"\bfloat\b": "a number",
    r"\bNone\b": "null",
}
_ENTRY = re.compile(r"(\w+): (.*)")


@dataclass(frozen=True)
class Setting:
    """One setting of a method."""

    name: str  # the key is `method.<name>`
    default: Any
    values: str  # that are accepted
    meaning: str


def documented(text: str | None, section: str) -> dict[str, str]:
    """Entries of a section of a Google-style docstring: name -> description on one line."""
    lines = inspect.cleandoc(text or "").splitlines()
    if f"{section}:" not in lines:
        return {}
    entries: dict[str, str] = {}
    name = ""
    for line in lines[lines.index(f"{section}:") + 1 :]:
        if line and not line.startswith(" "):
            break
        entry = _ENTRY.fullmatch(line.strip())
        if line.startswith("    ") and not line.startswith("     "):
            name = entry[1] if entry else ""  # "" for **more
            entries |= {name: entry[2]} if entry else {}
        elif name and line.strip():
            entries[name] += f" {line.strip()}"
    return entries


def settings_of(
    source: Any,
    values: Mapping[str, str],
    names: Iterable[str] | None = None,
) -> list[Setting]:
    """Settings that a dataclass's fields or a callable's parameters describe."""
    section = "Attributes" if isinstance(source, type) else "Args"
    descriptions = documented(source.__doc__, section)
    parameters = inspect.signature(source).parameters
    chosen = [n for n in parameters if n in descriptions] if names is None else names
    return [
        Setting(
            name,
            parameters[name].default,
            values.get(name, _annotation(parameters[name].annotation)),
            descriptions[name],
        )
        for name in chosen
    ]


def _annotation(annotation: Any) -> str:
    """Accepted values in YAML's words, where no check says more."""
    if annotation is Any:
        return "null or as its meaning says"
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    for pattern, word in _WORDS.items():
        text = re.sub(pattern, word, text)
    return text.replace(" | ", " or ")


def _featcal() -> list[Setting]:
    from fusion_bench_featcal.algorithm import FeatCalAlgorithm

    return [*_fields(FeatCalSettings.names()), *settings_of(FeatCalAlgorithm.__init__, {})]


def _fields(names: Iterable[str]) -> list[Setting]:
    from fusion_bench_featcal.setting_checks import ACCEPTED

    return settings_of(FeatCalSettings, ACCEPTED, names)


def _compare() -> list[Setting]:
    from fusion_bench_featcal.comparison import ComparisonAlgorithm
    from fusion_bench_featcal.comparison.grid import GridChoices

    return [*settings_of(GridChoices, {}), *settings_of(ComparisonAlgorithm.__init__, {})]


def _diagnose() -> list[Setting]:
    from fusion_bench_featcal.diagnosis import DiagnosisAlgorithm

    return [*settings_of(DiagnosisAlgorithm.__init__, {}), *_featcal()]


def _correction(name: str) -> Callable[[], list[Setting]]:
    def settings() -> list[Setting]:
        from fusion_bench_featcal import methods

        method = getattr(methods, name)
        meanings: dict[str, str] = {}
        for kind in reversed(method.__mro__):
            meanings |= documented(kind.__doc__, "Attributes")
        own = [
            Setting(key, getattr(method, key), method.checks[key][0], meanings[key])
            for key in method._config_mapping
        ]
        return [*_fixed(_BASE_METHOD), *own]

    return settings


_BASE_METHOD = {
    "base_method": "Config of the upstream merger (method@method.base_method=task_arithmetic); "
    "None takes the pool's `_merged_` model."
}


def _fixed(keys: Mapping[str, str]) -> list[Setting]:
    """Settings of which None is the default."""
    return [Setting(name, None, _annotation(Any), meaning) for name, meaning in keys.items()]


def _merger(name: str) -> Callable[[], list[Setting]]:
    def settings() -> list[Setting]:
        from fusion_bench_featcal import methods
        from fusion_bench_featcal.methods.mergers import MERGER_SETTINGS

        kind = getattr(methods, name)
        choices = kind.choices
        accepted = {key: wanted for key, (wanted, _) in choices.checks.items()}
        options = [
            replace(setting, default=getattr(choices, setting.name))
            for setting in settings_of(type(choices), accepted, kind.options)
        ]
        return [*_fields(MERGER_SETTINGS), *options]

    return settings


def _anchor_only() -> list[Setting]:
    from fusion_bench_featcal.methods.anchor_only import ANCHOR_SETTINGS

    return [*_fixed(_BASE_METHOD), *_fields(ANCHOR_SETTINGS)]


def _batch_norm() -> list[Setting]:
    from fusion_bench_featcal.methods.batch_norm import BATCH_NORM_SETTINGS

    return [*_fixed(_BASE_METHOD), *_fields(BATCH_NORM_SETTINGS)]


def _distillation() -> list[Setting]:
    from fusion_bench_featcal.methods import Distillation
    from fusion_bench_featcal.methods.distillation import DISTILLATION_SETTINGS

    accepted = {key: wanted for key, (wanted, _) in Distillation.checks.items()}
    own = settings_of(Distillation, accepted, Distillation.checks)
    return [*_fixed(_BASE_METHOD), *own, *_fields(DISTILLATION_SETTINGS)]


METHODS: dict[str, Callable[[], list[Setting]]] = {
    "featcal": _featcal,
    "compare": _compare,
    "diagnose": _diagnose,
    "surgery": _correction("Surgery"),
    "prob_surgery": _correction("ProbSurgery"),
    "ridge_surgery": _correction("RidgeSurgery"),
    "featcal_baselines/surgery_v2": _correction("SurgeryV2"),
    "featcal_baselines/anchor_only": _anchor_only,
    "featcal_baselines/batch_norm_statistics": _batch_norm,
    "featcal_baselines/distillation": _distillation,
    "featcal_baselines/regmean": _merger("RegMean"),
    "featcal_baselines/regmean_plusplus": _merger("RegMeanPlusPlus"),
    "featcal_baselines/lot": _merger("Lot"),
    "featcal_baselines/prodistill": _merger("ProDistill"),
}
"""`method=<name>` -> its settings."""


def settings_text(method: str, settings: Iterable[Setting]) -> str:
    """Settings for a page of 80 columns."""
    lines = [f"method={method}", "method.<name>=<value> sets one; null stands for None"]
    for setting in settings:
        lines += ["", f"{setting.name} = {_as_yaml(setting.default)}"]
        indent = " " * 4
        for text in (f"values: {setting.values}", setting.meaning):
            lines += textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)


def other_methods() -> str:
    """The names of all methods, for a page of 80 columns."""
    text = f"other methods: featcal settings METHOD, one of {', '.join(METHODS)}"
    return textwrap.fill(text, _WIDTH, break_on_hyphens=False)


def _as_yaml(value: Any) -> str:
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
