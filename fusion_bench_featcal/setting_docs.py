"""`featcal settings`: prints the declared settings of a method."""

import json
import textwrap
from collections.abc import Iterable
from dataclasses import Field
from importlib import import_module
from typing import Any

from fusion_bench_featcal.setting_fields import accepted_values, settings_of, yaml_word

_WIDTH = 80
_RUNS = {
    "featcal": "algorithm.FeatCalAlgorithm",
    "compare": "lab.compare.ComparisonAlgorithm",
    "diagnose": "lab.diagnosis.DiagnosisAlgorithm",
}
"""`method=<name>` -> its class, for methods outside the registry."""


def method_names() -> list[str]:
    """Return the names of all methods with settings, in the form of `method=<name>`."""
    from fusion_bench_featcal.lab.rivals.registry import all_methods

    return [*_RUNS, *all_methods()]


def algorithm_class(method: str) -> Any:
    """Return the FusionBench class of a method, whose `setting_kinds` declare the settings."""
    if method in _RUNS:
        module, _, name = _RUNS[method].rpartition(".")
        return getattr(import_module(f"{__package__}.{module}"), name)
    from fusion_bench_featcal.lab.rivals.registry import all_methods
    from fusion_bench_featcal.lab.rivals.standalone import algorithm_of

    return algorithm_of(all_methods()[method])


def declared_settings(kinds: Iterable[type]) -> list[Field[Any]]:
    """Return the settings of several dataclasses, grouped by section."""
    sections: dict[str, list[Field[Any]]] = {}
    group = ""
    for field in (field for kind in kinds for field in settings_of(kind)):
        group = field.metadata["group"] or group
        sections.setdefault(group, []).append(field)
    return [field for fields in sections.values() for field in fields]


def settings_page(method: str, *, as_json: bool) -> str:
    """Return a method's settings as JSON, or as a text of 80 columns."""
    settings = declared_settings(algorithm_class(method).setting_kinds)
    if as_json:
        return json.dumps([_described(field) for field in settings], indent=1)
    lines = [f"method={method}", "method.<name>=<value> sets one; null stands for None"]
    for field in settings:
        lines += ["", f"{field.name} = {yaml_word(field.default)}"]
        indent = " " * 4
        for text in (f"values: {accepted_values(field)}", field.metadata["help"]):
            lines += textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
    text = f"other methods: featcal settings METHOD, one of {', '.join(method_names())}"
    return "\n".join([*lines, "", textwrap.fill(text, _WIDTH, break_on_hyphens=False)])


def _described(field: Field[Any]) -> dict[str, Any]:
    values, meaning = accepted_values(field), field.metadata["help"]
    return {"name": field.name, "default": field.default, "values": values, "meaning": meaning}
