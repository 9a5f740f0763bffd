"""`featcal settings`: prints the declared settings of a method."""

import json
import textwrap
from dataclasses import Field
from pkgutil import resolve_name
from typing import Any

from fusion_bench_featcal.settings.fields import accepted_values, settings_of, yaml_word

_WIDTH = 80
_RUNS = {
    "featcal": "fusion_bench_featcal.algorithm.FeatCalAlgorithm",
    "compare": "fusion_bench_featcal.lab.compare.ComparisonAlgorithm",
    "diagnose": "fusion_bench_featcal.lab.diagnosis.DiagnosisAlgorithm",
}
"""`method=<name>` -> its class, for methods that are not baselines."""


def method_names() -> list[str]:
    """Return the names of all methods with settings, in the form of `method=<name>`."""
    from fusion_bench_featcal.lab.rivals.standalone import ALGORITHMS

    return [*_RUNS, *ALGORITHMS]


def settings_of_method(method: str) -> list[Field[object]]:
    """Return the settings that a method's FusionBench class declares."""
    from fusion_bench_featcal.lab.rivals.standalone import ALGORITHMS

    algorithm: Any = resolve_name(_RUNS[method]) if method in _RUNS else ALGORITHMS[method]
    return [field for kind in algorithm.settings_classes for field in settings_of(kind)]


def settings_page(method: str, *, as_json: bool) -> str:
    """Return a method's settings as JSON, or as a text of 80 columns."""
    lines = [f"method={method}", "Set one with method.<name>=<value>; null stands for None"]
    records = []
    for field in settings_of_method(method):
        values, meaning = accepted_values(field), field.metadata["help"]
        record = {"name": field.name, "default": field.default}
        records.append(record | {"values": values, "meaning": meaning})
        lines += ["", f"{field.name} = {yaml_word(field.default)}"]
        for text in (f"values: {values}", meaning):
            lines += [f"    {line}" for line in textwrap.wrap(text, _WIDTH - 4)]
    if as_json:
        return json.dumps(records, indent=1)
    text = f"other methods: featcal settings METHOD, one of {', '.join(method_names())}"
    return "\n".join([*lines, "", textwrap.fill(text, _WIDTH, break_on_hyphens=False)])
